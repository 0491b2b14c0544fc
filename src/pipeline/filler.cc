// SPDX-License-Identifier: Apache-2.0
#include "pipeline/filler.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/crc32.h"

namespace fastpersist::pipeline {

using layout::Extent;
using layout::RecordDigest;

Filler::Filler(const layout::Stream& stream, const MemoryGate* gate, bool whole_crc)
    : stream_(stream), gate_(gate), whole_crc_(whole_crc), digests_(stream.record_count()) {}

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
  if (gate_ != nullptr && extent.kind == Extent::Kind::kMemory) {
    while (!out.empty()) {
      const auto source = gate_->Source(extent, at, out.size());
      CopyFrom(source, extent, at, out.first(source.size()));
      at += source.size();
      out = out.subspan(source.size());
    }
    return;
  }
  const std::byte* source = extent.kind == Extent::Kind::kLate ? Rendered(extent) : extent.bytes;
  CopyFrom({source + at, out.size()}, extent, at, out);
}

void Filler::CopyFrom(std::span<const std::byte> source, const Extent& extent, std::uint64_t at,
                      std::span<std::byte> out) {
  Count(extent.body_of, source);
  if (extent.body_of == layout::kNoRecord) {
    std::ranges::copy(source, out.begin());
    return;
  }
  RecordDigest& digest = digests_[extent.body_of];
  digest.crc = base::CopyAndCrc32(out, source, digest.crc);
  // From the copy: what the digest says must be about the bytes that are written.
  NoteBody(extent, at, out);
}

// The whole stream's checksum follows from those of its records: no body is looked at twice.
void Filler::Count(std::uint32_t record, std::span<const std::byte> bytes) {
  if (!whole_crc_) return;
  if (record != record_) {
    crc_ = crc();
    record_ = record;
    record_bytes_ = 0;
    // What the digest holds of the record already, if it was left and is gone on with, cancels out:
    // combining is linear.
    if (record != layout::kNoRecord) crc_ ^= digests_[record].crc;
  }
  if (record == layout::kNoRecord) {
    crc_ = base::Crc32(bytes, crc_);
  } else {
    record_bytes_ += bytes.size();
  }
}

std::uint32_t Filler::crc() const {
  return record_ == layout::kNoRecord
             ? crc_
             : base::CombineCrc32(crc_, digests_[record_].crc, record_bytes_);
}

void Filler::Pull(const Extent& extent, std::uint64_t at, std::span<std::byte> out) {
  if (error_) return;
  if (auto pulled = stream_.pulled()->Pull(extent.pull_id, at, out); !pulled) {
    error_ = std::move(pulled.error());
    return;
  }
  Count(extent.body_of, out);
  if (extent.body_of == layout::kNoRecord) return;
  RecordDigest& digest = digests_[extent.body_of];
  digest.crc = base::Crc32(out, digest.crc);
  NoteBody(extent, at, out);
}

void Filler::PassOver(std::uint64_t length) {
  const Extent& extent = stream_.extents()[extent_];
  const std::uint64_t at = offset_ - extent.offset;
  assert(extent.kind == Extent::Kind::kMemory && at + length <= extent.length);
  const std::span bytes(extent.bytes + at, length);
  Count(extent.body_of, bytes);
  if (extent.body_of != layout::kNoRecord) {
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
