// SPDX-License-Identifier: Apache-2.0
// A ReadPlan turns the ranges of a file that somebody wants into the reads that the device sees:
// sorted, coalesced, block-aligned, each either into a staging buffer or straight into the final
// memory. Pure; tested with every size around every boundary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/write_plan.h"

namespace fastpersist::plan {

/// The bytes of range go to memory; range.end - range.begin bytes of it. Several deliveries may
/// overlap (tensors that share storage).
struct Delivery {
  Range range;
  std::byte* memory = nullptr;
  /// Nobody has touched the memory yet: reading through staging is faster, whatever its address.
  bool fresh = false;
};

/// One read of padded_length bytes, of which the first length are wanted by somebody or lie between
/// those that are; the rest pads the last block of a run.
struct PlannedRead {
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::uint64_t padded_length = 0;
  /// Not null: read straight into final memory, which satisfies memory_align.
  std::byte* in_place = nullptr;
};

struct ReadPlan {
  std::vector<PlannedRead> reads;    ///< In file order; they do not overlap.
  std::uint64_t staged_bytes = 0;    ///< Sum of length over staged reads.
  std::uint64_t in_place_bytes = 0;  ///< Sum of length over in-place reads.
};

struct ReadPlanOptions {
  DeviceLimits limits;
  std::uint64_t block_bytes = std::uint64_t{4} << 20;  ///< Longest read; a multiple of both limits.
  /// Bodies of at least this many bytes are read in place; shorter ones are cheaper staged.
  std::uint64_t min_in_place_bytes = 0;
  /// Wanted ranges that are no farther apart are read as one. At least offset_align.
  std::uint64_t coalesce_bytes = std::uint64_t{128} << 10;
};

/// Plans the reads that cover all wanted ranges. Preconditions: both lists are in ascending order
/// of begin; wanted ranges do not overlap. Deliveries may reach beyond the wanted ranges (the arena
/// that mirrors a file does): what is read is what is wanted, and the gaps that are not worth
/// skipping.
///
/// Direct in-place reads cover whole pages of memory only, even when the device takes less: a
/// page that a concurrent fork(2) shares with a child must not also hold bytes that the program may
/// write meanwhile, since such a write would leave the device reading into the child's copy.
[[nodiscard]] ReadPlan PlanReads(std::span<const Range> wanted,
                                 std::span<const Delivery> deliveries,
                                 const ReadPlanOptions& options);

}  // namespace fastpersist::plan
