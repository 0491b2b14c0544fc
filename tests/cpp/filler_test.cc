// SPDX-License-Identifier: Apache-2.0
#include "pipeline/filler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "testing/seed.h"
#include "testing/streams.h"

namespace fastpersist::pipeline {
namespace {

using fastpersist::testing::Between;
using fastpersist::testing::OnceIn;
using fastpersist::testing::PlainCrc32;
using fastpersist::testing::PlainRendering;
using fastpersist::testing::Random;
using fastpersist::testing::RandomTestStream;
using fastpersist::testing::RenderPlainly;
using fastpersist::testing::Seed;
using fastpersist::testing::TestStream;
using fastpersist::testing::TestStreamBuilder;
using layout::Extent;
using layout::RecordDigest;

// How many bytes from the offset on lie in one extent in memory; 0 if the offset does not.
std::uint64_t InMemoryFrom(const layout::Stream& stream, std::uint64_t offset) {
  const auto extent = std::ranges::upper_bound(stream.extents(), offset, {}, &Extent::end);
  return extent->kind == Extent::Kind::kMemory ? extent->end() - offset : 0;
}

void ExpectDigests(std::span<const RecordDigest> found, const std::vector<RecordDigest>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].crc, expected[i].crc) << "record " << i;
    EXPECT_EQ(found[i].head, expected[i].head) << "record " << i;
  }
}

TEST(Filler, GivesTheSameBytesAndDigestsHoweverTheStreamIsCut) {
  const Seed seed;
  Random random(seed.value());
  for (int round = 0; round < 40; ++round) {
    const TestStream made = RandomTestStream(random, Between(random, 1, 300'000));
    const PlainRendering expected = RenderPlainly(made.stream);
    const std::uint64_t longest = OnceIn(random, 2) ? 50 : 20'000;
    const std::uint64_t size = made.stream.size();
    std::vector<std::byte> filled(expected.bytes);
    Filler filler(made.stream, nullptr, /*whole_crc=*/true);
    while (filler.offset() < size) {
      const std::uint64_t at = filler.offset();
      const std::uint64_t passable = std::min(InMemoryFrom(made.stream, at), longest);
      if (passable > 0 && OnceIn(random, 3)) {
        filler.PassOver(Between(random, 1, passable));
      } else {
        const std::uint64_t length = Between(random, 1, std::min(longest, size - at));
        const auto out = std::span(filled).subspan(at, length);
        std::ranges::fill(out, std::byte{0});
        filler.Fill(out);
        ASSERT_EQ(filler.offset(), at + length);
      }
    }
    ASSERT_EQ(filled, expected.bytes) << "round " << round;
    ExpectDigests(filler.digests(), expected.digests);
    ASSERT_EQ(filler.crc(), PlainCrc32(expected.bytes)) << "round " << round;
  }
}

TEST(Filler, KnowsTheChecksumOfAllThatWasFilledAtEveryByte) {
  TestStreamBuilder builder(1);
  builder.Generated(3).Memory(9).Late(4).Pulled(5).GeneratedBody(2).LateBody(6).Memory(1).Memory(3);
  builder.Late(2).Generated(1);
  const TestStream made = std::move(builder).Finish();
  const auto expected = RenderPlainly(made.stream).bytes;
  Filler filler(made.stream, nullptr, /*whole_crc=*/true);
  std::vector<std::byte> out(1);
  for (std::size_t at = 0; at < expected.size(); ++at) {
    EXPECT_EQ(filler.crc(), PlainCrc32(std::span(expected).first(at))) << at;
    filler.Fill(out);
  }
  EXPECT_EQ(filler.crc(), PlainCrc32(expected));
}

TEST(Filler, KnowsTheChecksumOfAStreamWhoseRecordsAreInterrupted) {
  const Seed seed;
  Random random(seed.value());
  std::vector<std::byte> bytes(60);
  fastpersist::testing::FillWithNoise(bytes, random);
  layout::StreamBuilder builder;
  const std::span all(bytes);
  builder.AddMemory(all.first(10), 0);
  builder.AddGenerated(all.subspan(10, 10));
  builder.AddMemory(all.subspan(20, 10), 0);  // record 0 goes on
  builder.AddMemory(all.subspan(30, 10), 1);
  builder.AddGenerated(all.subspan(40, 10), 0);
  builder.AddMemory(all.subspan(50), 1);
  const auto stream = std::move(builder).Finish(2, nullptr);
  for (std::size_t piece = 1; piece <= bytes.size(); ++piece) {
    Filler filler(stream, nullptr, /*whole_crc=*/true);
    for (std::size_t at = 0; at < bytes.size(); at += piece) {
      std::vector<std::byte> out(std::min(piece, bytes.size() - at));
      filler.Fill(out);
    }
    EXPECT_EQ(filler.crc(), PlainCrc32(bytes)) << "pieces of " << piece;
  }
}

TEST(Filler, FillsAWholeStreamAtOnce) {
  TestStreamBuilder builder(1);
  builder.Generated(10).Memory(100).Late(24).GeneratedBody(3).LateBody(40).Late(16).Memory(1);
  const TestStream made = std::move(builder).Finish();
  std::vector<std::byte> filled(made.stream.size());
  Filler(made.stream).Fill(filled);
  EXPECT_EQ(filled, RenderPlainly(made.stream).bytes);
}

TEST(Filler, KeepsTheFirstBytesOfARecordThatIsCutInsideThem) {
  for (std::uint64_t length = 1; length <= 10; ++length) {
    TestStreamBuilder builder(length);
    builder.Memory(length).Late(4);
    const TestStream made = std::move(builder).Finish();
    const PlainRendering expected = RenderPlainly(made.stream);
    for (std::uint64_t cut = 1; cut < length; ++cut) {
      Filler filler(made.stream);
      std::vector<std::byte> head(cut);
      std::vector<std::byte> rest(made.stream.size() - cut);
      filler.Fill(head);
      filler.Fill(rest);
      ExpectDigests(filler.digests(), expected.digests);
    }
    Filler filler(made.stream);
    for (std::uint64_t at = 0; at < length; ++at) filler.PassOver(1);
    ExpectDigests(filler.digests(), expected.digests);
  }
}

TEST(Filler, KeepsTheFirstErrorOfAPullAndAsksForNothingMore) {
  TestStreamBuilder builder(1);
  builder.Pulled(100).Pulled(100).Late(16).Pulled(100);
  const TestStream made = std::move(builder).Finish();
  made.pulled->fail_id = 1;
  made.pulled->fail_at = 50;
  Filler filler(made.stream);
  std::vector<std::byte> out(made.stream.size());
  const std::span all(out);
  filler.Fill(all.first(150));
  EXPECT_FALSE(filler.error());
  filler.Fill(all.subspan(150, 10));
  ASSERT_TRUE(filler.error());
  EXPECT_EQ(filler.error()->offset, 50);
  made.pulled->fail_id = 2;
  made.pulled->fail_at = 0;
  filler.Fill(all.subspan(160));
  EXPECT_EQ(filler.offset(), made.stream.size());
  EXPECT_EQ(filler.error()->offset, 50) << "the first error stays";
}

TEST(Filler, RendersALateExtentOnlyOnceHoweverItIsCut) {
  // Counts; the digests after the extent may have changed since.
  struct Counting final : layout::LateBytes {
    void Render(std::uint32_t /*late_id*/, std::span<const RecordDigest> /*records*/,
                std::span<std::byte> out) const override {
      std::ranges::fill(out, static_cast<std::byte>(++count));
    }
    mutable int count = 0;
  };
  const auto late = std::make_shared<Counting>();
  layout::StreamBuilder builder;
  builder.AddLate(1000, 0);
  builder.AddLate(10, 1);
  const auto stream = std::move(builder).Finish(0, late);
  Filler filler(stream);
  std::vector<std::byte> out(1010);
  for (std::size_t at = 0; at < out.size(); at += 101) filler.Fill(std::span(out).subspan(at, 101));
  EXPECT_EQ(late->count, 2);
  EXPECT_EQ(std::ranges::count(out, std::byte{1}), 1000);
  EXPECT_EQ(std::ranges::count(out, std::byte{2}), 10);
}

}  // namespace
}  // namespace fastpersist::pipeline
