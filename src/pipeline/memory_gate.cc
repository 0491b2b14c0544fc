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
constexpr const char* kMoved = "its storage was moved or resized while it was being saved";
constexpr const char* kBytesChanged = "its bytes changed while they were being saved";

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
  assert(std::ranges::all_of(setting_.live, [&](const LiveExtent& live) {
    const Extent& extent = stream.extents()[live.extent];
    return extent.kind == Extent::Kind::kMemory && extent.body_of != layout::kNoRecord;
  }));
}

const Extent& MemoryGate::ExtentOf(std::size_t live) const {
  return stream_.extents()[setting_.live[live].extent];
}

// Index of the first live extent that reaches beyond offset.
std::size_t MemoryGate::FirstLiveFrom(std::uint64_t offset) const {
  const auto found = std::ranges::partition_point(setting_.live, [&](const LiveExtent& live) {
    return stream_.extents()[live.extent].end() <= offset;
  });
  return static_cast<std::size_t>(found - setting_.live.begin());
}

// Index of the first live extent that does not begin before offset.
std::size_t MemoryGate::FirstLiveAt(std::uint64_t offset) const {
  const auto found = std::ranges::partition_point(setting_.live, [&](const LiveExtent& live) {
    return stream_.extents()[live.extent].offset < offset;
  });
  return static_cast<std::size_t>(found - setting_.live.begin());
}

// The writer has no business with live memory from here on.
std::uint64_t MemoryGate::LiveEnd() const {
  const std::size_t beyond = FirstLiveAt(captured_from_);
  return beyond == 0 ? 0 : std::min(ExtentOf(beyond - 1).end(), captured_from_);
}

bool MemoryGate::Unmoved(std::size_t live) const {
  const LiveExtent& watched = setting_.live[live];
  if (watched.address == nullptr) return true;
  const Extent& extent = ExtentOf(live);
  return Peek(watched.address) == reinterpret_cast<std::uintptr_t>(extent.bytes) &&
         Peek(watched.size) >= extent.length;
}

void MemoryGate::Changed(std::size_t live, std::string detail) {
  if (error_) return;
  error_ = Error{.code = ErrorCode::kStateChanged,
                 .operation = "save",
                 .entry = setting_.live[live].name,
                 .detail = std::move(detail),
                 .advice =
                     "nothing was committed; change attached tensors in optimizer.step() "
                     "only, or do not attach their optimizer"};
  failed_ = true;
}

bool MemoryGate::Begin() {
  const std::scoped_lock lock(mutex_);
  if (released_ && LiveEnd() > 0) return false;
  claimed_ = block_begin_ = block_end_ = 0;
  filling_ = in_place_ = false;
  for (Read& read : read_) read.length = 0;
  return true;
}

Result<void> MemoryGate::Claim(std::uint64_t end) {
  const std::scoped_lock lock(mutex_);
  if (error_) return std::unexpected(*error_);
  block_begin_ = std::exchange(block_end_, end);
  // What is read from now on was captured or is constant; storages may move.
  if (released_) return {};
  const std::uint64_t begin = claimed_;
  claimed_ = std::max(claimed_, std::min(end, captured_from_));
  for (std::size_t i = FirstLiveFrom(begin);
       i < read_.size() && ExtentOf(i).offset < claimed_ && begin < claimed_; ++i) {
    if (!Unmoved(i)) {
      Changed(i, kMoved);
      filling_ = false;
      changed_.notify_all();
      return std::unexpected(*error_);
    }
    filling_ = true;
  }
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
  Lock lock(mutex_);
  for (std::size_t i = FirstLiveFrom(block_begin_);
       i < read_.size() && ExtentOf(i).offset < block_end_; ++i) {
    NoteRead(i, digests[ExtentOf(i).body_of].crc);
    in_place_ = in_place_ || in_place;
  }
  filling_ = false;
  ReleaseIfDone(lock);
  changed_.notify_all();
}

// Of captured parts too: where an extent is captured in part, its checksum is of both.
void MemoryGate::NoteRead(std::size_t live, std::uint32_t crc) {
  const Extent& extent = ExtentOf(live);
  Read& read = read_[live];
  read.length = std::min(block_end_, extent.end()) - extent.offset;
  read.crc = crc;
  if (read.length < extent.length) return;
  // The bytes that an earlier attempt read must be found again.
  if (read.whole && read.whole != crc) Changed(live, kBytesChanged);
  read.whole = crc;
}

bool MemoryGate::InPlace() const {
  const std::scoped_lock lock(mutex_);
  const std::size_t captured = FirstLiveFrom(std::max(block_begin_, captured_from_));
  return captured == read_.size() || ExtentOf(captured).offset >= block_end_;
}

bool MemoryGate::InPlaceOnly() const {
  const std::scoped_lock lock(mutex_);
  return !released_ && in_place_ && claimed_ >= LiveEnd();
}

void MemoryGate::InPlaceDone() {
  Lock lock(mutex_);
  in_place_ = false;
  ReleaseIfDone(lock);
}

void MemoryGate::End() {
  Lock lock(mutex_);
  ending_ = true;
  changed_.wait(lock, [&] { return !capturing_ && !verifying_; });
  ending_ = false;
  filling_ = false;
  // An attempt that failed while the device was reading is repeated rather than let go.
  if (error_) in_place_ = false;
  ReleaseIfDone(lock);
  in_place_ = false;
  if (!released_) claimed_ = 0;
  changed_.notify_all();
}

void MemoryGate::Close() {
  Lock lock(mutex_);
  ending_ = true;
  changed_.wait(lock, [&] { return !capturing_ && !verifying_; });
  released_ = closed_ = true;
  changed_.notify_all();
}

// A window of a sixteenth, rounded up, goes round the extents.
bool MemoryGate::Sampled(std::size_t live) const {
  if (setting_.verify != VerifySource::kSample) return setting_.verify == VerifySource::kFull;
  const std::size_t count = read_.size();
  const std::size_t window = (count + kSampleOneIn - 1) / kSampleOneIn;
  const std::size_t first = (setting_.turn % kSampleOneIn) * window % count;
  return (live + count - first) % count < window;
}

bool MemoryGate::Same(std::size_t live, const Read& read) const {
  if (!Unmoved(live)) return false;
  std::uint32_t crc = 0;
  for (std::uint64_t at = 0; at < read.length;) {
    const auto bytes = Source(ExtentOf(live), at, read.length - at);
    crc = base::Crc32(bytes, crc);
    at += bytes.size();
  }
  return crc == read.crc;
}

// The second look comes after the last read of all, so that whatever happened in between is seen.
// Nobody waits for the lock meanwhile, and nothing is captured: there is nothing left to capture.
void MemoryGate::VerifySample(Lock& lock) {
  std::vector<std::size_t> sampled;
  for (std::size_t i = 0; i < read_.size() && ExtentOf(i).offset < captured_from_; ++i) {
    if (Sampled(i)) sampled.push_back(i);
  }
  const std::vector<Read> read = read_;
  verifying_ = true;
  lock.unlock();
  const auto differs =
      std::ranges::find_if(sampled, [&](std::size_t i) { return failed_ || !Same(i, read[i]); });
  lock.lock();
  verifying_ = false;
  if (differs != sampled.end()) Changed(*differs, kBytesChanged);
}

void MemoryGate::ReleaseIfDone(Lock& lock) {
  if (released_ || filling_ || in_place_ || capturing_ || verifying_) return;
  // Nothing is claimed any more after an error.
  if (!error_) {
    if (claimed_ < LiveEnd()) return;
    VerifySample(lock);
  }
  released_ = true;
  changed_.notify_all();
}

// The last live bytes that the writer has not claimed, as far as there is room for a copy.
std::optional<MemoryGate::Room> MemoryGate::FindRoom() const {
  const std::uint64_t room = setting_.spare.size() - spare_used_;
  const std::size_t beyond = FirstLiveAt(captured_from_);
  if (capturing_ || verifying_ || ending_ || error_ || beyond == 0 || room == 0) return {};
  const Extent& extent = ExtentOf(beyond - 1);
  const std::uint64_t end = std::min(extent.end(), captured_from_);
  const std::uint64_t from = std::max(extent.offset, claimed_);
  if (from >= end) return {};
  const std::uint64_t length = std::min({end - from, kCaptureBytes, room});
  return Room{.live = beyond - 1, .begin = end - length, .end = end};
}

// False: there is nothing to do. Otherwise look again.
bool MemoryGate::CaptureChunk(Lock& lock) {
  const auto room = FindRoom();
  if (!room) return false;
  if (!Unmoved(room->live)) {
    Changed(room->live, kMoved);
    return true;
  }
  const std::uint64_t length = room->end - room->begin;
  const auto copy = setting_.spare.subspan(spare_used_, length);
  spare_used_ += length;
  capturing_ = true;
  const Extent& extent = ExtentOf(room->live);
  lock.unlock();
  std::memcpy(copy.data(), extent.bytes + (room->begin - extent.offset), length);
  lock.lock();
  capturing_ = false;
  chunks_.push_back({.begin = room->begin, .bytes = copy});
  // The writer may have come closer meanwhile; what it claimed it reads from the original.
  captured_from_ = std::max(room->begin, claimed_);
  captured_bytes_ += length;
  changed_.notify_all();
  return true;
}

bool MemoryGate::WaitReleased(Clock::time_point deadline, bool capture) {
  Lock lock(mutex_);
  for (;;) {
    ReleaseIfDone(lock);
    if (released_) return true;
    if (Clock::now() >= deadline) return false;
    if (capture && CaptureChunk(lock)) continue;
    changed_.wait_until(lock, deadline);
  }
}

bool MemoryGate::released() const {
  const std::scoped_lock lock(mutex_);
  return released_;
}

void MemoryGate::Abandon(Error error) {
  Lock lock(mutex_);
  if (closed_) return;
  if (!error_) error_ = std::move(error);
  failed_ = true;
  // Nobody begins to read any more.
  changed_.wait(lock, [&] { return released_ || !(filling_ || capturing_ || verifying_); });
  released_ = true;
  changed_.notify_all();
}

bool MemoryGate::StillTheSame(std::span<const std::size_t> live) {
  Lock lock(mutex_);
  const std::vector<Read> read = read_;
  const std::uint64_t live_end = captured_from_;
  lock.unlock();
  return std::ranges::all_of(live, [&](std::size_t i) {
    return read[i].length == 0 || ExtentOf(i).offset >= live_end || Same(i, read[i]);
  });
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
