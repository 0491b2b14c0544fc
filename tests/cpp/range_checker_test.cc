// SPDX-License-Identifier: Apache-2.0
#include "pipeline/range_checker.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "testing/aligned_memory.h"
#include "testing/seed.h"
#include "testing/streams.h"

namespace fastpersist::pipeline {
namespace {

using fastpersist::testing::Between;
using fastpersist::testing::FillWithNoise;
using fastpersist::testing::OnceIn;
using fastpersist::testing::PlainCrc32;
using fastpersist::testing::Random;
using fastpersist::testing::Seed;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Bytes = std::vector<std::byte>;
using Kind = CheckedRange::Kind;

// A file of noise with ranges; what is shown is written down.
class RangeCheckerTest : public ::testing::Test {
 protected:
  RangeCheckerTest() {
    FillWithNoise(file_, random_);
    plan_.show = [this](const CheckedRange& range, std::span<const std::byte> bytes) {
      shown_.push_back(fmt::format("{}:{}", range.record, bytes.size()));
      EXPECT_TRUE(std::ranges::equal(bytes, Part(range.range))) << "record " << range.record;
      return Checked{};
    };
    plan_.differs = [](const CheckedRange& range, std::uint32_t found) {
      return Error{.code = ErrorCode::kCorrupt,
                   .entry = fmt::format("{}", range.record),
                   .expected_crc = range.crc,
                   .found_crc = found};
    };
  }

  [[nodiscard]] std::span<const std::byte> Part(plan::Range range) const {
    return std::span(file_).subspan(range.begin, range.end - range.begin);
  }
  void Add(Kind kind, std::uint64_t begin, std::uint64_t end) {
    plan_.ranges.push_back({.range = {.begin = begin, .end = end},
                            .kind = kind,
                            .record = static_cast<std::uint32_t>(plan_.ranges.size())});
    if (kind == Kind::kBody) plan_.ranges.back().crc = PlainCrc32(Part({begin, end}));
  }
  std::byte* Deliver(std::uint64_t begin, std::uint64_t end) {
    memory_.emplace_back(end - begin, std::byte{0xCC});
    plan_.deliveries.push_back(
        {.range = {.begin = begin, .end = end}, .memory = memory_.back().data()});
    return memory_.back().data();
  }
  // Gives the file in pieces that end at these places; false when the checker had enough.
  bool Give(RangeChecker& checker, std::vector<std::uint64_t> ends) const {
    ends.push_back(file_.size());
    std::uint64_t at = 0;
    for (const std::uint64_t end : ends) {
      if (end <= at) continue;
      if (!checker.Accept(at, Part({at, end}))) return false;
      at = end;
    }
    return true;
  }
  void ExpectDelivered() const {
    for (const plan::Delivery& delivery : plan_.deliveries) {
      const std::uint64_t length = delivery.range.end - delivery.range.begin;
      EXPECT_TRUE(std::ranges::equal(std::span(delivery.memory, length), Part(delivery.range)))
          << delivery.range.begin << " to " << delivery.range.end;
    }
  }

  const Seed seed_;
  Random random_{seed_.value()};
  Bytes file_ = Bytes(1000);
  RangeChecker::Plan plan_;
  std::vector<Bytes> memory_;  // a vector's bytes stay where they are when it moves
  std::vector<std::string> shown_;
};

TEST_F(RangeCheckerTest, RangesAreWholeWhereverTheFileIsCut) {
  Add(Kind::kHeader, 10, 60);
  Add(Kind::kBody, 60, 300);
  Add(Kind::kDescriptor, 300, 324);
  Add(Kind::kHeader, 324, 400);
  Add(Kind::kBody, 420, 900);
  Deliver(60, 300);
  Deliver(420, 900);
  for (std::uint64_t first = 0; first < 950; first += 3) {
    for (const std::uint64_t second : {first + 1, first + 50, first + 333}) {
      shown_.clear();
      RangeChecker checker(plan_);
      EXPECT_FALSE(Give(checker, {first, std::min<std::uint64_t>(second, 1000)}))
          << "no more was needed";
      EXPECT_THAT(shown_, ElementsAre("0:50", "2:24", "3:76"));
      EXPECT_THAT(checker.damages(), IsEmpty());
      EXPECT_EQ(checker.compared(), 2U);
      EXPECT_EQ(checker.uncompared(), 0U);
      ExpectDelivered();
      for (Bytes& memory : memory_) std::ranges::fill(memory, std::byte{0});
      ASSERT_FALSE(HasFailure()) << "cut at " << first << " and " << second;
    }
  }
}

TEST_F(RangeCheckerTest, EveryByteAlone) {
  Add(Kind::kHeader, 0, 60);
  Add(Kind::kBody, 60, 500);
  Deliver(60, 500);
  RangeChecker checker(plan_);
  std::vector<std::uint64_t> ends;
  for (std::uint64_t end = 1; end < 1000; ++end) ends.push_back(end);
  Give(checker, ends);
  EXPECT_THAT(shown_, ElementsAre("0:60"));
  EXPECT_EQ(checker.compared(), 1U);
  ExpectDelivered();
}

TEST_F(RangeCheckerTest, AFlippedBitIsToldWithBothChecksums) {
  Add(Kind::kBody, 0, 500);
  Add(Kind::kBody, 500, 1000);
  file_[250] ^= std::byte{4};
  RangeChecker checker(plan_);
  EXPECT_FALSE(Give(checker, {600}));
  ASSERT_THAT(checker.damages(), SizeIs(1));
  EXPECT_EQ(checker.damages()[0].entry, "0");
  EXPECT_EQ(checker.damages()[0].expected_crc, plan_.ranges[0].crc);
  EXPECT_EQ(checker.damages()[0].found_crc, PlainCrc32(Part({0, 500})));
  EXPECT_EQ(checker.compared(), 1U) << "it stopped at the first";
}

TEST_F(RangeCheckerTest, ItGoesOnAfterADamageUpToTheMost) {
  for (std::uint64_t at = 0; at < 1000; at += 100) {
    Add(Kind::kBody, at, at + 100);
    if (at % 200 == 0) file_[at + 5] ^= std::byte{1};
  }
  for (const std::size_t most : {1U, 3U, 5U, 100U}) {
    plan_.most_damages = most;
    RangeChecker checker(plan_);
    Give(checker, {130, 777});
    EXPECT_THAT(checker.damages(), SizeIs(std::min<std::size_t>(most, 5)));
    if (most > 5) {
      EXPECT_EQ(checker.compared(), 10U);
    }
  }
}

TEST_F(RangeCheckerTest, BodiesWithoutAChecksumAreCountedAndDelivered) {
  Add(Kind::kBody, 100, 300);
  Add(Kind::kBody, 300, 700);
  plan_.ranges[0].crc.reset();
  Deliver(100, 300);
  Deliver(350, 650);
  RangeChecker checker(plan_);
  Give(checker, {200, 400});
  EXPECT_EQ(checker.uncompared(), 1U);
  EXPECT_EQ(checker.compared(), 1U);
  ExpectDelivered();
}

TEST_F(RangeCheckerTest, DamageInAHeaderIsKeptAndStops) {
  Add(Kind::kHeader, 0, 30);
  Add(Kind::kBody, 30, 1000);
  plan_.show = [](const CheckedRange&, std::span<const std::byte>) {
    return Checked{.damage = Error{.detail = "wrong header"}};
  };
  RangeChecker checker(plan_);
  EXPECT_FALSE(Give(checker, {20, 40}));
  ASSERT_THAT(checker.damages(), SizeIs(1));
  EXPECT_EQ(checker.damages()[0].detail, "wrong header");
  EXPECT_FALSE(checker.gave_up());
  EXPECT_EQ(checker.compared(), 0U);
}

TEST_F(RangeCheckerTest, GivingUpStopsWhateverIsLeft) {
  Add(Kind::kHeader, 0, 30);
  Add(Kind::kBody, 30, 1000);
  plan_.most_damages = 100;
  plan_.show = [](const CheckedRange&, std::span<const std::byte>) {
    return Checked{.give_up = true};
  };
  RangeChecker checker(plan_);
  EXPECT_FALSE(Give(checker, {40, 500}));
  EXPECT_TRUE(checker.gave_up());
  EXPECT_EQ(checker.compared(), 0U);
}

TEST_F(RangeCheckerTest, WhoMayNotGiveUpGoesOnWithTheDamage) {
  Add(Kind::kHeader, 0, 30);
  Add(Kind::kBody, 30, 1000);
  plan_.most_damages = 100;
  plan_.may_give_up = false;
  plan_.show = [](const CheckedRange&, std::span<const std::byte>) {
    return Checked{.damage = Error{.detail = "ends elsewhere"}, .give_up = true};
  };
  RangeChecker checker(plan_);
  Give(checker, {40, 500});
  EXPECT_FALSE(checker.gave_up());
  EXPECT_THAT(checker.damages(), SizeIs(1));
  EXPECT_EQ(checker.compared(), 1U);
}

TEST_F(RangeCheckerTest, HeadersAreNotLookedAtWithoutAnybodyToShowThem) {
  Add(Kind::kHeader, 0, 30);
  Add(Kind::kBody, 30, 1000);
  plan_.show = nullptr;
  RangeChecker checker(plan_);
  Give(checker, {10, 20, 31});
  EXPECT_EQ(checker.compared(), 1U);
}

TEST_F(RangeCheckerTest, TensorsThatShareStorageEachGetTheirBytes) {
  Add(Kind::kBody, 0, 900);
  Deliver(0, 900);
  Deliver(0, 900);
  Deliver(0, 450);
  Deliver(100, 101);
  Deliver(100, 800);
  Deliver(899, 900);
  for (const std::uint64_t cut : {1U, 99U, 100U, 101U, 449U, 450U, 799U, 899U}) {
    RangeChecker checker(plan_);
    Give(checker, {cut});
    EXPECT_EQ(checker.compared(), 1U);
    ExpectDelivered();
    for (Bytes& memory : memory_) std::ranges::fill(memory, std::byte{0});
  }
}

TEST_F(RangeCheckerTest, BytesThatLieWhereTheyBelongAreNotCopied) {
  file_.resize(3 << 20);
  FillWithNoise(file_, random_);
  Add(Kind::kBody, 0, 2 << 20);
  // The delivery is the file's own memory: a memcpy there would be an overlap, a report for asan.
  plan_.deliveries.push_back({.range = {.begin = 0, .end = 2 << 20}, .memory = file_.data()});
  const std::byte* also = Deliver(0, 1 << 20);
  RangeChecker checker(plan_);
  Give(checker, {123'456, 1'500'000});
  EXPECT_EQ(checker.compared(), 1U);
  EXPECT_TRUE(std::ranges::equal(std::span(also, 1 << 20), Part({0, 1 << 20})));
}

TEST_F(RangeCheckerTest, BytesThatNobodyWantsAreSkipped) {
  Add(Kind::kBody, 500, 600);
  RangeChecker checker(plan_);
  EXPECT_TRUE(checker.Accept(0, Part({0, 100})));
  EXPECT_TRUE(checker.Accept(400, Part({400, 550})));
  EXPECT_FALSE(checker.Accept(550, Part({550, 1000})));
  EXPECT_EQ(checker.compared(), 1U);
}

TEST_F(RangeCheckerTest, WithoutRangesNothingIsNeeded) {
  RangeChecker checker(plan_);
  EXPECT_FALSE(Give(checker, {}));
  EXPECT_EQ(checker.compared(), 0U);
}

TEST_F(RangeCheckerTest, RestartForgetsWhatWasThere) {
  Add(Kind::kHeader, 0, 100);
  Add(Kind::kBody, 100, 1000);
  Deliver(100, 1000);
  for (const std::uint64_t cut : {50U, 100U, 300U, 999U}) {
    shown_.clear();
    RangeChecker checker(plan_);
    EXPECT_TRUE(checker.Accept(0, Part({0, cut})));
    checker.Restart();
    Give(checker, {60, 500});
    EXPECT_EQ(checker.compared(), 1U);
    EXPECT_THAT(checker.damages(), IsEmpty());
    EXPECT_EQ(shown_.back(), "0:100");
    ExpectDelivered();
  }
}

TEST_F(RangeCheckerTest, ProgressCountsWhatWasAccepted) {
  Add(Kind::kBody, 0, 1000);
  std::vector<std::uint64_t> steps;
  plan_.advance = [&](std::uint64_t bytes) { steps.push_back(bytes); };
  RangeChecker checker(plan_);
  Give(checker, {100, 700});
  EXPECT_THAT(steps, ElementsAre(100, 700, 1000));
}

TEST_F(RangeCheckerTest, RandomFilesAreDeliveredWhole) {
  for (int round = 0; round < 60; ++round) {
    file_.assign(Between(random_, 1, 600'000), std::byte{0});
    FillWithNoise(file_, random_);
    plan_.ranges.clear();
    plan_.deliveries.clear();
    memory_.clear();
    shown_.clear();
    std::uint64_t at = 0;
    while (at < file_.size()) {
      if (OnceIn(random_, 4)) at += Between(random_, 1, 5000);
      const std::uint64_t end =
          std::min<std::uint64_t>(file_.size(), at + Between(random_, 1, 200'000));
      if (at >= end) break;
      const bool body = !OnceIn(random_, 3);
      Add(body ? Kind::kBody : Kind::kHeader, at, end);
      for (std::uint64_t i = Between(random_, 0, 3); body && i > 0; --i) {
        const std::uint64_t from = OnceIn(random_, 2) ? at : Between(random_, at, end - 1);
        Deliver(from, OnceIn(random_, 2) ? end : Between(random_, from + 1, end));
      }
      at = end;
    }
    std::ranges::stable_sort(plan_.deliveries, {},
                             [](const plan::Delivery& delivery) { return delivery.range.begin; });
    std::vector<std::uint64_t> ends;
    for (int i = 0; i < 6; ++i) ends.push_back(Between(random_, 0, file_.size()));
    std::ranges::sort(ends);
    RangeChecker checker(plan_);
    Give(checker, ends);
    const auto bodies = std::ranges::count(plan_.ranges, Kind::kBody, &CheckedRange::kind);
    EXPECT_EQ(checker.compared(), static_cast<std::uint64_t>(bodies));
    EXPECT_THAT(checker.damages(), IsEmpty());
    EXPECT_EQ(shown_.size(), plan_.ranges.size() - static_cast<std::size_t>(bodies));
    ExpectDelivered();
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
}

}  // namespace
}  // namespace fastpersist::pipeline
