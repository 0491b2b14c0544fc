// SPDX-License-Identifier: Apache-2.0
#include "pipeline/checked_queue.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "base/advice.h"
#include "base/align.h"
#include "engine/buffered_engine.h"

namespace fastpersist::pipeline {
namespace {

// A direct write that keeps ending within its first block is finished without direct I/O.
constexpr unsigned kMaxDirectRepeats = 8;
// EAGAIN means that the kernel is short of something; it passes, or it does not within 10 s.
constexpr unsigned kMaxRepeats = 10'000;
constexpr auto kPause = std::chrono::milliseconds(1);

}  // namespace

CheckedQueue::CheckedQueue(std::unique_ptr<engine::IoEngine>& engine, QueueFile file,
                           unsigned slots)
    : engine_(engine), file_(std::move(file)), transfers_(slots), completions_(slots) {
  assert(slots > 0);
  free_.reserve(slots);
  pending_.reserve(slots);
  for (unsigned slot = slots; slot-- > 0;) free_.push_back(slot);
}

CheckedQueue::~CheckedQueue() { Settle(); }

void CheckedQueue::Settle() {
  pending_.clear();
  while (in_flight_ > 0 && !reap_failed_) {
    ReapSome();
    pending_.clear();  // what was cut short is not gone on with
  }
}

Result<unsigned> CheckedQueue::AcquireSlot() {
  while (free_.empty() && !error_) ReapSome();
  if (error_) return std::unexpected(*error_);
  const unsigned slot = free_.back();
  free_.pop_back();
  return slot;
}

Result<void> CheckedQueue::Start(unsigned slot, std::uint64_t offset,
                                 std::span<const std::byte> padded, std::uint64_t length) {
  assert(!reading());
  // A request has one pointer for both directions; writes only read from it.
  return Begin(slot, {.data = const_cast<std::byte*>(padded.data()),
                      .offset = offset,
                      .padded = padded.size(),
                      .length = length});
}

Result<void> CheckedQueue::StartRead(unsigned slot, std::uint64_t offset,
                                     std::span<std::byte> padded, std::uint64_t length) {
  assert(reading());
  return Begin(
      slot, {.data = padded.data(), .offset = offset, .padded = padded.size(), .length = length});
}

Result<void> CheckedQueue::Begin(unsigned slot, const Transfer& transfer) {
  assert(!file_.limits.direct ||
         (base::IsAligned(transfer.offset, file_.limits.offset_align) &&
          base::IsAligned(transfer.padded, file_.limits.offset_align) &&
          base::IsAlignedAddress(transfer.data, file_.limits.memory_align)));
  transfers_[slot] = transfer;
  pending_.push_back(slot);
  SubmitPending();
  if (error_) return std::unexpected(*error_);
  return {};
}

Result<void> CheckedQueue::Await(unsigned slot) {
  while (!transfers_[slot].done && !error_) ReapSome();
  if (error_) return std::unexpected(*error_);
  return {};
}

Result<void> CheckedQueue::Drain() {
  while (!error_ && (in_flight_ > 0 || !pending_.empty())) ReapSome();
  if (error_) return std::unexpected(*error_);
  return {};
}

void CheckedQueue::SubmitPending() {
  if (leaving_direct_ && in_flight_ == 0) FinishLeavingDirect();
  while (!pending_.empty() && !error_ && !leaving_direct_) {
    const unsigned slot = pending_.front();
    const Transfer& transfer = transfers_[slot];
    // Without direct I/O there is no reason to move the padding.
    const std::uint64_t length = file_.limits.direct ? transfer.padded : transfer.length;
    engine::IoCompletion completed;
    auto submitted = engine_->Submit({.kind = file_.kind,
                                      .fd = file_.fd,
                                      .data = transfer.data,
                                      .length = length,
                                      .offset = transfer.offset,
                                      .tag = slot},
                                     &completed);
    if (!submitted) {
      engine_failed_ = true;
      Fail(std::move(submitted.error()));
      return;
    }
    if (*submitted == engine::Submitted::kBusy) return;
    pending_.erase(pending_.begin());
    if (*submitted == engine::Submitted::kQueued) {
      ++in_flight_;
    } else {
      Judge(slot, completed.result);
    }
  }
}

void CheckedQueue::ReapSome() {
  if (in_flight_ > 0) {
    auto reaped = engine_->Reap(completions_);
    if (!reaped) {
      reap_failed_ = true;
      engine_failed_ = true;
      Fail(std::move(reaped.error()));
      return;
    }
    in_flight_ -= static_cast<unsigned>(*reaped);
    for (const auto& completion : std::span(completions_).first(*reaped)) {
      Judge(static_cast<unsigned>(completion.tag), completion.result);
    }
  }
  SubmitPending();
}

void CheckedQueue::Judge(unsigned slot, std::int64_t result) {
  Transfer& transfer = transfers_[slot];
  if (result > 0) {
    Progress(slot, static_cast<std::uint64_t>(result));
  } else if (result == 0) {
    Fail(NothingMoved(transfer));
  } else if ((result == -EINTR || result == -EAGAIN) && transfer.attempts < kMaxRepeats) {
    if (result == -EAGAIN) std::this_thread::sleep_for(kPause);
    ++transfer.attempts;
    Again(slot);
  } else if (result == -EINVAL && file_.limits.direct) {
    LeaveDirect(fmt::format("the file refused an aligned direct {} at offset {} (EINVAL)",
                            reading() ? "read" : "write", transfer.offset));
    Again(slot);
  } else {
    Fail(TransferError(transfer, static_cast<int>(-result), ""));
  }
}

void CheckedQueue::Progress(unsigned slot, std::uint64_t moved) {
  Transfer& transfer = transfers_[slot];
  if (moved >= transfer.length) {
    if (file_.moved != nullptr) *file_.moved += transfer.length;
    transfer.done = true;
    if (!reading()) free_.push_back(slot);
    return;
  }
  if (file_.limits.direct) {
    // The next direct transfer must begin on a block again; what it repeats is the same bytes.
    moved = base::AlignDown(moved, std::max(file_.limits.offset_align, file_.limits.memory_align));
  }
  if (file_.moved != nullptr) *file_.moved += moved;
  transfer.attempts = moved == 0 ? transfer.attempts + 1 : 0;
  transfer.data += moved;
  transfer.offset += moved;
  transfer.padded -= moved;
  transfer.length -= moved;
  if (file_.limits.direct && transfer.attempts >= kMaxDirectRepeats) {
    LeaveDirect(fmt::format("direct {} at offset {} keep ending within a block",
                            reading() ? "reads" : "writes", transfer.offset));
  }
  Again(slot);
}

void CheckedQueue::Again(unsigned slot) { pending_.insert(pending_.begin(), slot); }

void CheckedQueue::LeaveDirect(std::string reason) {
  if (left_direct_.empty()) left_direct_ = std::move(reason);
  leaving_direct_ = true;  // finished once nothing is in flight: SubmitPending
}

void CheckedQueue::FinishLeavingDirect() {
  leaving_direct_ = false;
  if (const int result = file_.leave_direct(); result < 0) {
    Fail({.operation = "turn direct I/O off",
          .path = file_.path,
          .system_errno = -result,
          .detail = left_direct_,
          .advice = reading() ? "read with direct=False" : "save with direct=False"});
    return;
  }
  file_.limits = {.memory_align = 1, .offset_align = 1, .direct = false};
  engine_ = std::make_unique<engine::BufferedEngine>();
}

void CheckedQueue::Fail(Error error) {
  if (!error_) error_ = std::move(error);
}

Error CheckedQueue::TransferError(const Transfer& transfer, int system_errno,
                                  std::string detail) const {
  return {.operation = reading() ? "read" : "write",
          .path = file_.path,
          .offset = transfer.offset,
          .system_errno = system_errno,
          .detail = std::move(detail),
          .advice = reading() ? "" : base::AdviceFor(system_errno)};
}

Error CheckedQueue::NothingMoved(const Transfer& transfer) const {
  if (!reading()) return TransferError(transfer, EIO, "the kernel wrote 0 bytes");
  Error error = TransferError(transfer, 0, "the file ends here; it was longer when it was opened");
  error.code = ErrorCode::kCorrupt;
  error.advice = "do not change a checkpoint while it is read";
  return error;
}

}  // namespace fastpersist::pipeline
