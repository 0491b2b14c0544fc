// SPDX-License-Identifier: Apache-2.0
// Who writes what: every property that the other stages and the other ranks rely on, over sizes
// around every boundary, and at random up to thousands of writers.
#include "partition/partition.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "base/align.h"
#include "testing/seed.h"

namespace fastpersist::partition {
namespace {

using plan::Range;
using testing::Between;
using testing::OnceIn;
using testing::Random;
using testing::Seed;

using Weights = std::vector<std::uint64_t>;

constexpr std::uint64_t kBlock = 4096;

std::uint64_t Length(const Range& range) { return range.end - range.begin; }

std::string Text(const Divisible& stream, const Weights& weights, std::uint64_t align) {
  return fmt::format("size {}, head {}, tail {}, {} writers, align {}", stream.size,
                     stream.head_end, stream.tail_begin, weights.size(), align);
}

// What holds for every division.
void ExpectSound(const Divisible& stream, const Weights& weights, std::uint64_t align,
                 const std::vector<Range>& ranges) {
  ASSERT_EQ(ranges.size(), weights.size());
  std::uint64_t at = 0;
  for (const Range& range : ranges) {
    ASSERT_LE(range.begin, range.end);
    if (Length(range) == 0) continue;
    ASSERT_EQ(range.begin, at);
    ASSERT_EQ(range.begin % align, 0U);
    at = range.end;
  }
  ASSERT_EQ(at, stream.size);
  if (stream.head_end > 0) {
    ASSERT_GE(ranges.front().end, stream.head_end);
  }
  if (stream.tail_begin < stream.size) {
    ASSERT_LE(ranges[TailOwner(ranges)].begin, stream.tail_begin);
  }
}

// Where head and tail fit: nobody is further than one block from the weight's share of all blocks.
void ExpectFair(const Divisible& stream, const Weights& weights, std::uint64_t align,
                const std::vector<Range>& ranges) {
  const double all = static_cast<double>(std::accumulate(weights.begin(), weights.end(), 0ULL));
  const double bytes = static_cast<double>(base::AlignUp(stream.size, align));
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const double share = bytes * static_cast<double>(weights[i]) / all;
    ASSERT_NEAR(static_cast<double>(Length(ranges[i])), share, static_cast<double>(align)) << i;
  }
}

std::pair<std::uint64_t, std::uint64_t> LeastAndMost(const std::vector<Range>& ranges) {
  const auto [least, most] = std::ranges::minmax(ranges, {}, Length);
  return {Length(least), Length(most)};
}

// A stream without head and tail.
Divisible Plain(std::uint64_t bytes) { return {.size = bytes, .head_end = 0, .tail_begin = bytes}; }

void ExpectEqualShares(std::uint64_t bytes, std::size_t writers, std::uint64_t align) {
  const Weights weights(writers, 1);
  SCOPED_TRACE(Text(Plain(bytes), weights, align));
  const auto ranges = Divide(Plain(bytes), weights, align);
  ASSERT_NO_FATAL_FAILURE(ExpectSound(Plain(bytes), weights, align, ranges));
  const auto [least, most] = LeastAndMost(ranges);
  ASSERT_LE(most - least, align);
}

TEST(PartitionTest, EqualWritersDifferByAtMostOneBlockAtEverySizeAroundABoundary) {
  for (const std::uint64_t align : {1U, 512U, 4096U}) {
    for (std::size_t writers = 1; writers <= 9; ++writers) {
      for (std::uint64_t blocks = 1; blocks <= 2 * writers + 1; ++blocks) {
        ExpectEqualShares(blocks * align - 1, writers, align);
        ExpectEqualShares(blocks * align, writers, align);
        ExpectEqualShares(blocks * align + 1, writers, align);
      }
    }
  }
}

TEST(PartitionTest, HeadAndTailThatFitIntoTheirSharesChangeNothing) {
  const Weights weights(4, 1);
  const std::uint64_t size = 400 * kBlock + 17;
  const auto plain = Divide({.size = size, .tail_begin = size}, weights, kBlock);
  const auto pinned = Divide(
      {.size = size, .head_end = 99 * kBlock, .tail_begin = size - 90 * kBlock}, weights, kBlock);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    EXPECT_EQ(plain[i].begin, pinned[i].begin);
    EXPECT_EQ(plain[i].end, pinned[i].end);
  }
}

TEST(PartitionTest, AWriterWhoseHeadIsLongerThanItsShareGetsNothingElse) {
  const Divisible stream{
      .size = 100 * kBlock, .head_end = 40 * kBlock + 1, .tail_begin = 100 * kBlock};
  const auto ranges = Divide(stream, Weights(4, 1), kBlock);
  EXPECT_EQ(ranges[0].end, 41U * kBlock);
  const auto [least, most] = LeastAndMost({ranges.begin() + 1, ranges.end()});
  EXPECT_LE(most - least, kBlock);
}

TEST(PartitionTest, AWriterWhoseTailIsLongerThanItsShareGetsNothingElse) {
  const Divisible stream{.size = 100 * kBlock, .head_end = 100, .tail_begin = 50 * kBlock - 1};
  const auto ranges = Divide(stream, Weights(4, 1), kBlock);
  EXPECT_EQ(ranges[3].begin, 49U * kBlock);
  const auto [least, most] = LeastAndMost({ranges.begin(), ranges.end() - 1});
  EXPECT_LE(most - least, kBlock);
}

TEST(PartitionTest, ATailThatLeavesTooLittleForTheHeadPinsBoth) {
  // A quarter each would do for the head, but not once the tail has taken 70 of 100 blocks.
  const Divisible stream{.size = 100 * kBlock, .head_end = 20 * kBlock, .tail_begin = 30 * kBlock};
  const auto ranges = Divide(stream, Weights(4, 1), kBlock);
  EXPECT_EQ(ranges[0].end, 20U * kBlock);
  EXPECT_EQ(ranges[1].end, 25U * kBlock);
  EXPECT_EQ(ranges[2].end, 30U * kBlock);
}

TEST(PartitionTest, WhereHeadAndTailMeetInOneBlockTheFirstWriterGetsAll) {
  const Divisible stream{.size = 5000, .head_end = 900, .tail_begin = 1000};
  const auto ranges = Divide(stream, Weights(3, 1), kBlock);
  EXPECT_EQ(Length(ranges[0]), 5000U);
  EXPECT_EQ(TailOwner(ranges), 0U);
}

TEST(PartitionTest, AnEmptyStreamHasAnOwnerAndNoBytes) {
  const auto ranges = Divide({}, Weights(3, 1), kBlock);
  EXPECT_EQ(LeastAndMost(ranges).second, 0U);
  EXPECT_EQ(TailOwner(ranges), 0U);
}

TEST(PartitionTest, ASlowDeviceGetsLessAndOneOfWeightZeroNothing) {
  const Divisible stream{.size = 4000 * kBlock, .head_end = 10, .tail_begin = 4000 * kBlock - 10};
  const auto ranges = Divide(stream, Weights{3, 0, 1}, kBlock);
  EXPECT_EQ(Length(ranges[0]), 3000U * kBlock);
  EXPECT_EQ(Length(ranges[1]), 0U);
  EXPECT_EQ(Length(ranges[2]), 1000U * kBlock);
}

TEST(PartitionTest, WeightsThatAreAllZeroAreEqual) {
  const Divisible stream{.size = 77 * kBlock, .tail_begin = 77 * kBlock};
  const auto zero = Divide(stream, Weights(5, 0), kBlock);
  const auto one = Divide(stream, Weights(5, 1), kBlock);
  for (std::size_t i = 0; i < zero.size(); ++i) EXPECT_EQ(zero[i].end, one[i].end);
}

TEST(PartitionTest, RandomStreamsWritersAndWeightsAreDividedSoundly) {
  const Seed seed;
  Random random(seed.value());
  for (int round = 0; round < 3000; ++round) {
    const std::uint64_t align = std::uint64_t{1} << Between(random, 0, 16);
    const std::uint64_t size = Between(random, 0, OnceIn(random, 3) ? 10 * align : 1ULL << 45);
    Divisible stream{.size = size, .head_end = 0, .tail_begin = size};
    if (!OnceIn(random, 4))
      stream.head_end = Between(random, 0, OnceIn(random, 2) ? size : size / 100);
    if (!OnceIn(random, 4)) {
      const std::uint64_t most = size - stream.head_end;
      stream.tail_begin = size - Between(random, 0, OnceIn(random, 2) ? most : most / 100);
    }
    Weights weights(Between(random, 1, OnceIn(random, 20) ? 4096 : 16), 1);
    if (OnceIn(random, 2)) {
      for (auto& weight : weights) weight = OnceIn(random, 5) ? 0 : Between(random, 1, 1ULL << 40);
    }
    SCOPED_TRACE(Text(stream, weights, align));
    const auto ranges = Divide(stream, weights, align);
    ASSERT_NO_FATAL_FAILURE(ExpectSound(stream, weights, align, ranges));
  }
}

TEST(PartitionTest, SharesFollowTheWeightsWhereverHeadAndTailAreShort) {
  const Seed seed;
  Random random(seed.value());
  for (int round = 0; round < 1000; ++round) {
    const std::uint64_t align = std::uint64_t{512} << Between(random, 0, 4);
    const std::uint64_t size = Between(random, align * 40'000, 1ULL << 42);
    const Divisible stream{.size = size, .head_end = align, .tail_begin = size - align};
    Weights weights(Between(random, 2, 4096), 0);
    for (auto& weight : weights) weight = Between(random, 1000, 5000);
    SCOPED_TRACE(Text(stream, weights, align));
    const auto ranges = Divide(stream, weights, align);
    ASSERT_NO_FATAL_FAILURE(ExpectSound(stream, weights, align, ranges));
    ASSERT_NO_FATAL_FAILURE(ExpectFair(stream, weights, align, ranges));
  }
}

}  // namespace
}  // namespace fastpersist::partition
