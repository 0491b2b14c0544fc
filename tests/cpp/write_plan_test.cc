// SPDX-License-Identifier: Apache-2.0
#include "plan/write_plan.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "base/align.h"
#include "testing/aligned_memory.h"
#include "testing/forbidden_memory.h"
#include "testing/seed.h"
#include "testing/streams.h"

namespace fastpersist::plan {

void PrintTo(const DeviceLimits& limits, std::ostream* out) {
  *out << fmt::format("memory {} offset {}{}", limits.memory_align, limits.offset_align,
                      limits.direct ? "" : " buffered");
}

namespace {

using fastpersist::testing::Between;
using fastpersist::testing::Random;
using fastpersist::testing::RandomTestStream;
using fastpersist::testing::Seed;
using fastpersist::testing::TestStream;
using fastpersist::testing::TestStreamBuilder;
using layout::Extent;

// Where the extent that holds the whole write lies in memory at the write's offset; null if none
// does.
const std::byte* SourceOf(const layout::Stream& stream, const PlannedWrite& write) {
  for (const Extent& extent : stream.extents()) {
    if (extent.kind == Extent::Kind::kMemory && extent.offset <= write.offset &&
        write.offset + write.length <= extent.end()) {
      return extent.bytes + (write.offset - extent.offset);
    }
  }
  return nullptr;
}

// The promises of one write, in words; empty when all hold.
std::string BreachOf(const PlannedWrite& write, const layout::Stream& stream,
                     const PlanOptions& options, bool is_last) {
  const DeviceLimits& limits = options.limits;
  if (write.length == 0) return "an empty write";
  if (write.padded_length > options.block_bytes) return "longer than a block";
  if (!base::IsAligned(write.offset, limits.offset_align)) return "offset not aligned";
  if (!base::IsAligned(write.padded_length, limits.offset_align)) return "length not aligned";
  if (write.padded_length < write.length) return "shorter than its bytes";
  if (write.padded_length - write.length >= limits.offset_align) return "more padding than needed";
  if (write.padded_length != write.length && !is_last) return "padding before the end";
  if (write.in_place == nullptr) return "";
  if (!limits.direct) return "in place without direct I/O";
  if (write.padded_length != write.length) return "padding read from the caller's memory";
  if (write.in_place != SourceOf(stream, write)) return "in place, but from the wrong memory";
  if (!base::IsAlignedAddress(write.in_place, limits.memory_align)) return "address not aligned";
  return "";
}

// All promises of a plan for the range.
void ExpectKept(const layout::Stream& stream, Range range, const PlanOptions& options) {
  const WritePlan plan = PlanWrites(stream, range, options);
  std::uint64_t at = range.begin;
  std::uint64_t staged = 0;
  std::uint64_t in_place = 0;
  for (const PlannedWrite& write : plan.writes) {
    ASSERT_EQ(write.offset, at) << "a hole or an overlap";
    at += write.length;
    (write.in_place != nullptr ? in_place : staged) += write.length;
    ASSERT_EQ(BreachOf(write, stream, options, &write == &plan.writes.back()), "")
        << write.length << " bytes at " << write.offset << " of " << stream.size();
  }
  ASSERT_EQ(at, range.end);
  EXPECT_EQ(plan.staged_bytes, staged);
  EXPECT_EQ(plan.in_place_bytes, in_place);
}

class WritePlanTest : public ::testing::TestWithParam<DeviceLimits> {
 protected:
  [[nodiscard]] static std::uint64_t Block() {
    return std::max<std::uint64_t>({GetParam().memory_align, GetParam().offset_align, 8});
  }
  [[nodiscard]] static PlanOptions Options(std::uint64_t blocks, std::uint64_t min_in_place = 1) {
    return {
        .limits = GetParam(), .block_bytes = blocks * Block(), .min_in_place_bytes = min_in_place};
  }
};

TEST_P(WritePlanTest, KeepsItsPromisesAroundEveryBoundary) {
  const std::uint64_t block = Block();
  std::vector<std::uint64_t> sizes{0, 1, 2, 7};
  for (std::uint64_t k = 1; k <= 5; ++k) {
    for (const std::uint64_t size : {k * block - 1, k * block, k * block + 1})
      sizes.push_back(size);
  }
  for (const std::uint64_t head :
       {std::uint64_t{0}, std::uint64_t{1}, block - 1, block, block + 1}) {
    for (const std::uint64_t size : sizes) {
      for (const std::size_t residue : {std::size_t{0}, std::size_t{1}, head, head + 4}) {
        TestStreamBuilder builder(size);
        builder.Generated(head);
        if (size > 0) builder.Memory(size, residue % testing::kLargestAlignment);
        const TestStream made = std::move(builder).Finish();
        const Range all{.begin = 0, .end = made.stream.size()};
        ExpectKept(made.stream, all, Options(1));
        ExpectKept(made.stream, all, Options(2));
        ASSERT_FALSE(HasFatalFailure()) << head << " + " << size << ", residue " << residue;
      }
    }
  }
}

TEST_P(WritePlanTest, KeepsItsPromisesForRandomStreamsAndRanges) {
  const Seed seed;
  Random random(seed.value());
  for (int i = 0; i < 30; ++i) {
    const TestStream made = RandomTestStream(random, Between(random, 1, 20 * Block() + 5000));
    const std::uint64_t size = made.stream.size();
    const std::uint64_t align = GetParam().offset_align;
    const std::uint64_t begin = base::AlignDown(Between(random, 0, size), align);
    const std::uint64_t cut = base::AlignDown(Between(random, begin, size), align);
    const PlanOptions options = Options(Between(random, 1, 5), Between(random, 1, 3 * Block()));
    ExpectKept(made.stream, {.begin = 0, .end = size}, options);
    ExpectKept(made.stream, {.begin = begin, .end = size}, options);
    ExpectKept(made.stream, {.begin = begin, .end = cut}, options);
    ASSERT_FALSE(HasFatalFailure()) << "round " << i;
  }
}

TEST_P(WritePlanTest, WritesTheWholeBodyInPlaceWhenItsAddressAllowsIt) {
  const DeviceLimits& limits = GetParam();
  const std::uint64_t block = Block();
  // The body begins a little before a block; at that block its address is aligned.
  const std::uint64_t before = limits.offset_align == block ? 8 : 0;
  TestStreamBuilder builder(1);
  builder.Generated(4 * block - before)
      .Memory(before + 5 * block + 3, testing::kLargestAlignment - before);
  const TestStream made = std::move(builder).Finish();
  const WritePlan plan =
      PlanWrites(made.stream, {.begin = 0, .end = made.stream.size()}, Options(2));
  const std::uint64_t body = base::AlignDown(5 * block + 3, limits.offset_align);
  EXPECT_EQ(plan.in_place_bytes, limits.direct ? body : 0);
}

TEST_P(WritePlanTest, StagesBodiesThatAreShorterThanTheMinimum) {
  const std::uint64_t block = Block();
  TestStreamBuilder builder(1);
  builder.Memory(3 * block);
  const TestStream made = std::move(builder).Finish();
  const Range all{.begin = 0, .end = made.stream.size()};
  const bool direct = GetParam().direct;
  EXPECT_EQ(PlanWrites(made.stream, all, Options(1, 3 * block)).in_place_bytes,
            direct ? 3 * block : 0);
  EXPECT_EQ(PlanWrites(made.stream, all, Options(1, 3 * block + 1)).in_place_bytes, 0U);
}

TEST_P(WritePlanTest, NeverReadsTheMemoryItPlansFor) {
  constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
  const testing::ForbiddenMemory memory(8 * kGiB);
  layout::StreamBuilder builder;
  builder.AddMemory(memory.bytes().first(4 * kGiB + 5), 0);
  builder.AddMemory(memory.bytes(), 1);
  const auto stream = std::move(builder).Finish(2, nullptr);
  ExpectKept(stream, {.begin = 0, .end = stream.size()},
             {.limits = GetParam(), .block_bytes = kGiB / 4});
}

std::string NameOf(const ::testing::TestParamInfo<DeviceLimits>& limits) {
  return fmt::format("Memory{}Offset{}{}", limits.param.memory_align, limits.param.offset_align,
                     limits.param.direct ? "" : "Buffered");
}

INSTANTIATE_TEST_SUITE_P(Limits, WritePlanTest,
                         ::testing::Values(DeviceLimits{1, 1}, DeviceLimits{512, 512},
                                           DeviceLimits{4096, 4096}, DeviceLimits{16384, 16384},
                                           DeviceLimits{65536, 65536}, DeviceLimits{4, 512},
                                           DeviceLimits{4, 4096}, DeviceLimits{1, 65536},
                                           DeviceLimits{16384, 512}, DeviceLimits{65536, 1},
                                           DeviceLimits{4096, 16384},
                                           DeviceLimits{1, 1, /*direct=*/false},
                                           DeviceLimits{4096, 4096, /*direct=*/false}),
                         NameOf);

TEST(WritePlan, AnEmptyStreamNeedsNoWrite) {
  EXPECT_TRUE(PlanWrites(layout::Stream{}, {}, {}).writes.empty());
}

TEST(WritePlan, GluesSmallExtentsIntoBlocks) {
  TestStreamBuilder builder(1);
  for (int i = 0; i < 1000; ++i) builder.Generated(30).Memory(34).Late(16);
  const TestStream made = std::move(builder).Finish();
  const auto plan = PlanWrites(made.stream, {.begin = 0, .end = 80'000}, {.block_bytes = 65536});
  ASSERT_EQ(plan.writes.size(), 2U);
  EXPECT_EQ(plan.writes[0].length, 65536U);
  EXPECT_EQ(plan.writes[1].length, 80'000U - 65536U);
  EXPECT_EQ(plan.writes[1].padded_length, 16384U);
}

}  // namespace
}  // namespace fastpersist::plan
