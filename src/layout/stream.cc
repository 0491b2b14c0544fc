// SPDX-License-Identifier: Apache-2.0
#include "layout/stream.h"

#include <utility>

namespace fastpersist::layout {

void StreamBuilder::Reserve(std::size_t extents, std::size_t generated_bytes) {
  stream_.extents_.reserve(extents);
  stream_.generated_.reserve(generated_bytes);
}

Extent& StreamBuilder::Append(Extent::Kind kind, std::uint64_t length, std::uint32_t body_of) {
  Extent& extent = stream_.extents_.emplace_back();
  extent.offset = offset_;
  extent.length = length;
  extent.kind = kind;
  extent.body_of = body_of;
  offset_ += length;
  return extent;
}

void StreamBuilder::AddGenerated(std::span<const std::byte> bytes, std::uint32_t body_of) {
  if (bytes.empty()) return;
  generated_at_.emplace_back(stream_.extents_.size(), stream_.generated_.size());
  stream_.generated_.insert(stream_.generated_.end(), bytes.begin(), bytes.end());
  Append(Extent::Kind::kGenerated, bytes.size(), body_of);
}

void StreamBuilder::AddMemory(std::span<const std::byte> bytes, std::uint32_t body_of) {
  if (bytes.empty()) return;
  Append(Extent::Kind::kMemory, bytes.size(), body_of).bytes = bytes.data();
}

void StreamBuilder::AddLate(std::uint64_t length, std::uint32_t late_id, std::uint32_t body_of) {
  if (length == 0) return;
  Append(Extent::Kind::kLate, length, body_of).late_id = late_id;
}

void StreamBuilder::AddPulled(PulledBody body, std::uint32_t body_of) {
  if (body.length == 0) return;
  Append(Extent::Kind::kPulled, body.length, body_of).pull_id = body.pull_id;
}

Stream StreamBuilder::Finish(std::uint32_t record_count, std::shared_ptr<const LateBytes> late) && {
  for (const auto& [extent, at] : generated_at_) {
    stream_.extents_[extent].bytes = stream_.generated_.data() + at;
  }
  stream_.late_ = std::move(late);
  stream_.record_count_ = record_count;
  return std::move(stream_);
}

}  // namespace fastpersist::layout
