// SPDX-License-Identifier: Apache-2.0
// A Slice is a range of a stream as a stream of its own, so that one writer writes its share by the
// same road as a whole file. What it cannot know are bytes that depend on checksums of records that
// lie, wholly or in part, in other slices: the descriptor of a record that began in another one,
// and the end of the file. There it has zeros of the right length, and a list of patches: once all
// have written, the checksums are put together (Combine), the patches rendered (RenderPatch) and
// written over the zeros.
//
// Pure: no files, no threads. The whole stream must outlive its slices: they refer to its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "layout/stream.h"
#include "plan/write_plan.h"

namespace fastpersist::partition {

/// A piece of one late extent.
struct Patch {
  std::uint64_t offset = 0;  ///< In the slice.
  std::uint64_t length = 0;
  std::uint32_t extent = 0;  ///< Index of the late extent in the whole stream.
  std::uint64_t skip = 0;    ///< Bytes of the late extent before the piece.
};

/// The bytes of one record's body that lie in the slice.
struct Fragment {
  std::uint32_t record = 0;
  std::uint64_t offset = 0;  ///< In the body.
  std::uint64_t length = 0;
};

struct Slice {
  layout::Stream stream;            ///< Offsets from 0; records numbered as in the whole.
  std::vector<Patch> patches;       ///< Ascending.
  std::vector<Fragment> fragments;  ///< Ascending; bodies that are patched are left out.
};

/// Preconditions: range lies within the stream; every body is one extent, and none is pulled.
[[nodiscard]] Slice Cut(const layout::Stream& whole, plan::Range range);

/// What was found of one fragment when its slice was written.
struct FragmentDigest {
  Fragment fragment;
  layout::RecordDigest digest;  ///< Of the fragment's bytes; its head are their first ones.
};

/// digests: of the slice's records, as the Filler found them.
[[nodiscard]] std::vector<FragmentDigest> DigestsOf(const Slice& slice,
                                                    std::span<const layout::RecordDigest> digests);

/// Puts together what all slices found, in the order of the slices. Records without fragments
/// (empty or patched ones) stay zero.
[[nodiscard]] std::vector<layout::RecordDigest> Combine(
    std::uint32_t record_count, std::span<const std::vector<FragmentDigest>> slices);

/// Renders the late extent of a patch and returns the piece. digests: of all records that precede
/// it; where the extent is itself a record's body, that record's digest is filled in. To be called
/// for the patches of the last slice, or of all of them, in ascending order.
[[nodiscard]] std::vector<std::byte> RenderPatch(const layout::Stream& whole, const Patch& patch,
                                                 std::span<layout::RecordDigest> digests);

/// The CRC-32 of the slice with the bytes in place of the zeros; crc: before, of `size` bytes.
[[nodiscard]] std::uint32_t PatchedCrc(std::uint32_t crc, std::uint64_t size, const Patch& patch,
                                       std::span<const std::byte> bytes);

}  // namespace fastpersist::partition
