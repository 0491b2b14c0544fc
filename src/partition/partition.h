// SPDX-License-Identifier: Apache-2.0
// Which writer owns which part of a stream: one contiguous range each, in the order of the writers,
// so that the parts put together are the file. A pure function of sizes: every rank comes to the
// same answer without asking anybody (FastPersist, arXiv 2406.13768, section 4.2).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/write_plan.h"

namespace fastpersist::partition {

/// What is divided. [0, head_end) must be one writer's, and so must [tail_begin, size).
struct Divisible {
  std::uint64_t size = 0;
  /// End of what only the first writer can make: a torch file's pickle, which differs from rank to
  /// rank (device tags, the order of sets).
  std::uint64_t head_end = 0;
  /// Begin of what needs the checksums of everything before it: a torch file's end, from the record
  /// `version` on. The stream's size where there is no such thing.
  std::uint64_t tail_begin = 0;
};

/// Returns one range per weight, in order, that cover [0, size) without gap or overlap; ranges may
/// be empty. Boundaries are multiples of align. Where head and tail fit into their writers' shares,
/// every range is within one align of its share of the blocks, and with equal weights no two differ
/// by more than that; otherwise the writer of a head or tail that is longer than its share gets
/// nothing else, and the others divide the rest. Where head and tail meet in one block, the first
/// writer gets all.
///
/// weights: how fast each writer is, in any unit; a writer of weight 0 gets nothing, unless it is
/// the first or last with a head or tail to write. Equal when all are 0. Preconditions: weights is
/// not empty; align is a power of two; head_end <= tail_begin <= size.
[[nodiscard]] std::vector<plan::Range> Divide(const Divisible& stream,
                                              std::span<const std::uint64_t> weights,
                                              std::uint64_t align);

/// The writer of [tail_begin, size): the last, unless one got all. Precondition: from Divide.
[[nodiscard]] std::size_t TailOwner(std::span<const plan::Range> ranges);

}  // namespace fastpersist::partition
