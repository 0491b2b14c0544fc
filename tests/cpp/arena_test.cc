// SPDX-License-Identifier: Apache-2.0
#include "memory/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "base/align.h"
#include "memory/map_aligned.h"

namespace fastpersist::memory {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// How many pages of the memory the process holds.
std::uint64_t ResidentPages(std::span<std::byte> memory) {
  std::vector<unsigned char> resident((memory.size() + kPage - 1) / kPage);
  EXPECT_EQ(::mincore(memory.data(), memory.size(), resident.data()), 0);
  return static_cast<std::uint64_t>(
      std::ranges::count_if(resident, [](unsigned char page) { return (page & 1U) != 0; }));
}

TEST(ArenaTest, ItsMemoryIsAlignedForEveryDeviceAndHoldsZeroes) {
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{4096}, std::uint64_t{65535},
        std::uint64_t{65536}, std::uint64_t{65537}, 2 * kMiB - 1, 2 * kMiB, 5 * kMiB + 3}) {
    const auto arena = Arena::Create(bytes);
    ASSERT_TRUE(arena) << bytes;
    EXPECT_EQ(arena->memory().size(), bytes);
    EXPECT_TRUE(base::IsAlignedAddress(arena->memory().data(), kStrictestDevice));
    if (bytes >= kHugePage) {
      EXPECT_TRUE(base::IsAlignedAddress(arena->memory().data(), kHugePage));
    }
    EXPECT_TRUE(
        std::ranges::all_of(arena->memory(), [](std::byte byte) { return byte == std::byte{0}; }));
    std::ranges::fill(arena->memory(), std::byte{7});  // all of it may be written
  }
}

TEST(ArenaTest, ReleaseGivesBackWholePagesAndLeavesTheRest) {
  const auto arena = Arena::Create(kMiB);
  ASSERT_TRUE(arena);
  std::ranges::fill(arena->memory(), std::byte{9});
  ASSERT_EQ(ResidentPages(arena->memory()), kMiB / kPage);

  arena->Release(kPage + 1, 3 * kPage);  // pages 2 and 3; 1 and 4 have bytes before and behind
  EXPECT_EQ(ResidentPages(arena->memory()), kMiB / kPage - 2);
  for (const std::uint64_t at : {std::uint64_t{0}, 2 * kPage - 1, 4 * kPage, kMiB - 1}) {
    EXPECT_EQ(arena->memory()[at], std::byte{9}) << at;
  }

  for (const std::uint64_t length :
       {std::uint64_t{0}, std::uint64_t{1}, kPage - 1, 2 * kPage - 2}) {
    arena->Release(8 * kPage + 1, length);
    EXPECT_EQ(ResidentPages(arena->memory()), kMiB / kPage - 2) << "no whole page in " << length;
  }
  arena->Release(0, kMiB);
  EXPECT_EQ(ResidentPages(arena->memory()), 0U);
}

TEST(ArenaTest, SizesThatNobodyHasAreAnErrorAndNotAnEnd) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  for (const std::uint64_t bytes : {kMost, kMost - 1, kMost - kStrictestDevice, kMost / 2 + 1,
                                    kMost / 2, kMost / 4, std::uint64_t{1} << 60}) {
    const auto arena = Arena::Create(bytes);
    ASSERT_FALSE(arena) << bytes;
    EXPECT_EQ(arena.error().code, ErrorCode::kStorage);
    EXPECT_EQ(arena.error().system_errno, ENOMEM);
    EXPECT_THAT(arena.error().detail, HasSubstr(std::to_string(bytes)));
    EXPECT_THAT(arena.error().advice, HasSubstr("free memory"));
  }
}

TEST(ArenaTest, MovesHandItOn) {
  auto first = Arena::Create(100);
  ASSERT_TRUE(first);
  std::byte* const address = first->memory().data();
  Arena second(*std::move(first));
  EXPECT_EQ(second.memory().data(), address);
  Arena third;
  EXPECT_TRUE(third.memory().empty());
  third = std::move(second);
  EXPECT_EQ(third.memory().data(), address);
  third.memory()[99] = std::byte{1};
}

TEST(ArenaTest, ItsMemoryGoesWithIt) {
  const std::byte* address = nullptr;
  {
    const auto arena = Arena::Create(3 * kMiB);
    ASSERT_TRUE(arena);
    address = arena->memory().data();
  }
  unsigned char resident = 0;
  EXPECT_NE(::mincore(const_cast<std::byte*>(address), kPage, &resident), 0);
  EXPECT_EQ(errno, ENOMEM);
}

}  // namespace
}  // namespace fastpersist::memory
