// SPDX-License-Identifier: Apache-2.0
#include "commit/target.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <string>

#include "testing/child_process.h"
#include "testing/faulty_files.h"
#include "testing/temporary_directory.h"

namespace fastpersist::commit {
namespace {

using testing::FaultyFiles;
using ::testing::HasSubstr;
using testing::Operation;
using testing::TemporaryDirectory;
using testing::WriteFile;

Result<Target> Resolve(const std::string& path) { return ResolveTarget(path, file::RealFileOps()); }

// errno of a refused target; 0 when it was accepted.
int Refusal(const std::string& path) {
  const auto target = Resolve(path);
  if (target) return 0;
  EXPECT_EQ(target.error().code, ErrorCode::kStorage);
  EXPECT_EQ(target.error().path, path);
  return target.error().system_errno;
}

bool LeadsTo(const Target& target, const std::string& directory) {
  struct stat of_target{};
  struct stat of_directory{};
  return ::fstat(target.directory.get(), &of_target) == 0 &&
         ::stat(directory.c_str(), &of_directory) == 0 && of_target.st_dev == of_directory.st_dev &&
         of_target.st_ino == of_directory.st_ino;
}

TEST(TargetTest, ANewNameIsTakenAsItIs) {
  const TemporaryDirectory directory;
  const auto target = Resolve(directory / "model.pt");
  ASSERT_TRUE(target);
  EXPECT_EQ(target->name, "model.pt");
  EXPECT_EQ(target->path, directory / "model.pt");
  EXPECT_TRUE(LeadsTo(*target, directory.path()));
  EXPECT_FALSE(target->replaced);
  EXPECT_FALSE(target->special);
  EXPECT_FALSE(target->mounted);
  EXPECT_TRUE(directory.names().empty()) << "resolving touches nothing";
}

TEST(TargetTest, AnExistingFileGivesItsModeAndGroup) {
  const TemporaryDirectory directory;
  WriteFile(directory / "model.pt", "old", 0640);
  const auto target = Resolve(directory / "model.pt");
  ASSERT_TRUE(target);
  ASSERT_TRUE(target->replaced);
  EXPECT_EQ(target->replaced->mode, 0640U);
  struct stat info{};
  ASSERT_EQ(::stat((directory / "model.pt").c_str(), &info), 0);
  EXPECT_EQ(target->replaced->group, info.st_gid);
}

TEST(TargetTest, ANameWithoutADirectoryMeansTheWorkingDirectory) {
  const auto target = Resolve("fastpersist-target-test-no-such-file");
  ASSERT_TRUE(target);
  EXPECT_TRUE(LeadsTo(*target, "."));
}

TEST(TargetTest, NamesOfNonAsciiBytesAreNotTouched) {
  const TemporaryDirectory directory;
  const std::string name = "mod\xc3\xa8le \xff\n.pt";
  const auto target = Resolve(directory / name);
  ASSERT_TRUE(target);
  EXPECT_EQ(target->name, name);
}

TEST(TargetTest, APathThatNamesNoFileIsRefused) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "sub");
  WriteFile(directory / "file", "x");
  EXPECT_EQ(Refusal(""), ENOENT);
  EXPECT_EQ(Refusal("/"), EISDIR);
  EXPECT_EQ(Refusal("."), EISDIR);
  EXPECT_EQ(Refusal(".."), EISDIR);
  EXPECT_EQ(Refusal(directory / "sub"), EISDIR);
  EXPECT_EQ(Refusal(directory / "sub/"), EISDIR);
  EXPECT_EQ(Refusal(directory / "sub/."), EISDIR);
  EXPECT_EQ(Refusal(directory / "sub/.."), EISDIR);
  EXPECT_EQ(Refusal(directory / "missing/"), ENOENT);
  EXPECT_EQ(Refusal(directory / "missing/model.pt"), ENOENT);
  EXPECT_EQ(Refusal(directory / "file/"), ENOTDIR);
  EXPECT_EQ(Refusal(directory / "file/model.pt"), ENOTDIR);
}

TEST(TargetTest, AMissingDirectoryIsNamedWithAdvice) {
  const TemporaryDirectory directory;
  const auto target = Resolve(directory / "missing/model.pt");
  ASSERT_FALSE(target);
  EXPECT_THAT(target.error().detail, HasSubstr(directory / "missing"));
  EXPECT_THAT(target.error().advice, HasSubstr("create the directory"));
}

TEST(TargetTest, TheLongestNameIsAcceptedAndOneByteMoreIsNot) {
  const TemporaryDirectory directory;
  EXPECT_EQ(Refusal(directory / std::string(255, 'n')), 0);
  EXPECT_EQ(Refusal(directory / std::string(256, 'n')), ENAMETOOLONG);
  const auto target = Resolve(directory / std::string(256, 'n'));
  ASSERT_FALSE(target);
  EXPECT_THAT(target.error().Message(), HasSubstr("256 bytes"));
}

TEST(TargetTest, ASymbolicLinkIsFollowedToItsDirectory) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "real");
  WriteFile(directory / "real/weights.pt", "old", 0600);
  for (const std::string& text : {std::string("real/weights.pt"), directory / "real/weights.pt"}) {
    std::filesystem::remove(directory / "link.pt");
    std::filesystem::create_symlink(text, directory / "link.pt");
    const auto target = Resolve(directory / "link.pt");
    ASSERT_TRUE(target) << text;
    EXPECT_EQ(target->name, "weights.pt");
    EXPECT_TRUE(LeadsTo(*target, directory / "real"));
    ASSERT_TRUE(target->replaced);
    EXPECT_EQ(target->replaced->mode, 0600U);
    EXPECT_EQ(target->path, directory / "link.pt") << "messages name what the user named";
  }
}

TEST(TargetTest, AChainOfLinksIsFollowedRelativeToEachLink) {
  const TemporaryDirectory directory;
  std::filesystem::create_directories(directory / "a/b");
  std::filesystem::create_symlink("a/second", directory / "first");
  std::filesystem::create_symlink("b/third", directory / "a/second");
  std::filesystem::create_symlink("../../end.pt", directory / "a/b/third");
  const auto target = Resolve(directory / "first");
  ASSERT_TRUE(target);
  EXPECT_EQ(target->name, "end.pt");
  EXPECT_TRUE(LeadsTo(*target, directory.path()));
}

TEST(TargetTest, ADanglingLinkNamesTheFileThatWillBeMade) {
  const TemporaryDirectory directory;
  std::filesystem::create_symlink("not-yet.pt", directory / "link.pt");
  const auto target = Resolve(directory / "link.pt");
  ASSERT_TRUE(target);
  EXPECT_EQ(target->name, "not-yet.pt");
  EXPECT_FALSE(target->replaced);

  std::filesystem::create_symlink("missing/not-yet.pt", directory / "lost.pt");
  EXPECT_EQ(Refusal(directory / "lost.pt"), ENOENT);
}

TEST(TargetTest, ALinkToADirectoryIsADirectory) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "sub");
  std::filesystem::create_symlink("sub", directory / "link");
  EXPECT_EQ(Refusal(directory / "link"), EISDIR);
}

TEST(TargetTest, LinksInACircleAreRefused) {
  const TemporaryDirectory directory;
  std::filesystem::create_symlink("itself", directory / "itself");
  std::filesystem::create_symlink("two", directory / "one");
  std::filesystem::create_symlink("one", directory / "two");
  EXPECT_EQ(Refusal(directory / "itself"), ELOOP);
  EXPECT_EQ(Refusal(directory / "one"), ELOOP);
}

TEST(TargetTest, AsManyLinksAreFollowedAsTheKernelFollows) {
  const TemporaryDirectory directory;
  WriteFile(directory / "0", "end");
  for (int i = 1; i <= 41; ++i) {
    std::filesystem::create_symlink(std::to_string(i - 1), directory / std::to_string(i));
  }
  for (const char* const name : {"40", "41"}) {
    const int kernel = ::open((directory / name).c_str(), O_WRONLY | O_CLOEXEC);
    const int kernel_error = kernel < 0 ? errno : 0;
    if (kernel >= 0) ::close(kernel);
    EXPECT_EQ(Refusal(directory / name), kernel_error) << name;
  }
}

TEST(TargetTest, WhatIsNoRegularFileIsSpecial) {
  const TemporaryDirectory directory;
  ASSERT_EQ(::mkfifo((directory / "fifo").c_str(), 0600), 0);
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  for (const std::string& path :
       {directory / "fifo", std::string("/dev/null"), "/dev/fd/" + std::to_string(ends[1])}) {
    const auto target = Resolve(path);
    ASSERT_TRUE(target) << path;
    EXPECT_TRUE(target->special) << path;
  }
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(TargetTest, ADescriptorOfARegularFileIsNotReplaced) {
  const TemporaryDirectory directory;
  WriteFile(directory / "file", "x");
  const base::UniqueFd fd(::open((directory / "file").c_str(), O_WRONLY | O_CLOEXEC));
  const auto target = Resolve("/dev/fd/" + std::to_string(fd.get()));
  ASSERT_TRUE(target);
  EXPECT_TRUE(target->special);
}

TEST(TargetTest, ADescriptorThatIsNotOpenIsNoPlaceForATemporary) {
  const auto target = Resolve("/dev/fd/987654");
  ASSERT_TRUE(target);
  EXPECT_TRUE(target->special) << "opening it will say what is wrong";
}

TEST(TargetTest, FailuresOfTheFileSystemAreReported) {
  const TemporaryDirectory directory;
  WriteFile(directory / "model.pt", "old");
  const struct {
    Operation::Kind kind;
    int system_errno;
    const char* operation;
  } faults[] = {{Operation::Kind::kOpenDirectory, EACCES, "open directory"},
                {Operation::Kind::kOpenDirectory, EMFILE, "open directory"},
                {Operation::Kind::kStatLink, EIO, "look at"},
                {Operation::Kind::kStatLink, EACCES, "look at"}};
  for (const auto& fault : faults) {
    const FaultyFiles files(
        {{.kind = fault.kind, .system_errno = fault.system_errno, .from_then_on = true}});
    const auto target = ResolveTarget(directory / "model.pt", files);
    ASSERT_FALSE(target);
    EXPECT_EQ(target.error().system_errno, fault.system_errno);
    EXPECT_EQ(target.error().operation, fault.operation);
    EXPECT_EQ(target.error().path, directory / "model.pt");
    EXPECT_FALSE(target.error().advice.empty());
  }
}

// A read-only file can be replaced by whoever owns the directory; nobody expects that.
const testing::RegisterRole kResolveReadOnly("resolves a read-only file",
                                             [](const testing::Arguments& arguments) {
                                               testing::GiveUpPrivileges();
                                               return Refusal(arguments.at(0));
                                             });

TEST(TargetTest, AReadOnlyFileIsRefused) {
  const TemporaryDirectory directory;
  std::filesystem::permissions(directory.path(), std::filesystem::perms::all);
  WriteFile(directory / "model.pt", "old", 0444);
  EXPECT_EQ(testing::RunRole("resolves a read-only file", {directory / "model.pt"}).exit_code,
            EACCES);
}

TEST(TargetTest, AFileInAnUnreachableDirectoryIsRefused) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "closed");
  ::chmod((directory / "closed").c_str(), 0000);
  EXPECT_EQ(
      testing::RunRole("resolves a read-only file", {directory / "closed/model.pt"}).exit_code,
      EACCES);
}

}  // namespace
}  // namespace fastpersist::commit
