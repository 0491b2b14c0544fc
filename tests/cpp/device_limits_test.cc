// SPDX-License-Identifier: Apache-2.0
#include "file/device_limits.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "base/align.h"
#include "base/unique_fd.h"
#include "testing/aligned_memory.h"
#include "testing/temporary_directory.h"

namespace fastpersist::file {
namespace {

// One file system that tells its limits, and one that has to be probed (tmpfs), where they exist.
class DeviceLimitsTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string parent = GetParam();
    if (!parent.empty() && !std::filesystem::is_directory(parent)) {
      GTEST_SKIP() << "skipped: no " << parent;
    }
    directory_ = std::make_unique<testing::TemporaryDirectory>(parent);
    fd_.Reset(
        ::open((*directory_ / "file").c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600));
    if (!fd_.valid()) GTEST_SKIP() << "skipped: no direct I/O in " << directory_->path();
  }

  std::unique_ptr<testing::TemporaryDirectory> directory_;
  base::UniqueFd fd_;
};

TEST_P(DeviceLimitsTest, TheyArePowersOfTwoOfAReasonableSize) {
  const plan::DeviceLimits limits = ProbeLimits(fd_.get());
  EXPECT_TRUE(base::IsPowerOfTwo(limits.memory_align));
  EXPECT_TRUE(base::IsPowerOfTwo(limits.offset_align));
  EXPECT_LE(limits.memory_align, 65536U);
  EXPECT_LE(limits.offset_align, 65536U);
  if (limits.direct) {
    EXPECT_GE(limits.offset_align, 512U);
  }
}

TEST_P(DeviceLimitsTest, AWriteThatObeysThemWorks) {
  const plan::DeviceLimits limits = ProbeLimits(fd_.get());
  if (!limits.direct) GTEST_SKIP() << "skipped: no direct I/O in " << directory_->path();
  const testing::AlignedMemory memory(limits.offset_align, limits.memory_align % 65536);
  for (const unsigned block : {0U, 1U, 7U}) {
    EXPECT_EQ(::pwrite(fd_.get(), memory.data(), limits.offset_align,
                       static_cast<off_t>(block) * limits.offset_align),
              static_cast<ssize_t>(limits.offset_align));
  }
}

TEST_P(DeviceLimitsTest, ProbingIsRepeatable) {
  const plan::DeviceLimits first = ProbeLimits(fd_.get());
  const plan::DeviceLimits second = ProbeLimits(fd_.get());
  EXPECT_EQ(first.direct, second.direct);
  EXPECT_EQ(first.memory_align, second.memory_align);
  EXPECT_EQ(first.offset_align, second.offset_align);
}

INSTANTIATE_TEST_SUITE_P(FileSystems, DeviceLimitsTest, ::testing::Values("", "/dev/shm"),
                         [](const auto& parent) {
                           return std::string(*parent.param == '\0' ? "Temporary" : "Tmpfs");
                         });

TEST(DeviceLimitsOfOddFilesTest, WhatTakesNoDirectWriteIsBuffered) {
  const base::UniqueFd fd(::open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC));
  if (!fd.valid()) GTEST_SKIP() << "skipped: /proc/self/oom_score_adj cannot be opened";
  // This file takes a number only: whatever the alignment, the kernel answers zeros with EINVAL.
  EXPECT_FALSE(ProbeLimits(fd.get()).direct);
}

}  // namespace
}  // namespace fastpersist::file
