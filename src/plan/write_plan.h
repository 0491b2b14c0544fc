// SPDX-License-Identifier: Apache-2.0
// A WritePlan turns a range of a stream into the writes that the device sees: block-aligned, in
// file order, with an explicit padded tail. Pure; tested with every size around every boundary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "layout/stream.h"

namespace fastpersist::plan {

/// What one open file demands of direct I/O. Powers of two. Probed once, then a plain value.
struct DeviceLimits {
  std::uint32_t memory_align = 4096;  ///< Of the address.
  std::uint32_t offset_align = 4096;  ///< Of the file offset and the length.
  bool direct = true;                 ///< False: buffered; alignments are a matter of speed only.
};

/// One write. [offset, offset + length) is a range of the stream; padded_length bytes are written,
/// the padding being cut off by the final truncation.
struct PlannedWrite {
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::uint64_t padded_length = 0;
  /// Not null: written straight from the caller's memory, which satisfies memory_align.
  const std::byte* in_place = nullptr;
};

struct WritePlan {
  std::vector<PlannedWrite> writes;
  std::uint64_t staged_bytes = 0;    ///< Sum of length over staged writes.
  std::uint64_t in_place_bytes = 0;  ///< Sum of length over in-place writes.
};

/// A half-open range of stream bytes.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct PlanOptions {
  DeviceLimits limits;
  std::uint64_t block_bytes = std::uint64_t{4}
                              << 20;  ///< Longest write; a multiple of offset_align.
  /// Aligned bodies of at least this many bytes are written in place; shorter ones are cheaper
  /// staged.
  std::uint64_t min_in_place_bytes = 0;
};

/// Plans range of the stream. Preconditions: range.begin is a multiple of offset_align; range.end
/// is one too, or the end of the stream; block_bytes is a multiple of both alignments.
[[nodiscard]] WritePlan PlanWrites(const layout::Stream& stream, Range range,
                                   const PlanOptions& options);

}  // namespace fastpersist::plan
