// SPDX-License-Identifier: Apache-2.0
#include "pipeline/filler.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/crc32.h"

namespace fastpersist::pipeline {

using layout::Extent;
using layout::RecordDigest;

Filler::Filler(const layout::Stream& stream) : stream_(stream), digests_(stream.record_count()) {}

void Filler::Fill(std::span<std::byte> out) {
  while (!out.empty()) {
    const Extent& extent = stream_.extents()[extent_];
    const std::uint64_t at = offset_ - extent.offset;
    const std::size_t length = std::min<std::uint64_t>(out.size(), extent.length - at);
    if (extent.kind == Extent::Kind::kPulled) {
      Pull(extent, at, out.first(length));
    } else {
      Copy(extent, at, out.first(length));
    }
    out = out.subspan(length);
    AdvanceTo(offset_ + length);
  }
}

void Filler::Copy(const Extent& extent, std::uint64_t at, std::span<std::byte> out) {
  const std::byte* source = extent.kind == Extent::Kind::kLate ? Rendered(extent) : extent.bytes;
  if (extent.body_of == layout::kNoRecord) {
    std::copy_n(source + at, out.size(), out.begin());
    return;
  }
  RecordDigest& digest = digests_[extent.body_of];
  digest.crc = base::CopyAndCrc32(out, {source + at, out.size()}, digest.crc);
  // From the copy: what the digest says must be about the bytes that are written.
  NoteBody(extent, at, out);
}

void Filler::Pull(const Extent& extent, std::uint64_t at, std::span<std::byte> out) {
  if (error_) return;
  if (auto pulled = stream_.pulled()->Pull(extent.pull_id, at, out); !pulled) {
    error_ = std::move(pulled.error());
    return;
  }
  if (extent.body_of == layout::kNoRecord) return;
  RecordDigest& digest = digests_[extent.body_of];
  digest.crc = base::Crc32(out, digest.crc);
  NoteBody(extent, at, out);
}

void Filler::PassOver(std::uint64_t length) {
  const Extent& extent = stream_.extents()[extent_];
  const std::uint64_t at = offset_ - extent.offset;
  assert(extent.kind == Extent::Kind::kMemory && at + length <= extent.length);
  if (extent.body_of != layout::kNoRecord) {
    const std::span bytes(extent.bytes + at, length);
    RecordDigest& digest = digests_[extent.body_of];
    digest.crc = base::Crc32(bytes, digest.crc);
    NoteBody(extent, at, bytes);
  }
  AdvanceTo(offset_ + length);
}

void Filler::AdvanceTo(std::uint64_t offset) {
  offset_ = offset;
  while (extent_ < stream_.extents().size() && stream_.extents()[extent_].end() <= offset_) {
    ++extent_;
  }
}

void Filler::NoteBody(const Extent& extent, std::uint64_t at, std::span<const std::byte> bytes) {
  auto& head = digests_[extent.body_of].head;
  if (at >= head.size()) return;
  const std::size_t count = std::min<std::size_t>(head.size() - at, bytes.size());
  std::copy_n(bytes.begin(), count, head.begin() + static_cast<std::ptrdiff_t>(at));
}

const std::byte* Filler::Rendered(const Extent& extent) {
  if (rendered_extent_ != extent_) {
    rendered_.resize(extent.length);
    stream_.late()->Render(extent.late_id, digests_, rendered_);
    rendered_extent_ = extent_;
  }
  return rendered_.data();
}

}  // namespace fastpersist::pipeline
