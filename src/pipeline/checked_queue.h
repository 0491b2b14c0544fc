// SPDX-License-Identifier: Apache-2.0
// CheckedQueue is the one place where completions are judged. It keeps several transfers, all of
// them writes or all reads, in flight on an engine and carries every one of them through to its
// last byte, or reports why it could not:
//
//   short count      the rest is moved; a direct one that ended off a block repeats that block
//   EINTR, EAGAIN    tried again
//   0 bytes          an error, never a spin; of a read: the file is shorter than it was
//   EINVAL           on a direct transfer, whose alignment is right: the file does not take direct
//                    I/O after all; what is in flight is drained and the file goes on buffered
//   anything else    the first error is kept; nothing new is started; what is in flight is drained
//
// Used by one thread. Allocates nothing after construction.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/io_engine.h"
#include "fastpersist/error.h"
#include "plan/write_plan.h"

namespace fastpersist::pipeline {

/// The open file as the queue sees it.
struct QueueFile {
  int fd = -1;
  std::string path;  ///< For messages: as the user named it.
  plan::DeviceLimits limits;
  /// Turns direct I/O off; >= 0 or -errno.
  std::function<int()> leave_direct;
  engine::IoRequest::Kind kind = engine::IoRequest::Kind::kWrite;
  /// Not null: grows by the bytes that arrived, for whoever watches.
  std::atomic<std::uint64_t>* moved = nullptr;
};

class CheckedQueue {
 public:
  /// slots: how many transfers may be pending or in flight, at least 1. The engine and file must
  /// outlive the queue.
  CheckedQueue(std::unique_ptr<engine::IoEngine>& engine, QueueFile file, unsigned slots);
  CheckedQueue(const CheckedQueue&) = delete;
  CheckedQueue& operator=(const CheckedQueue&) = delete;
  CheckedQueue(CheckedQueue&&) = delete;
  CheckedQueue& operator=(CheckedQueue&&) = delete;
  /// Drains what is in flight, so that the memory may be reused. Errors were reported before.
  ~CheckedQueue();

  /// Writing: returns a slot whose memory may be filled; waits for one. An error ends the save.
  [[nodiscard]] Result<unsigned> AcquireSlot();
  /// Starts the write of data at the given offset: padded.size() bytes, of which length matter. The
  /// memory must stay unchanged until the slot is acquired again or Drain returned.
  [[nodiscard]] Result<void> Start(unsigned slot, std::uint64_t offset,
                                   std::span<const std::byte> padded, std::uint64_t length);
  /// Reading: starts to fill padded from the given offset; the first length bytes matter, and what
  /// the file has beyond them may arrive too. The caller chooses the slot: one that was never used,
  /// or whose last read it has awaited.
  [[nodiscard]] Result<void> StartRead(unsigned slot, std::uint64_t offset,
                                       std::span<std::byte> padded, std::uint64_t length);
  /// Reading: waits until the bytes of this slot's read are there.
  [[nodiscard]] Result<void> Await(unsigned slot);
  /// Waits until everything that was started is complete.
  [[nodiscard]] Result<void> Drain();
  /// Starts nothing more, and waits for what is in flight whatever comes of it: then the memory may
  /// be used anew, unless writes_lost().
  void Settle();

  /// True when the error came from the engine itself, not from the file: another engine may do.
  [[nodiscard]] bool engine_failed() const { return engine_failed_; }
  /// True when the engine may still carry out writes that nobody can wait for any more.
  [[nodiscard]] bool writes_lost() const { return reap_failed_ && in_flight_ > 0; }
  /// Why direct I/O was left in the middle of the file; empty if it was not.
  [[nodiscard]] const std::string& left_direct() const { return left_direct_; }

 private:
  struct Transfer {
    std::byte* data = nullptr;
    std::uint64_t offset = 0;
    std::uint64_t padded = 0;  // bytes left, with the padding
    std::uint64_t length = 0;  // bytes left that matter
    unsigned attempts = 0;     // without progress
    bool done = false;
  };

  [[nodiscard]] bool reading() const { return file_.kind == engine::IoRequest::Kind::kRead; }
  Result<void> Begin(unsigned slot, const Transfer& transfer);
  void SubmitPending();
  void ReapSome();
  void Judge(unsigned slot, std::int64_t result);
  void Progress(unsigned slot, std::uint64_t moved);
  void Again(unsigned slot);
  void LeaveDirect(std::string reason);
  void FinishLeavingDirect();
  void Fail(Error error);
  [[nodiscard]] Error TransferError(const Transfer& transfer, int system_errno,
                                    std::string detail) const;
  [[nodiscard]] Error NothingMoved(const Transfer& transfer) const;

  std::unique_ptr<engine::IoEngine>& engine_;
  QueueFile file_;
  std::vector<Transfer> transfers_;
  std::vector<unsigned> free_;
  std::vector<unsigned> pending_;  // a ring would save moves, but it is never longer than slots
  std::vector<engine::IoCompletion> completions_;
  unsigned in_flight_ = 0;
  bool leaving_direct_ = false;
  bool engine_failed_ = false;
  bool reap_failed_ = false;  // what is in flight cannot be waited for
  std::string left_direct_;
  std::optional<Error> error_;
};

}  // namespace fastpersist::pipeline
