// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/buffer_sizes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "base/align.h"
#include "testing/seed.h"

namespace fastpersist::checkpoint {
namespace {

using testing::Between;
using testing::OnceIn;
using testing::Random;
using testing::Seed;

constexpr plan::DeviceLimits kDirect{.memory_align = 512, .offset_align = 512, .direct = true};
constexpr plan::DeviceLimits kBuffered{.memory_align = 1, .offset_align = 1, .direct = false};

void ExpectWhole(const BufferSizes& sizes, const plan::DeviceLimits& limits) {
  ASSERT_GT(sizes.block, 0U);
  EXPECT_TRUE(base::IsAligned(sizes.block, std::max(limits.offset_align, limits.memory_align)));
  EXPECT_TRUE(base::IsAligned(sizes.block, 4096));
  ASSERT_GE(sizes.staging, sizes.block) << "there is room for one buffer at least";
  EXPECT_EQ(sizes.staging % sizes.block, 0U) << "whole buffers";
}

TEST(BufferSizesTest, ALargeTransferGetsTheDefaults) {
  const BufferSizes sizes = ChooseSizes({}, kDirect, std::uint64_t{10} << 30);
  EXPECT_EQ(sizes.block, kDefaultBlock);
  EXPECT_EQ(sizes.staging, kDefaultStaging);
}

TEST(BufferSizesTest, ASmallTransferGetsOneBufferOfItsSize) {
  for (const std::uint64_t bytes : {0U, 1U, 4095U, 4096U}) {
    const BufferSizes sizes = ChooseSizes({}, kBuffered, bytes);
    EXPECT_EQ(sizes.block, 4096U) << bytes;
    EXPECT_EQ(sizes.staging, 4096U) << bytes;
  }
  EXPECT_EQ(ChooseSizes({}, kDirect, 4097).block, 8192U);
}

TEST(BufferSizesTest, StagingIsNoLargerThanWhatIsToBeMoved) {
  const BufferSizes sizes = ChooseSizes({.block_bytes = 8192}, kDirect, 20'000);
  EXPECT_EQ(sizes.block, 8192U);
  EXPECT_EQ(sizes.staging, 3 * 8192U);
}

TEST(BufferSizesTest, ABlockIsNoLargerThanTheStagingThatWasAskedFor) {
  const BufferSizes sizes =
      ChooseSizes({.block_bytes = 1 << 20, .staging_bytes = 100'000}, kDirect, 1 << 30);
  EXPECT_EQ(sizes.block, 98'304U);
  EXPECT_EQ(sizes.staging, 98'304U);
}

TEST(BufferSizesTest, LessMemoryMeansFewerBuffersThenShorterOnes) {
  BufferSizes sizes = ChooseSizes({.block_bytes = 8192}, kDirect, 1 << 20);
  sizes.FitInto(20'000);
  EXPECT_EQ(sizes.block, 8192U);
  EXPECT_EQ(sizes.staging, 16384U);
  sizes.FitInto(5000);
  EXPECT_EQ(sizes.block, 4096U);
  EXPECT_EQ(sizes.staging, 4096U);
}

TEST(BufferSizesTest, EveryCombinationGivesWholeBuffers) {
  const Seed seed;
  Random random(seed.value());
  for (int i = 0; i < 2000; ++i) {
    const plan::DeviceLimits limits{
        .memory_align = 1U << Between(random, 0, 16),
        .offset_align = 1U << Between(random, 0, 16),
    };
    Options options;
    if (OnceIn(random, 2)) options.block_bytes = 4096 * Between(random, 1, 300);
    if (OnceIn(random, 2)) options.staging_bytes = Between(random, 4096, 1 << 20);
    BufferSizes sizes = ChooseSizes(options, limits, Between(random, 0, 1 << 22));
    ExpectWhole(sizes, limits);
    sizes.FitInto(Between(random, sizes.align, 1 << 21));
    ExpectWhole(sizes, limits);
    ASSERT_FALSE(HasFailure()) << "round " << i;
  }
}

}  // namespace
}  // namespace fastpersist::checkpoint
