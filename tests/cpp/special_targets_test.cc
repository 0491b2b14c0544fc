// SPDX-License-Identifier: Apache-2.0
// Saves to what is no plain file in a writable directory: pipes, devices, mounts, read-only places,
// and under limits. The process never dies of it.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <future>
#include <string>

#include "base/unique_fd.h"
#include "testing/child_process.h"
#include "testing/save_content.h"
#include "testing/temporary_directory.h"

namespace fastpersist::checkpoint {
namespace {

using testing::Arguments;
using ::testing::ElementsAre;
using testing::GenerationFile;
using testing::GenerationOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::ReadFile;
using testing::RegisterRole;
using testing::Report;
using testing::RunRole;
using testing::SaveContent;
using ::testing::StartsWith;
using testing::TemporaryDirectory;
using testing::WriteFile;

constexpr std::size_t kSize = 300'000;

std::string Said(const Result<SaveInfo>& saved) {
  return saved ? "saved"
               : fmt::format("errno {} {}", saved.error().system_errno, saved.error().Message());
}

// All that can be read until the other side closes.
std::string ReadAll(int fd) {
  std::string all;
  std::array<char, 65536> piece{};
  for (ssize_t size = 0; (size = ::read(fd, piece.data(), piece.size())) > 0;) {
    all.append(piece.data(), static_cast<std::size_t>(size));
  }
  return all;
}

TEST(SpecialTargetsTest, AFifoGetsTheBytesInOrder) {
  const TemporaryDirectory directory;
  ASSERT_EQ(::mkfifo((directory / "fifo").c_str(), 0600), 0);
  const std::string content = GenerationFile(1, kSize);
  auto reader = std::async(std::launch::async, [&] {
    const base::UniqueFd fd(::open((directory / "fifo").c_str(), O_RDONLY | O_CLOEXEC));
    return ReadAll(fd.get());
  });
  const auto saved = SaveContent(content, directory / "fifo", {.block_bytes = 4096});
  EXPECT_TRUE(reader.get() == content);
  ASSERT_TRUE(saved) << saved.error().Message();
  EXPECT_EQ(saved->engine, Engine::kBuffered);
  EXPECT_THAT(directory.names(), ElementsAre("fifo"));
}

TEST(SpecialTargetsTest, ADescriptorOfAPipeGetsTheBytesInOrder) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const base::UniqueFd read_end(ends[0]);
  base::UniqueFd write_end(ends[1]);
  const std::string content = GenerationFile(1, kSize);
  auto reader = std::async(std::launch::async, [&] { return ReadAll(read_end.get()); });
  const auto saved = SaveContent(content, "/dev/fd/" + std::to_string(write_end.get()));
  write_end.Reset();
  EXPECT_TRUE(reader.get() == content);
  EXPECT_TRUE(saved);
}

TEST(SpecialTargetsTest, ADescriptorOfAFileWritesThatFileAndCutsIt) {
  const TemporaryDirectory directory;
  WriteFile(directory / "file", std::string(2 * kSize, 'o'));
  const base::UniqueFd fd(::open((directory / "file").c_str(), O_WRONLY | O_CLOEXEC));
  const std::string content = GenerationFile(1, kSize);
  const auto saved = SaveContent(content, "/proc/self/fd/" + std::to_string(fd.get()));
  ASSERT_TRUE(saved) << saved.error().Message();
  EXPECT_TRUE(ReadFile(directory / "file") == content);
  EXPECT_THAT(directory.names(), ElementsAre("file"));
}

TEST(SpecialTargetsTest, ADescriptorThatIsNotOpenIsAnError) {
  const auto saved = SaveContent("content", "/dev/fd/987654");
  ASSERT_FALSE(saved);
  EXPECT_EQ(saved.error().operation, "open");
  EXPECT_EQ(saved.error().system_errno, ENOENT);
}

TEST(SpecialTargetsTest, TheNullDeviceTakesEverything) {
  const auto saved = SaveContent(GenerationFile(1, kSize), "/dev/null");
  ASSERT_TRUE(saved) << saved.error().Message();
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

TEST(SpecialTargetsTest, AFullDeviceIsAnErrorWithItsOffset) {
  const auto saved = SaveContent(GenerationFile(1, kSize), "/dev/full");
  ASSERT_FALSE(saved);
  EXPECT_EQ(saved.error().operation, "write");
  EXPECT_EQ(saved.error().path, "/dev/full");
  EXPECT_EQ(saved.error().system_errno, ENOSPC);
  EXPECT_EQ(saved.error().offset, 0U);
  EXPECT_THAT(saved.error().advice, HasSubstr("free space"));
}

const RegisterRole kReaderLeaves("saves to a FIFO whose reader leaves",
                                 [](const Arguments& arguments) {
                                   ::signal(SIGPIPE, SIG_DFL);
                                   Report(Said(
                                       SaveContent(GenerationFile(1, 4 << 20), arguments.at(0))));
                                   return 0;
                                 });

TEST(SpecialTargetsTest, AFifoWhoseReaderLeavesIsAnErrorNotTheEnd) {
  const TemporaryDirectory directory;
  ASSERT_EQ(::mkfifo((directory / "fifo").c_str(), 0600), 0);
  testing::ChildProcess child("saves to a FIFO whose reader leaves", {directory / "fifo"});
  {
    const base::UniqueFd fd(::open((directory / "fifo").c_str(), O_RDONLY | O_CLOEXEC));
    char byte = 0;
    EXPECT_EQ(::read(fd.get(), &byte, 1), 1);
  }
  const auto result = child.Wait();
  EXPECT_EQ(result.signal, 0);
  EXPECT_THAT(result.report, StartsWith(fmt::format("errno {} write", EPIPE)));
}

// Mounts are made in a namespace of the child's own: nobody else sees them, and they go with it.
bool EnterOwnMountNamespace() {
  if (::unshare(CLONE_NEWNS) == 0 &&
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0) {
    return true;
  }
  Report("skipped: mounting needs privileges");
  return false;
}

#define SKIP_IF_SKIPPED(result) \
  if ((result).report.starts_with("skipped")) GTEST_SKIP() << (result).report

const RegisterRole kBindMounted("saves to a bind-mounted file", [](const Arguments& arguments) {
  const std::string& source = arguments.at(0);
  const std::string& path = arguments.at(1);
  if (!EnterOwnMountNamespace()) return 0;
  if (::mount(source.c_str(), path.c_str(), nullptr, MS_BIND, nullptr) != 0) {
    Report("skipped: bind mounts are refused");
    return 0;
  }
  const std::string content = GenerationFile(2, kSize);
  Report(Said(SaveContent(content, path)));
  Report(ReadFile(path) == "old" ? "the old file is there" : "the old file is lost");
  Report(Said(SaveContent(content, path, {.atomic = false})));
  Report(ReadFile(path) == content ? "the new file is there" : "the new file is lost");
  return 0;
});

TEST(SpecialTargetsTest, ABindMountedFileIsRefusedBeforeAByteIsWrittenAndTakenInPlace) {
  const TemporaryDirectory directory;
  WriteFile(directory / "source", "old");
  WriteFile(directory / "mounted.pt", "below");
  const auto result =
      RunRole("saves to a bind-mounted file", {directory / "source", directory / "mounted.pt"});
  SKIP_IF_SKIPPED(result);
  EXPECT_THAT(result.report, StartsWith(fmt::format("errno {} replace failed", EBUSY)));
  EXPECT_THAT(result.report, HasSubstr("atomic=False"));
  EXPECT_THAT(result.report, HasSubstr("\nthe old file is there\nsaved\nthe new file is there\n"));
  EXPECT_EQ(GenerationOf(ReadFile(directory / "source")), 2U);
  EXPECT_EQ(ReadFile(directory / "mounted.pt"), "below");
  EXPECT_THAT(directory.temporaries(), IsEmpty());
}

const RegisterRole kSmallDisk("saves to a small file system", [](const Arguments& arguments) {
  const std::string& at = arguments.at(0);
  if (!EnterOwnMountNamespace()) return 0;
  if (::mount("tmpfs", at.c_str(), "tmpfs", 0, "size=1m") != 0) {
    Report("skipped: tmpfs cannot be mounted");
    return 0;
  }
  const std::string path = at + "/model.pt";
  const std::string old = GenerationFile(1, 400'000);
  Report(Said(SaveContent(old, path)));
  Report(Said(SaveContent(GenerationFile(2, 2'000'000), path)));
  Report(ReadFile(path) == old ? "the old file is there" : "the old file is lost");
  const auto entries = std::distance(std::filesystem::directory_iterator(at), {});
  Report(fmt::format("{} file", entries));
  Report(Said(SaveContent(GenerationFile(3, 400'000), path)));
  Report(GenerationOf(ReadFile(path)) == 3U ? "the new file is there" : "the new file is lost");

  ::mount("tmpfs", at.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=1m");
  Report(Said(SaveContent(GenerationFile(4, 400'000), path)));
  Report(Said(SaveContent(GenerationFile(4, 400'000), at + "/another.pt")));
  Report(GenerationOf(ReadFile(path)) == 3U ? "it is still there" : "it is lost");
  return 0;
});

TEST(SpecialTargetsTest, AFullFileSystemIsReportedBeforeAByteIsWritten) {
  const TemporaryDirectory directory;
  const auto result = RunRole("saves to a small file system", {directory.path()});
  SKIP_IF_SKIPPED(result);
  EXPECT_THAT(result.report, StartsWith(fmt::format("saved\nerrno {} preallocate failed", ENOSPC)));
  EXPECT_THAT(result.report, HasSubstr("bytes are needed"));
  EXPECT_THAT(result.report,
              HasSubstr("\nthe old file is there\n1 file\nsaved\nthe new file is there\n"));
}

TEST(SpecialTargetsTest, AReadOnlyFileSystemIsReported) {
  const TemporaryDirectory directory;
  const auto result = RunRole("saves to a small file system", {directory.path()});
  SKIP_IF_SKIPPED(result);
  const std::string existing = fmt::format("\nerrno {} open failed", EROFS);
  const std::string fresh = fmt::format("\nerrno {} create a temporary file failed", EROFS);
  EXPECT_THAT(result.report, HasSubstr(existing));
  EXPECT_THAT(result.report, HasSubstr(fresh));
  EXPECT_THAT(result.report, HasSubstr("\nit is still there\n"));
}

const RegisterRole kUnprivileged("saves without privileges", [](const Arguments& arguments) {
  testing::GiveUpPrivileges();
  const bool atomic = arguments.at(1) == "atomic";
  Report(Said(SaveContent(GenerationFile(2, kSize), arguments.at(0), {.atomic = atomic})));
  return 0;
});

TEST(SpecialTargetsTest, AWritableFileInAReadOnlyDirectoryIsSavedInPlaceWhenAskedTo) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "closed");
  WriteFile(directory / "closed/model.pt", "old", 0666);
  ASSERT_EQ(::chmod((directory / "closed").c_str(), 0555), 0);
  const std::string path = directory / "closed/model.pt";

  const auto refused = RunRole("saves without privileges", {path, "atomic"});
  EXPECT_THAT(refused.report, StartsWith(fmt::format("errno {} create a temporary", EACCES)));
  EXPECT_THAT(refused.report, HasSubstr("atomic=False"));
  EXPECT_EQ(ReadFile(path), "old");

  const auto in_place = RunRole("saves without privileges", {path, "in place"});
  EXPECT_EQ(in_place.report, "saved\n");
  EXPECT_EQ(GenerationOf(ReadFile(path)), 2U);
  EXPECT_EQ(testing::ModeOf(path), 0666U);
  ASSERT_EQ(::chmod((directory / "closed").c_str(), 0755), 0);
}

TEST(SpecialTargetsTest, ADirectoryThatMayNotBeListedTakesAFile) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "dropbox");
  ASSERT_EQ(::chmod((directory / "dropbox").c_str(), 0733), 0);
  const std::string path = directory / "dropbox/model.pt";
  EXPECT_EQ(RunRole("saves without privileges", {path, "atomic"}).report, "saved\n");
  EXPECT_EQ(GenerationOf(ReadFile(path)), 2U);
}

TEST(SpecialTargetsTest, AReadOnlyFileIsNotReplacedBehindTheUsersBack) {
  const TemporaryDirectory directory;
  ASSERT_EQ(::chmod(directory.path().c_str(), 0777), 0);
  WriteFile(directory / "model.pt", "old", 0444);
  for (const char* const how : {"atomic", "in place"}) {
    const auto result = RunRole("saves without privileges", {directory / "model.pt", how});
    EXPECT_THAT(result.report, StartsWith(fmt::format("errno {} open failed", EACCES)));
    EXPECT_THAT(result.report, HasSubstr("permissions"));
  }
  EXPECT_EQ(ReadFile(directory / "model.pt"), "old");
  EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
}

TEST(SpecialTargetsTest, AnUnprivilegedUserSavesWhereHeMay) {
  const TemporaryDirectory directory;
  ASSERT_EQ(::chmod(directory.path().c_str(), 0777), 0);
  const auto result = RunRole("saves without privileges", {directory / "model.pt", "atomic"});
  EXPECT_EQ(result.report, "saved\n");
  EXPECT_EQ(GenerationOf(ReadFile(directory / "model.pt")), 2U);
}

}  // namespace
}  // namespace fastpersist::checkpoint
