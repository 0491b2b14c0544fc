// SPDX-License-Identifier: Apache-2.0
#include "base/align.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace fastpersist::base {
namespace {

TEST(Align, AgreesWithDivisionForSmallNumbers) {
  for (std::uint64_t alignment = 1; alignment <= 256; alignment *= 2) {
    for (std::uint64_t value = 0; value <= 1024; ++value) {
      EXPECT_EQ(IsAligned(value, alignment), value % alignment == 0);
      EXPECT_EQ(AlignDown(value, alignment), value / alignment * alignment);
      EXPECT_EQ(AlignUp(value, alignment), (value + alignment - 1) / alignment * alignment);
    }
  }
}

TEST(Align, WorksUpToTheLargestNumbers) {
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(AlignDown(kMax, 4096), kMax - 4095);
  EXPECT_EQ(AlignUp(kMax - 4096, 4096), kMax - 4095);
  EXPECT_EQ(AlignUp(kMax - 4095, 4096), kMax - 4095);
  EXPECT_EQ(AlignDown(kMax, 1), kMax);
  constexpr std::uint64_t kHalf = std::uint64_t{1} << 63;
  EXPECT_EQ(AlignDown(kMax, kHalf), kHalf);
  EXPECT_TRUE(IsAligned(kHalf, kHalf));
}

TEST(Align, KnowsPowersOfTwo) {
  EXPECT_FALSE(IsPowerOfTwo(0));
  EXPECT_TRUE(IsPowerOfTwo(1));
  EXPECT_TRUE(IsPowerOfTwo(std::uint64_t{1} << 63));
  EXPECT_FALSE(IsPowerOfTwo(3));
  EXPECT_FALSE(IsPowerOfTwo(12288));
}

TEST(Align, ChecksAddresses) {
  alignas(64) const char memory[65] = {};
  EXPECT_TRUE(IsAlignedAddress(memory, 64));
  EXPECT_FALSE(IsAlignedAddress(memory + 32, 64));
  EXPECT_TRUE(IsAlignedAddress(memory + 64, 64));
  EXPECT_TRUE(IsAlignedAddress(nullptr, 4096));
}

}  // namespace
}  // namespace fastpersist::base
