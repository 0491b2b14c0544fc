// SPDX-License-Identifier: Apache-2.0
#include "plan/read_plan.h"

#include <algorithm>
#include <cassert>

#include "base/align.h"

namespace fastpersist::plan {
namespace {

using base::AlignDown;
using base::AlignUp;

constexpr std::uint32_t kPage = 4096;

class ReadPlanner {
 public:
  explicit ReadPlanner(const ReadPlanOptions& options)
      : options_(options),
        page_(options.limits.direct ? std::max(options.limits.offset_align, kPage) : 1) {}

  /// A run of wanted bytes without a gap worth skipping.
  void Run(Range run, std::span<const Delivery> deliveries) {
    std::uint64_t planned = AlignDown(run.begin, options_.limits.offset_align);
    for (const Delivery& delivery : deliveries) {
      if (delivery.fresh) continue;
      const Range body = InPlaceBody(delivery, {.begin = planned, .end = run.end});
      if (body.begin >= body.end) continue;
      Stage({.begin = planned, .end = body.begin});
      InPlace(body, delivery.memory + (body.begin - delivery.range.begin));
      planned = body.end;
    }
    Stage({.begin = planned, .end = run.end});
  }

  [[nodiscard]] ReadPlan Finish() && { return std::move(plan_); }

 private:
  // The part of a delivery, within what is left of the run, that may be read where it belongs;
  // empty if none.
  [[nodiscard]] Range InPlaceBody(const Delivery& delivery, Range left) const {
    const Range body{
        .begin = AlignUp(std::max(delivery.range.begin, left.begin), page_),
        .end = AlignDown(std::min(delivery.range.end, left.end), page_),
    };
    const bool usable =
        body.begin < body.end && body.end - body.begin >= options_.min_in_place_bytes &&
        base::IsAlignedAddress(delivery.memory + (body.begin - delivery.range.begin),
                               std::max<std::uint64_t>(options_.limits.memory_align,
                                                       options_.limits.direct ? kPage : 1));
    return usable ? body : Range{};
  }

  void Stage(Range range) {
    while (range.begin < range.end) {
      const std::uint64_t length = std::min(options_.block_bytes, range.end - range.begin);
      plan_.reads.push_back({.offset = range.begin,
                             .length = length,
                             .padded_length = AlignUp(length, options_.limits.offset_align)});
      plan_.staged_bytes += length;
      range.begin += length;
    }
  }

  void InPlace(Range range, std::byte* memory) {
    while (range.begin < range.end) {
      const std::uint64_t length = std::min(options_.block_bytes, range.end - range.begin);
      plan_.reads.push_back(
          {.offset = range.begin, .length = length, .padded_length = length, .in_place = memory});
      plan_.in_place_bytes += length;
      range.begin += length;
      memory += length;
    }
  }

  const ReadPlanOptions& options_;
  std::uint64_t page_;
  ReadPlan plan_;
};

}  // namespace

ReadPlan PlanReads(std::span<const Range> wanted, std::span<const Delivery> deliveries,
                   const ReadPlanOptions& options) {
  assert(base::IsAligned(options.block_bytes, options.limits.offset_align));
  assert(base::IsAligned(options.block_bytes, options.limits.memory_align));
  assert(options.coalesce_bytes >= options.limits.offset_align);
  ReadPlanner planner(options);
  std::size_t first = 0;  // the first delivery that may reach into this run or a later one
  for (std::size_t i = 0; i < wanted.size();) {
    Range run = wanted[i++];
    while (i < wanted.size() && wanted[i].begin - run.end <= options.coalesce_bytes) {
      run.end = wanted[i++].end;
    }
    std::size_t end = first;
    while (end < deliveries.size() && deliveries[end].range.begin < run.end) ++end;
    planner.Run(run, deliveries.subspan(first, end - first));
    while (first < end && deliveries[first].range.end <= run.end) ++first;
  }
  return std::move(planner).Finish();
}

}  // namespace fastpersist::plan
