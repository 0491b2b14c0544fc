// SPDX-License-Identifier: Apache-2.0
#include "plan/read_plan.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/align.h"
#include "testing/aligned_memory.h"
#include "testing/forbidden_memory.h"
#include "testing/seed.h"

namespace fastpersist::plan {
namespace {

using fastpersist::testing::AlignedMemory;
using fastpersist::testing::Between;
using fastpersist::testing::kLargestAlignment;
using fastpersist::testing::OnceIn;
using fastpersist::testing::Random;
using fastpersist::testing::Seed;

constexpr std::uint64_t kPage = 4096;

// The delivery whose memory this read would land in, at the right place; null if there is none.
const Delivery* OwnerOf(const PlannedRead& read, std::span<const Delivery> deliveries) {
  for (const Delivery& delivery : deliveries) {
    if (delivery.range.begin <= read.offset &&
        read.offset + read.padded_length <= delivery.range.end &&
        delivery.memory + (read.offset - delivery.range.begin) == read.in_place) {
      return &delivery;
    }
  }
  return nullptr;
}

// The promises of one read, in words; empty when all hold.
std::string BreachOf(const PlannedRead& read, std::span<const Delivery> deliveries,
                     const ReadPlanOptions& options) {
  const DeviceLimits& limits = options.limits;
  if (read.length == 0) return "an empty read";
  if (read.padded_length < read.length) return "shorter than its bytes";
  if (read.padded_length > options.block_bytes) return "longer than a block";
  if (!base::IsAligned(read.offset, limits.offset_align)) return "offset not aligned";
  if (!base::IsAligned(read.padded_length, limits.offset_align)) return "length not aligned";
  if (read.padded_length - read.length >= limits.offset_align) return "more padding than needed";
  if (read.in_place == nullptr) return "";
  if (!base::IsAlignedAddress(read.in_place, limits.memory_align)) return "address not aligned";
  const Delivery* owner = OwnerOf(read, deliveries);
  if (owner == nullptr) return "in place, but where nobody wants it";
  if (owner->fresh) return "in place, and in memory that is fresh";
  if (owner->range.end - owner->range.begin < options.min_in_place_bytes) {
    return "in place, and shorter than the minimum";
  }
  return "";
}

// Direct reads in place take whole pages, though blocks may cut them: a page that the program may
// write meanwhile must not be read into.
void ExpectWholePages(const ReadPlan& plan) {
  for (std::size_t i = 0; i < plan.reads.size(); ++i) {
    const PlannedRead& read = plan.reads[i];
    if (read.in_place == nullptr) continue;
    const auto follows = [](const PlannedRead& one, const PlannedRead& next) {
      return one.in_place != nullptr && one.offset + one.padded_length == next.offset &&
             one.in_place + one.padded_length == next.in_place;
    };
    if (i == 0 || !follows(plan.reads[i - 1], read)) {
      EXPECT_TRUE(base::IsAligned(read.offset, kPage)) << "begins within a page";
    }
    const bool last = i + 1 == plan.reads.size() || !follows(read, plan.reads[i + 1]);
    if (last) {
      EXPECT_TRUE(base::IsAligned(read.offset + read.padded_length, kPage)) << "ends within one";
    }
  }
}

// Wanted ranges that are read as one, by the definition.
std::vector<Range> RunsOf(std::span<const Range> wanted, std::uint64_t coalesce) {
  std::vector<Range> runs;
  for (const Range& range : wanted) {
    if (!runs.empty() && range.begin - runs.back().end <= coalesce) {
      runs.back().end = range.end;
    } else {
      runs.push_back(range);
    }
  }
  return runs;
}

// All promises of a plan, compared with a model that looks at every byte.
void ExpectKept(const std::vector<Range>& wanted, const std::vector<Delivery>& deliveries,
                const ReadPlanOptions& options) {
  const ReadPlan plan = PlanReads(wanted, deliveries, options);
  const std::uint32_t align = options.limits.offset_align;
  std::uint64_t staged = 0;
  std::uint64_t in_place = 0;
  std::uint64_t end = 0;
  std::vector<bool> read_once(wanted.empty() ? 0 : wanted.back().end, false);
  for (const PlannedRead& read : plan.reads) {
    ASSERT_EQ(BreachOf(read, deliveries, options), "")
        << read.length << " of " << read.padded_length << " bytes at " << read.offset;
    ASSERT_GE(read.offset, end) << "reads overlap, or are not in file order";
    end = read.offset + read.padded_length;
    (read.in_place != nullptr ? in_place : staged) += read.length;
    for (std::uint64_t at = read.offset;
         at < std::min(read.offset + read.length, std::uint64_t{read_once.size()}); ++at) {
      read_once[at] = true;
    }
  }
  EXPECT_EQ(plan.staged_bytes, staged);
  EXPECT_EQ(plan.in_place_bytes, in_place);
  if (options.limits.direct) ExpectWholePages(plan);
  const auto runs = RunsOf(wanted, options.coalesce_bytes);
  for (const Range& run : runs) {
    for (std::uint64_t at = run.begin; at < run.end; ++at) {
      ASSERT_TRUE(read_once[at]) << "byte " << at << " is read by nobody";
    }
  }
  for (const PlannedRead& read : plan.reads) {
    const bool within = std::ranges::any_of(runs, [&](const Range& run) {
      return base::AlignDown(run.begin, align) <= read.offset &&
             read.offset + read.padded_length <= base::AlignUp(run.end, align);
    });
    ASSERT_TRUE(within) << read.padded_length << " bytes at " << read.offset
                        << " reach beyond the blocks of a run";
  }
}

class ReadPlanTest : public ::testing::TestWithParam<DeviceLimits> {
 protected:
  [[nodiscard]] static std::uint64_t Unit() {
    return std::max<std::uint64_t>({GetParam().memory_align, GetParam().offset_align, 64});
  }
  [[nodiscard]] static ReadPlanOptions Options(std::uint64_t blocks,
                                               std::uint64_t min_in_place = 1) {
    return {.limits = GetParam(),
            .block_bytes = blocks * Unit(),
            .min_in_place_bytes = min_in_place,
            .coalesce_bytes = Unit()};
  }
  static std::vector<std::uint64_t> Boundaries(std::uint64_t most) {
    std::vector<std::uint64_t> points{0, 1};
    for (std::uint64_t k = 1; k <= most; ++k) {
      for (const std::uint64_t at : {k * Unit() - 1, k * Unit(), k * Unit() + 1}) {
        points.push_back(at);
      }
    }
    return points;
  }
};

TEST_P(ReadPlanTest, KeepsItsPromisesForARangeAroundEveryBoundary) {
  const AlignedMemory memory(6 * Unit());
  for (const std::uint64_t begin : Boundaries(2)) {
    for (const std::uint64_t length : Boundaries(3)) {
      if (length == 0) continue;
      const Range range{.begin = begin, .end = begin + length};
      // The same residue as the file, so that whole blocks fit, and another one.
      for (const std::uint64_t residue : {begin % kLargestAlignment, std::uint64_t{4}}) {
        const AlignedMemory target(length + kLargestAlignment, residue);
        for (const bool fresh : {false, true}) {
          ExpectKept({range}, {{.range = range, .memory = target.data(), .fresh = fresh}},
                     Options(1 + length % 3));
          ASSERT_FALSE(HasFatalFailure())
              << length << " at " << begin << ", residue " << residue << ", fresh " << fresh;
        }
      }
      ExpectKept({range}, {}, Options(2));
    }
  }
}

TEST_P(ReadPlanTest, KeepsItsPromisesForTwoRangesAtEveryDistance) {
  for (const std::uint64_t begin : {std::uint64_t{0}, std::uint64_t{1}, Unit() - 1}) {
    for (const std::uint64_t length : {std::uint64_t{1}, Unit() - 1, Unit(), 2 * Unit() + 1}) {
      for (const std::uint64_t gap : Boundaries(3)) {
        const Range first{.begin = begin, .end = begin + length};
        const Range second{.begin = first.end + gap, .end = first.end + gap + Unit() + 1};
        ExpectKept({first, second}, {}, Options(2));
        ASSERT_FALSE(HasFatalFailure()) << length << " at " << begin << ", gap " << gap;
      }
    }
  }
}

TEST_P(ReadPlanTest, KeepsItsPromisesForRandomRangesAndDeliveries) {
  const Seed seed;
  Random random(seed.value());
  for (int round = 0; round < 60; ++round) {
    std::vector<Range> wanted;
    std::vector<Delivery> deliveries;
    std::vector<AlignedMemory> memory;
    std::uint64_t at = Between(random, 0, 2 * Unit());
    const std::uint64_t count = Between(random, 1, 5);
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t length = Between(random, 1, 3 * Unit() + 9000);
      const Range range{.begin = at, .end = at + length};
      wanted.push_back(range);
      const std::uint64_t views = Between(random, 0, 3);
      for (std::uint64_t v = 0; v < views; ++v) {
        Range view = range;
        if (OnceIn(random, 2)) view.begin += Between(random, 0, length - 1);
        if (OnceIn(random, 2)) view.end = Between(random, view.begin + 1, range.end);
        const std::uint64_t residue = OnceIn(random, 3) ? Between(random, 0, kLargestAlignment - 1)
                                                        : view.begin % kLargestAlignment;
        memory.emplace_back(view.end - view.begin + kLargestAlignment, residue);
        deliveries.push_back(
            {.range = view, .memory = memory.back().data(), .fresh = OnceIn(random, 3)});
      }
      at = range.end + (OnceIn(random, 2) ? 0 : Between(random, 1, 3 * Unit()));
    }
    std::ranges::stable_sort(deliveries, {},
                             [](const Delivery& delivery) { return delivery.range.begin; });
    ExpectKept(wanted, deliveries, Options(Between(random, 1, 4), Between(random, 1, 2 * Unit())));
    ASSERT_FALSE(HasFatalFailure()) << "round " << round;
  }
}

TEST_P(ReadPlanTest, ReadsWholePagesOfADeliveryInPlaceWhenItsAddressAllowsIt) {
  const DeviceLimits& limits = GetParam();
  const std::uint64_t page =
      std::max<std::uint64_t>({limits.offset_align, limits.memory_align, kPage});
  const Range range{.begin = page - 8, .end = 6 * page + 3};
  const AlignedMemory memory(range.end - range.begin, kLargestAlignment - 8);
  auto options = Options(4 * kPage / Unit() + 1);
  options.block_bytes = 4 * page;
  const auto bytes = [&](const ReadPlanOptions& by) {
    return PlanReads(std::vector{range},
                     std::vector{Delivery{.range = range, .memory = memory.data()}}, by)
        .in_place_bytes;
  };
  // Buffered reads need no alignment, so nothing is staged at all.
  const std::uint64_t last = base::AlignDown(
      range.end,
      std::max<std::uint64_t>(limits.direct ? limits.offset_align : 1, limits.direct ? kPage : 1));
  const std::uint64_t body = limits.direct ? last - page : range.end - range.begin;
  EXPECT_EQ(bytes(options), body);
  options.min_in_place_bytes = body;
  EXPECT_EQ(bytes(options), body);
  options.min_in_place_bytes = body + 1;
  EXPECT_EQ(bytes(options), 0U) << "shorter than the minimum";
}

TEST_P(ReadPlanTest, NeverTouchesTheMemoryItPlansFor) {
  constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
  const fastpersist::testing::ForbiddenMemory memory(8 * kGiB);
  const Range range{.begin = 0, .end = 8 * kGiB};
  const std::vector<Delivery> deliveries{
      {.range = range, .memory = const_cast<std::byte*>(memory.bytes().data())}};
  const auto plan = PlanReads(
      std::vector{range}, deliveries,
      {.limits = GetParam(), .block_bytes = kGiB / 4, .coalesce_bytes = std::uint64_t{128} << 10});
  EXPECT_EQ(plan.reads.size(), 32U);
  EXPECT_EQ(plan.in_place_bytes + plan.staged_bytes, 8 * kGiB);
}

std::string NameOf(const ::testing::TestParamInfo<DeviceLimits>& limits) {
  return fmt::format("Memory{}Offset{}{}", limits.param.memory_align, limits.param.offset_align,
                     limits.param.direct ? "" : "Buffered");
}

INSTANTIATE_TEST_SUITE_P(Limits, ReadPlanTest,
                         ::testing::Values(DeviceLimits{4, 512}, DeviceLimits{512, 512},
                                           DeviceLimits{4096, 512}, DeviceLimits{4, 4096},
                                           DeviceLimits{512, 4096}, DeviceLimits{4096, 4096},
                                           DeviceLimits{16384, 512}, DeviceLimits{4, 65536},
                                           DeviceLimits{4096, 65536},
                                           DeviceLimits{1, 1, /*direct=*/false}),
                         NameOf);

constexpr DeviceLimits kSmall{.memory_align = 4, .offset_align = 512, .direct = true};

TEST(ReadPlan, NothingWantedNeedsNoRead) {
  EXPECT_TRUE(PlanReads({}, {}, {}).reads.empty());
  EXPECT_TRUE(PlanReads(std::vector<Range>{{.begin = 7, .end = 7}}, {},
                        {.limits = {.memory_align = 1, .offset_align = 1, .direct = false}})
                  .reads.empty());
}

TEST(ReadPlan, RangesUpToTheDistanceAreReadAsOneAndFartherOnesAreNot) {
  const ReadPlanOptions options{.limits = kSmall, .block_bytes = 8192, .coalesce_bytes = 1024};
  const auto plan = [&](std::uint64_t gap) {
    return PlanReads(
        std::vector<Range>{{.begin = 0, .end = 512}, {.begin = 512 + gap, .end = 1024 + gap}}, {},
        options);
  };
  ASSERT_EQ(plan(1024).reads.size(), 1U);
  EXPECT_EQ(plan(1024).staged_bytes, 2048U) << "the gap is read too";
  ASSERT_EQ(plan(1025).reads.size(), 2U);
  EXPECT_EQ(plan(1025).reads[1].offset, 1536U);
}

TEST(ReadPlan, FreshMemoryIsReadThroughStagingWhateverItsAddress) {
  const AlignedMemory memory(3 * 4096);
  const Range range{.begin = 0, .end = 2 * 4096 + 700};
  const ReadPlanOptions options{
      .limits = kSmall, .block_bytes = 1 << 20, .coalesce_bytes = 1 << 20};
  std::vector<Delivery> deliveries{{.range = range, .memory = memory.data(), .fresh = true}};
  const auto fresh = PlanReads(std::vector{range}, deliveries, options);
  ASSERT_EQ(fresh.reads.size(), 1U);
  EXPECT_EQ(fresh.reads[0].length, 2 * 4096U + 700);
  EXPECT_EQ(fresh.reads[0].padded_length, 2 * 4096U + 1024);
  EXPECT_EQ(fresh.in_place_bytes, 0U);

  deliveries[0].fresh = false;
  const auto touched = PlanReads(std::vector{range}, deliveries, options);
  ASSERT_EQ(touched.reads.size(), 2U);
  EXPECT_EQ(touched.in_place_bytes, 2 * 4096U);
  EXPECT_EQ(touched.reads[1].in_place, nullptr);
  EXPECT_EQ(touched.staged_bytes, 700U);
}

// One delivery may span everything, however far apart the wanted ranges are.
TEST(ReadPlan, ADeliveryOfEverythingIsReadInPlaceWhereItIsWantedAndNowhereElse) {
  constexpr std::uint64_t kGap = std::uint64_t{1} << 20;
  AlignedMemory memory(3 * kGap);
  const Range wanted[] = {{.begin = 10, .end = 3 * kPage},
                          {.begin = 2 * kGap + 5, .end = 3 * kGap}};
  const Delivery all{.range = {.begin = 0, .end = 3 * kGap}, .memory = memory.data()};
  const ReadPlan plan = PlanReads(wanted, {&all, 1}, {.coalesce_bytes = kPage});
  EXPECT_EQ(plan.staged_bytes, 0U);
  ASSERT_FALSE(plan.reads.empty());
  std::uint64_t read = 0;
  for (const PlannedRead& one : plan.reads) {
    EXPECT_EQ(one.in_place, memory.data() + one.offset);
    EXPECT_TRUE(one.offset + one.padded_length <= 3 * kPage || one.offset >= 2 * kGap)
        << "reads " << one.offset << ", in the gap";
    read += one.length;
  }
  EXPECT_EQ(read, 3 * kPage + kGap);
}

TEST(ReadPlan, OfTwoDeliveriesOfTheSameBytesOneIsReadInPlace) {
  const AlignedMemory one(8192);
  const AlignedMemory other(8192);
  const Range range{.begin = 0, .end = 8192};
  const auto plan =
      PlanReads(std::vector{range},
                std::vector<Delivery>{{.range = range, .memory = one.data()},
                                      {.range = range, .memory = other.data()}},
                {.limits = kSmall, .block_bytes = 1 << 20, .coalesce_bytes = 1 << 20});
  ASSERT_EQ(plan.reads.size(), 1U);
  EXPECT_EQ(plan.reads[0].in_place, one.data());
}

}  // namespace
}  // namespace fastpersist::plan
