// SPDX-License-Identifier: Apache-2.0
// Checkpoints written beside the training. One thread carries out what is submitted, in order:
//
//   generation → each stream, through its gate → verdict → commit → retire older ones
//
// The submitter keeps a ticket. It waits there, before it changes memory that is read in place,
// until that memory was given back; says whether what was written may be committed, when it has
// witnesses of its own (a verdict is waited for once everything is on storage); and learns what
// became of it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/environment.h"
#include "commit/retention.h"
#include "commit/root.h"
#include "fastpersist/error.h"
#include "fastpersist/options.h"
#include "fastpersist/save_info.h"
#include "layout/stream.h"
#include "pipeline/memory_gate.h"

namespace fastpersist::checkpoint {

using Clock = std::chrono::steady_clock;

/// One file of a checkpoint.
struct CheckpointStream {
  std::string name;  ///< "state.pt": the file's name.
  std::shared_ptr<const layout::Stream> stream;
  pipeline::MemoryGate::Setting memory;  ///< What of it is live.
  std::shared_ptr<const void> keep;      ///< Owns whatever else must live until the save is done.
};

struct CheckpointRequest {
  std::uint64_t step = 0;
  std::vector<CheckpointStream> streams;  ///< At least one; the first is the main one.
  std::string metadata = "{}";            ///< The user's: text of a JSON object.
  bool verdict = false;                   ///< Commit only after Approve.
};

/// A committed checkpoint.
struct CheckpointInfo {
  SaveInfo save;  ///< path is the generation's directory; sums and seconds over all streams.
  std::string generation;
  std::uint64_t step = 0;
  std::uint64_t sequence = 0;
  std::uint32_t crc = 0;             ///< Of the main stream.
  std::uint64_t captured_bytes = 0;  ///< Copied while somebody waited for their memory.
  std::vector<std::string> retired;  ///< Generations removed by the retention.
};

/// One checkpoint on its way. Thread-safe.
class CheckpointTicket {
 public:
  explicit CheckpointTicket(CheckpointRequest request);

  [[nodiscard]] std::uint64_t step() const { return request_.step; }
  /// Waits until all live memory may be changed. capture: copies meanwhile what was not read yet,
  /// as far as there is spare memory. False: the deadline passed.
  [[nodiscard]] bool WaitReleased(Clock::time_point deadline, bool capture);
  [[nodiscard]] bool released() const;
  /// Waits until a verdict is wanted, or the save failed. False: the deadline passed.
  [[nodiscard]] bool WaitWritten(Clock::time_point deadline);
  /// The first verdict counts.
  void Approve();
  void Reject(Error error);
  /// Gives all memory back without waiting for the device (MemoryGate::Abandon); the save fails, a
  /// verdict notwithstanding, unless it is being committed already.
  void Abandon(Error error);
  /// False: the deadline passed.
  [[nodiscard]] bool WaitDone(Clock::time_point deadline);
  [[nodiscard]] bool done() const;
  /// Precondition: done().
  [[nodiscard]] const Result<CheckpointInfo>& result() const { return *result_; }
  /// Of stream 0; to compare single extents again.
  [[nodiscard]] pipeline::MemoryGate& gate() { return *gates_.front(); }

  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  /// Bytes that reached storage so far.
  [[nodiscard]] std::uint64_t written() const;

 private:
  friend class CheckpointWriter;
  void Finish(Result<CheckpointInfo> result);
  // Nobody will say anything any more.
  void RejectUndecided(Error error);
  [[nodiscard]] std::optional<Error> rejected() const;
  // Waits for the verdict; the error why not to commit.
  [[nodiscard]] std::optional<Error> Verdict();

  CheckpointRequest request_;
  std::vector<std::unique_ptr<pipeline::MemoryGate>> gates_;  // one for each stream
  std::uint64_t bytes_ = 0;
  std::atomic<std::uint64_t> before_ = 0;   // in streams that are complete
  std::atomic<std::uint64_t> written_ = 0;  // of the stream at hand
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool awaiting_ = false;  // everything is written
  bool approved_ = false;
  std::optional<Error> rejected_;
  std::optional<Result<CheckpointInfo>> result_;
};

class CheckpointWriter {
 public:
  /// root must have been opened for writing.
  CheckpointWriter(std::shared_ptr<const commit::Root> root, Options options,
                   commit::RetentionPolicy retention, Environment environment = {});
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;
  CheckpointWriter(CheckpointWriter&&) = delete;
  CheckpointWriter& operator=(CheckpointWriter&&) = delete;
  /// Finishes what was submitted; what still wants a verdict is rejected. In a forked child: leaves
  /// everything as it is.
  ~CheckpointWriter();

  /// Errors: kForked.
  [[nodiscard]] Result<std::shared_ptr<CheckpointTicket>> Submit(CheckpointRequest request);

 private:
  class Worker;
  std::unique_ptr<Worker> worker_;
};

}  // namespace fastpersist::checkpoint
