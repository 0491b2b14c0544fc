// SPDX-License-Identifier: Apache-2.0
#include "base/crc32.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "testing/aligned_memory.h"
#include "testing/seed.h"
#include "testing/streams.h"

namespace fastpersist::base {
namespace {

using fastpersist::testing::AlignedMemory;
using fastpersist::testing::Between;
using fastpersist::testing::PlainCrc32;
using fastpersist::testing::Random;
using fastpersist::testing::Seed;

std::uint32_t CrcOf(std::string_view text) { return Crc32(std::as_bytes(std::span(text))); }

TEST(Crc32, GivesThePublishedCheckValues) {
  EXPECT_EQ(CrcOf(""), 0U);
  EXPECT_EQ(CrcOf("a"), 0xE8B7BE43U);
  EXPECT_EQ(CrcOf("123456789"), 0xCBF43926U);
  EXPECT_EQ(CrcOf("The quick brown fox jumps over the lazy dog"), 0x414FA339U);
}

TEST(Crc32, IsTheSameWhereverTheBytesAreSplit) {
  const Seed seed;
  Random random(seed.value());
  const AlignedMemory memory(300);
  memory.FillWithNoise(random);
  const std::uint32_t whole = PlainCrc32(memory.bytes());
  for (std::size_t at = 0; at <= memory.bytes().size(); ++at) {
    EXPECT_EQ(Crc32(memory.bytes().subspan(at), Crc32(memory.bytes().first(at))), whole) << at;
  }
}

TEST(Crc32, EqualsTheDefinitionForAllSmallSizesAndAddresses) {
  const Seed seed;
  Random random(seed.value());
  const AlignedMemory memory(256);
  memory.FillWithNoise(random);
  for (std::size_t size = 0; size <= 150; ++size) {
    for (std::size_t at = 0; at < 16; ++at) {
      const auto bytes = memory.bytes().subspan(at, size);
      ASSERT_EQ(Crc32(bytes), PlainCrc32(bytes)) << size << " bytes at " << at;
    }
  }
}

// Sizes around the piece that stays in the cache and around the change to streaming stores.
class CopyAndCrc32Test : public ::testing::TestWithParam<std::size_t> {};

TEST_P(CopyAndCrc32Test, CopiesExactlyAndGivesTheCrc) {
  const Seed seed;
  Random random(seed.value());
  const std::size_t size = GetParam();
  constexpr std::size_t kGuard = 64;
  for (int i = 0; i < 4; ++i) {
    const AlignedMemory source(size, Between(random, 0, 63));
    source.FillWithNoise(random);
    const AlignedMemory target(size + 2 * kGuard, i == 0 ? 0 : Between(random, 0, 63));
    std::ranges::fill(target.bytes(), std::byte{0xA5});
    const auto destination = target.bytes().subspan(kGuard, size);
    const auto before = static_cast<std::uint32_t>(random());

    const std::uint32_t crc = CopyAndCrc32(destination, source.bytes(), before);

    EXPECT_TRUE(std::ranges::equal(destination, source.bytes()));
    EXPECT_EQ(crc, Crc32(source.bytes(), before));
    const auto is_guard = [](std::byte byte) { return byte == std::byte{0xA5}; };
    EXPECT_TRUE(std::ranges::all_of(target.bytes().first(kGuard), is_guard));
    EXPECT_TRUE(std::ranges::all_of(target.bytes().last(kGuard), is_guard));
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, CopyAndCrc32Test,
                         ::testing::Values(0, 1, 31, 32, 33, 127, 128, 129, 16383, 16384, 16385,
                                           262143, 262144, 262145, 262176, 262271, 262272, 300001));

TEST(CopyAndCrc32, ContinuesFromTheCrcOfEarlierPieces) {
  const Seed seed;
  Random random(seed.value());
  const AlignedMemory source(700'000);
  source.FillWithNoise(random);
  std::vector<std::byte> copy(source.bytes().size());
  std::uint32_t crc = 0;
  for (std::size_t at = 0; at < copy.size();) {
    const std::size_t length = std::min(copy.size() - at, Between(random, 1, 300'000));
    crc = CopyAndCrc32(std::span(copy).subspan(at), source.bytes().subspan(at, length), crc);
    at += length;
  }
  EXPECT_TRUE(std::ranges::equal(copy, source.bytes()));
  EXPECT_EQ(crc, PlainCrc32(source.bytes()));
}

TEST(CombineCrc32, GivesTheCrcOfTheWholeWhereverItIsCut) {
  const Seed seed;
  Random random(seed.value());
  const AlignedMemory memory(300);
  memory.FillWithNoise(random);
  const std::uint32_t whole = PlainCrc32(memory.bytes());
  for (std::size_t at = 0; at <= memory.bytes().size(); ++at) {
    const auto rest = memory.bytes().subspan(at);
    EXPECT_EQ(CombineCrc32(Crc32(memory.bytes().first(at)), Crc32(rest), rest.size()), whole) << at;
  }
}

TEST(CombineCrc32, CountsBytesBeyondFourGigabytes) {
  // The CRC of zeros, doubled again and again, and that of the sum of two lengths.
  const std::array<std::byte, 1> zero{};
  std::uint32_t crc = Crc32(zero);
  for (int i = 0; i < 33; ++i) crc = CombineCrc32(crc, crc, std::uint64_t{1} << i);
  constexpr std::uint64_t kSize = std::uint64_t{1} << 33;
  EXPECT_EQ(CombineCrc32(crc, Crc32(zero), 1), CombineCrc32(Crc32(zero), crc, kSize));
  EXPECT_NE(CombineCrc32(CrcOf("a"), crc, kSize), CombineCrc32(CrcOf("a"), crc, 0));
}

}  // namespace
}  // namespace fastpersist::base
