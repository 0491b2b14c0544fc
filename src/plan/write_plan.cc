// SPDX-License-Identifier: Apache-2.0
#include "plan/write_plan.h"

#include <algorithm>
#include <cassert>

#include "base/align.h"

namespace fastpersist::plan {
namespace {

using base::AlignDown;
using base::AlignUp;
using layout::Extent;

// The block-aligned middle of an extent that may be written from where it lies; empty if none.
Range InPlaceBody(const Extent& extent, Range range, const PlanOptions& options) {
  const DeviceLimits& limits = options.limits;
  const Range body{
      .begin = AlignUp(std::max(extent.offset, range.begin), limits.offset_align),
      .end = AlignDown(std::min(extent.end(), range.end), limits.offset_align),
  };
  const bool usable =
      limits.direct && extent.kind == Extent::Kind::kMemory && body.begin < body.end &&
      body.end - body.begin >= options.min_in_place_bytes &&
      base::IsAlignedAddress(extent.bytes + (body.begin - extent.offset), limits.memory_align);
  return usable ? body : Range{};
}

class Planner {
 public:
  explicit Planner(const PlanOptions& options) : options_(options) {}

  void Stage(Range range) {
    while (range.begin < range.end) {
      const std::uint64_t length = std::min(options_.block_bytes, range.end - range.begin);
      plan_.writes.push_back({.offset = range.begin,
                              .length = length,
                              .padded_length = AlignUp(length, options_.limits.offset_align)});
      plan_.staged_bytes += length;
      range.begin += length;
    }
  }

  void InPlace(Range range, const std::byte* bytes) {
    while (range.begin < range.end) {
      const std::uint64_t length = std::min(options_.block_bytes, range.end - range.begin);
      plan_.writes.push_back(
          {.offset = range.begin, .length = length, .padded_length = length, .in_place = bytes});
      plan_.in_place_bytes += length;
      range.begin += length;
      bytes += length;
    }
  }

  [[nodiscard]] WritePlan Finish() && { return std::move(plan_); }

 private:
  const PlanOptions& options_;
  WritePlan plan_;
};

}  // namespace

WritePlan PlanWrites(const layout::Stream& stream, Range range, const PlanOptions& options) {
  [[maybe_unused]] const DeviceLimits& limits = options.limits;
  assert(base::IsAligned(range.begin, limits.offset_align));
  assert(base::IsAligned(range.end, limits.offset_align) || range.end == stream.size());
  assert(base::IsAligned(options.block_bytes, limits.offset_align));
  assert(base::IsAligned(options.block_bytes, limits.memory_align));

  Planner planner(options);
  std::uint64_t planned = range.begin;
  const auto extents = stream.extents();
  auto extent = std::ranges::upper_bound(extents, range.begin, {}, &Extent::end);
  for (; extent != extents.end() && extent->offset < range.end; ++extent) {
    const Range body = InPlaceBody(*extent, range, options);
    if (body.begin == body.end) continue;
    planner.Stage({.begin = planned, .end = body.begin});
    planner.InPlace(body, extent->bytes + (body.begin - extent->offset));
    planned = body.end;
  }
  planner.Stage({.begin = planned, .end = range.end});
  return std::move(planner).Finish();
}

}  // namespace fastpersist::plan
