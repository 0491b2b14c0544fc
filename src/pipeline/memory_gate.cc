// SPDX-License-Identifier: Apache-2.0
#include "pipeline/memory_gate.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstring>
#include <utility>

#include "base/crc32.h"

namespace fastpersist::pipeline {
namespace {

using layout::Extent;

// Copied at a time, so that the writer and a capturing owner meet closely.
constexpr std::uint64_t kCaptureBytes = std::uint64_t{4} << 20;
constexpr std::size_t kSampleOneIn = 16;

// The owner writes these cells without asking us; aligned loads are never torn.
std::uint64_t Peek(const std::uint64_t* cell) {
  return std::atomic_ref<std::uint64_t>(*const_cast<std::uint64_t*>(cell))  // NOLINT
      .load(std::memory_order_relaxed);
}

}  // namespace

MemoryGate::MemoryGate(const layout::Stream& stream, Setting setting)
    : stream_(stream),
      setting_(std::move(setting)),
      captured_from_(stream.size()),
      read_(setting_.live.size()) {
  released_ = setting_.live.empty();
}

const Extent& MemoryGate::ExtentOf(const LiveExtent& live) const {
  return stream_.extents()[live.extent];
}

// Index of the first live extent that reaches beyond offset.
std::size_t MemoryGate::FirstLiveFrom(std::uint64_t offset) const {
  const auto found = std::ranges::partition_point(
      setting_.live, [&](const LiveExtent& live) { return ExtentOf(live).end() <= offset; });
  return static_cast<std::size_t>(found - setting_.live.begin());
}

// The writer has no business with live memory from here on.
std::uint64_t MemoryGate::LiveEnd() const {
  const std::uint64_t last = setting_.live.empty() ? 0 : ExtentOf(setting_.live.back()).end();
  return std::min(last, captured_from_);
}

bool MemoryGate::Unmoved(const LiveExtent& live) const {
  const Extent& extent = ExtentOf(live);
  if (live.address == nullptr) return true;
  return Peek(live.address) == reinterpret_cast<std::uintptr_t>(extent.bytes) &&
         Peek(live.size) >= extent.length;
}

void MemoryGate::Changed(const LiveExtent& live, std::string_view detail) {
  if (error_) return;
  error_ = Error{.code = ErrorCode::kStateChanged,
                 .operation = "save",
                 .entry = live.name,
                 .detail = fmt::format("{}: {}", live.name, detail),
                 .advice =
                     "nothing was committed; change attached tensors in optimizer.step() "
                     "only, or do not attach their optimizer"};
}

bool MemoryGate::Begin() {
  const std::scoped_lock lock(mutex_);
  if (released_ && LiveEnd() > 0) return false;
  claimed_ = 0;
  filling_ = in_place_ = false;
  return true;
}

Result<void> MemoryGate::Claim(std::uint64_t end) {
  const std::scoped_lock lock(mutex_);
  if (error_) return std::unexpected(*error_);
  const std::uint64_t begin = claimed_;
  claimed_ = std::max(claimed_, std::min(end, captured_from_));
  for (std::size_t i = FirstLiveFrom(begin); i < setting_.live.size(); ++i) {
    const LiveExtent& live = setting_.live[i];
    if (ExtentOf(live).offset >= claimed_) break;
    if (Unmoved(live)) continue;
    Changed(live, "its storage was moved or resized while it was being saved");
    changed_.notify_all();
    return std::unexpected(*error_);
  }
  filling_ = true;
  return {};
}

std::span<const std::byte> MemoryGate::Source(const Extent& extent, std::uint64_t at,
                                              std::uint64_t length) const {
  const std::uint64_t offset = extent.offset + at;
  const std::scoped_lock lock(mutex_);
  // Chunks exist for live memory only; they are in descending order.
  const auto chunk = std::ranges::partition_point(
      chunks_, [&](const Chunk& candidate) { return candidate.begin > offset; });
  if (offset >= captured_from_ && chunk != chunks_.end() &&
      offset < chunk->begin + chunk->bytes.size()) {
    const auto rest = chunk->bytes.subspan(offset - chunk->begin);
    return rest.first(std::min<std::uint64_t>(length, rest.size()));
  }
  // A chunk may begin within this piece.
  if (offset < captured_from_) length = std::min(length, captured_from_ - offset);
  return {extent.bytes + at, length};
}

void MemoryGate::Filled(std::span<const layout::RecordDigest> digests, bool in_place) {
  const std::scoped_lock lock(mutex_);
  filling_ = false;
  in_place_ = in_place_ || in_place;
  digests_ = digests;
  ReleaseIfDone();
}

bool MemoryGate::InPlace(std::uint64_t end) const {
  const std::scoped_lock lock(mutex_);
  return end <= claimed_;
}

bool MemoryGate::InPlaceOnly() const {
  const std::scoped_lock lock(mutex_);
  return !released_ && in_place_ && claimed_ >= LiveEnd();
}

void MemoryGate::InPlaceDone() {
  const std::scoped_lock lock(mutex_);
  in_place_ = false;
  ReleaseIfDone();
}

void MemoryGate::End(bool last) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !capturing_; });
  ReleaseIfDone();
  filling_ = in_place_ = false;
  digests_ = {};
  if (!released_) claimed_ = 0;
  if (last) released_ = true;
  changed_.notify_all();
}

// What was read of each live extent, for comparisons after the digests are gone.
void MemoryGate::NoteRead() {
  for (std::size_t i = 0; i < read_.size(); ++i) {
    const Extent& extent = ExtentOf(setting_.live[i]);
    if (extent.offset >= claimed_) break;
    read_[i] = {.length = std::min(claimed_, extent.end()) - extent.offset,
                .crc = digests_[extent.body_of].crc};
  }
}

bool MemoryGate::Sampled(std::size_t live) const {
  return setting_.verify == VerifySource::kFull ||
         (setting_.verify == VerifySource::kSample && (live + setting_.turn) % kSampleOneIn == 0);
}

bool MemoryGate::Same(std::size_t live) const {
  const Read& read = read_[live];
  if (read.length == 0) return true;
  if (!Unmoved(setting_.live[live])) return false;
  return base::Crc32({ExtentOf(setting_.live[live]).bytes, read.length}) == read.crc;
}

// The second look comes after the last read of all, so that whatever happened in between is seen.
void MemoryGate::VerifySample() {
  for (std::size_t i = 0; i < read_.size() && !error_; ++i) {
    if (Sampled(i) && !Same(i)) {
      Changed(setting_.live[i], "its bytes changed while they were being saved");
    }
  }
}

void MemoryGate::ReleaseIfDone() {
  if (released_ || filling_ || in_place_ || capturing_ || claimed_ < LiveEnd()) return;
  NoteRead();
  if (!error_) VerifySample();
  released_ = true;
  changed_.notify_all();
}

// Copies the last live bytes that the writer has not claimed. False: there is nothing to copy, or
// no room for it.
bool MemoryGate::CaptureChunk(std::unique_lock<std::mutex>& lock) {
  const std::uint64_t room = setting_.spare.size() - spare_used_;
  std::size_t index = FirstLiveFrom(claimed_);
  // The last live extent that begins before what is captured.
  const auto last = std::ranges::partition_point(setting_.live, [&](const LiveExtent& live) {
    return ExtentOf(live).offset < captured_from_;
  });
  if (last == setting_.live.begin() || room == 0) return false;
  const auto at = static_cast<std::size_t>(last - setting_.live.begin()) - 1;
  if (at < index) return false;
  index = at;
  const LiveExtent& live = setting_.live[index];
  const Extent& extent = ExtentOf(live);
  const std::uint64_t end = std::min(extent.end(), captured_from_);
  const std::uint64_t from = std::max(extent.offset, claimed_);
  if (from >= end) return false;
  if (!Unmoved(live)) {
    Changed(live, "its storage was moved or resized while it was being saved");
    return false;
  }
  const std::uint64_t length = std::min({end - from, kCaptureBytes, room});
  const std::uint64_t begin = end - length;
  const auto copy = setting_.spare.subspan(spare_used_, length);
  spare_used_ += length;
  capturing_ = true;
  lock.unlock();
  std::memcpy(copy.data(), extent.bytes + (begin - extent.offset), length);
  lock.lock();
  capturing_ = false;
  changed_.notify_all();
  chunks_.push_back({.begin = begin, .bytes = copy});
  // The writer may have come closer meanwhile; what it claimed it reads from the original.
  captured_from_ = std::max(begin, claimed_);
  captured_bytes_ += length;
  return true;
}

bool MemoryGate::WaitReleased(Clock::time_point deadline, bool capture) {
  std::unique_lock lock(mutex_);
  while (!released_) {
    if (Clock::now() >= deadline) return false;
    if (capture && !capturing_ && !error_ && CaptureChunk(lock)) continue;
    ReleaseIfDone();
    if (released_) break;
    changed_.wait_until(lock, deadline);
  }
  return true;
}

bool MemoryGate::released() const {
  const std::scoped_lock lock(mutex_);
  return released_;
}

void MemoryGate::Abandon(Error error) {
  const std::scoped_lock lock(mutex_);
  if (released_) return;
  if (!error_) error_ = std::move(error);
  released_ = true;
  changed_.notify_all();
}

bool MemoryGate::StillTheSame(std::span<const std::size_t> live) {
  const std::scoped_lock lock(mutex_);
  return std::ranges::all_of(live, [&](std::size_t i) { return Same(i); });
}

std::optional<Error> MemoryGate::error() const {
  const std::scoped_lock lock(mutex_);
  return error_;
}

std::uint64_t MemoryGate::captured_bytes() const {
  const std::scoped_lock lock(mutex_);
  return captured_bytes_;
}

}  // namespace fastpersist::pipeline
