// SPDX-License-Identifier: Apache-2.0
#include "memory/prefault.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "memory/arena.h"
#include "memory/map_aligned.h"
#include "testing/process_state.h"

namespace fastpersist::memory {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

bool Resident(std::span<std::byte> memory) {
  std::vector<unsigned char> resident((memory.size() + kPage - 1) / kPage);
  EXPECT_EQ(::mincore(memory.data(), memory.size(), resident.data()), 0);
  return std::ranges::all_of(resident, [](unsigned char page) { return (page & 1U) != 0; });
}

bool CanPopulate() {
  const auto arena = Arena::Create(kPage);
  return arena && ::madvise(arena->memory().data(), kPage, 23 /* MADV_POPULATE_WRITE */) == 0;
}

TEST(PrefaultTest, NothingBeginsBeforeTheReadsHave) {
  const auto arena = Arena::Create(128 * kMiB);
  ASSERT_TRUE(arena);
  const unsigned threads = testing::ThreadCount();
  const Prefault prefault(arena->memory(), 4 * kMiB);
  EXPECT_EQ(testing::ThreadCount(), threads);
}

TEST(PrefaultTest, PagesAheadOfTheReadsAreThereAfterAWhile) {
  if (!CanPopulate()) GTEST_SKIP() << "skipped: this kernel has no MADV_POPULATE_WRITE";
  const auto arena = Arena::Create(128 * kMiB);
  ASSERT_TRUE(arena);
  Prefault prefault(arena->memory(), 4 * kMiB);
  prefault.Reached(0);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const std::span<std::byte> ahead = arena->memory().subspan(4 * kMiB);
  while (!Resident(ahead) && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(Resident(ahead));
  EXPECT_TRUE(std::ranges::all_of(ahead, [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST(PrefaultTest, SmallMemoryGetsNoThread) {
  const auto arena = Arena::Create(4 * kMiB);
  ASSERT_TRUE(arena);
  const unsigned threads = testing::ThreadCount();
  Prefault prefault(arena->memory(), kMiB);
  prefault.Reached(0);
  EXPECT_EQ(testing::ThreadCount(), threads);
}

}  // namespace
}  // namespace fastpersist::memory
