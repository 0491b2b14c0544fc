// SPDX-License-Identifier: Apache-2.0
// RLIMIT_FSIZE: a write beyond it raises SIGXFSZ, whose default action ends the process. A save
// must see the limit before the kernel does. Each test runs in a child, with the default action.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <string>

#include "base/unique_fd.h"
#include "testing/child_process.h"
#include "testing/save_content.h"
#include "testing/temporary_directory.h"

namespace fastpersist::checkpoint {
namespace {

using testing::Arguments;
using testing::ChildResult;
using ::testing::ElementsAre;
using testing::GenerationFile;
using testing::GenerationOf;
using ::testing::HasSubstr;
using testing::ReadFile;
using ::testing::StartsWith;
using testing::TemporaryDirectory;
using testing::WriteFile;

constexpr std::size_t kSize = 300'000;

// arguments: path, limit in bytes, "atomic" or "in place" or "descriptor".
const testing::RegisterRole kLimited(
    "saves under a file size limit", [](const Arguments& arguments) {
      std::string path = arguments.at(0);
      ::signal(SIGXFSZ, SIG_DFL);
      const rlimit limit{.rlim_cur = std::stoull(arguments.at(1)), .rlim_max = RLIM_INFINITY};
      if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
      base::UniqueFd fd;
      if (arguments.at(2) == "descriptor") {
        fd.Reset(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
        path = "/dev/fd/" + std::to_string(fd.get());
      }
      const bool atomic = arguments.at(2) != "in place";
      const auto saved = testing::SaveContent(GenerationFile(2, kSize), path, {.atomic = atomic});
      testing::Report(
          saved ? "saved"
                : fmt::format("errno {} {}", saved.error().system_errno, saved.error().Message()));
      return 0;
    });

ChildResult SaveUnderLimit(const std::string& path, std::size_t limit, const std::string& how) {
  return testing::RunRole("saves under a file size limit", {path, std::to_string(limit), how});
}

TEST(FileLimitsTest, ALimitBelowTheSizeIsAnErrorAndNothingIsLost) {
  for (const std::size_t limit : {std::size_t{1}, std::size_t{511}, std::size_t{4096}, kSize / 2,
                                  GenerationFile(2, kSize).size() - 1}) {
    const TemporaryDirectory directory;
    WriteFile(directory / "model.pt", "old");
    const auto result = SaveUnderLimit(directory / "model.pt", limit, "atomic");
    EXPECT_EQ(result.signal, 0) << limit;
    EXPECT_THAT(result.report, StartsWith(fmt::format("errno {} preallocate failed", EFBIG)));
    EXPECT_THAT(result.report, HasSubstr("ulimit -f"));
    EXPECT_EQ(ReadFile(directory / "model.pt"), "old");
    EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
  }
}

TEST(FileLimitsTest, ALimitBetweenTheSizeAndItsPaddingIsEnough) {
  const std::size_t size = GenerationFile(2, kSize).size();
  for (const std::size_t limit : {size, size + 1, size / 512 * 512 + 511}) {
    for (const char* const how : {"atomic", "in place"}) {
      const TemporaryDirectory directory;
      const auto result = SaveUnderLimit(directory / "model.pt", limit, how);
      EXPECT_EQ(result.signal, 0);
      EXPECT_EQ(result.report, "saved\n") << limit;
      EXPECT_EQ(GenerationOf(ReadFile(directory / "model.pt")), 2U);
      EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
    }
  }
}

TEST(FileLimitsTest, ALimitHoldsInPlaceAndThroughADescriptorToo) {
  for (const char* const how : {"in place", "descriptor"}) {
    const TemporaryDirectory directory;
    WriteFile(directory / "model.pt", "old");
    const auto result = SaveUnderLimit(directory / "model.pt", 10'000, how);
    EXPECT_EQ(result.signal, 0) << how;
    EXPECT_THAT(result.report, StartsWith(fmt::format("errno {}", EFBIG))) << how;
    EXPECT_TRUE(ReadFile(directory / "model.pt") == "old") << how;
  }
}

TEST(FileLimitsTest, ALimitOfNothingIsAnErrorOnEveryFileSystem) {
  // A file system that does not tell its alignment is probed by a write; tmpfs is one.
  for (const char* const parent : {"", "/dev/shm"}) {
    if (*parent != '\0' && !std::filesystem::is_directory(parent)) continue;
    const TemporaryDirectory directory(parent);
    const auto result = SaveUnderLimit(directory / "model.pt", 0, "atomic");
    EXPECT_EQ(result.signal, 0) << directory.path();
    EXPECT_THAT(result.report, StartsWith(fmt::format("errno {}", EFBIG)));
    EXPECT_THAT(directory.names(), ::testing::IsEmpty());
  }
}

}  // namespace
}  // namespace fastpersist::checkpoint
