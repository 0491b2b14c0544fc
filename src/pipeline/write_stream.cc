// SPDX-License-Identifier: Apache-2.0
#include "pipeline/write_stream.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <utility>

#include "pipeline/filler.h"

namespace fastpersist::pipeline {
namespace {

class Stopwatch {
 public:
  /// Seconds since the last lap.
  double Lap() {
    const auto now = std::chrono::steady_clock::now();
    const std::chrono::duration<double> lap = now - last_;
    last_ = now;
    return lap.count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// The bytes that one planned write sends, filled into the slot's buffer unless they are in place.
std::span<const std::byte> Prepare(const plan::PlannedWrite& write, bool in_place,
                                   std::span<std::byte> buffer, Filler& filler) {
  assert(filler.offset() == write.offset);
  if (in_place) {
    filler.PassOver(write.length);
    return {write.in_place, write.padded_length};
  }
  const auto padded = buffer.first(write.padded_length);
  filler.Fill(padded.first(write.length));
  std::ranges::fill(padded.subspan(write.length), std::byte{0});
  return padded;
}

// One walk over the plan.
class Walk {
 public:
  Walk(const layout::Stream& stream, CheckedQueue& queue, std::span<std::byte> staging,
       std::uint64_t block_bytes, MemoryGate* gate, WriteOutcome& outcome)
      : filler_(stream, gate, gate != nullptr),
        queue_(queue),
        staging_(staging),
        block_bytes_(block_bytes),
        gate_(gate),
        outcome_(outcome) {}

  Result<void> Run(const plan::WritePlan& plan) {
    for (const plan::PlannedWrite& write : plan.writes) {
      if (auto done = One(write); !done) return done;
      if (auto freed = LetGo(); !freed) return freed;
    }
    return queue_.Drain();
  }

  // What is left to say when nothing is in flight any more.
  void Finish() {
    outcome_.write_seconds += watch_.Lap();
    if (gate_ == nullptr) return;
    outcome_.crc = filler_.crc();
    outcome_.digests.assign(filler_.digests().begin(), filler_.digests().end());
  }

 private:
  Result<void> One(const plan::PlannedWrite& write) {
    const auto slot = queue_.AcquireSlot();
    if (!slot) return std::unexpected(slot.error());
    outcome_.write_seconds += watch_.Lap();
    bool in_place = write.in_place != nullptr;
    if (gate_ != nullptr) {
      if (auto claimed = gate_->Claim(write.offset + write.length); !claimed) return Stop(claimed);
      // What its owner captured is not where it was.
      in_place = in_place && gate_->InPlace();
    }
    const auto buffer = staging_.subspan(*slot * block_bytes_, block_bytes_);
    const auto bytes = Prepare(write, in_place, buffer, filler_);
    if (gate_ != nullptr) gate_->Filled(filler_.digests(), in_place);
    outcome_.fill_seconds += watch_.Lap();
    if (filler_.error()) return Stop(std::unexpected(*filler_.error()));
    return queue_.Start(*slot, write.offset, bytes, write.length);
  }

  // The error to report is the source's, whatever becomes of what is in flight.
  Result<void> Stop(Result<void> error) {
    outcome_.pull_failed = true;
    (void)queue_.Drain();
    return error;
  }

  // The owner waits for the device only where the device reads the owner's memory.
  Result<void> LetGo() {
    if (gate_ == nullptr || !gate_->InPlaceOnly()) return {};
    if (auto drained = queue_.Drain(); !drained) return drained;
    gate_->InPlaceDone();
    return {};
  }

  Stopwatch watch_;
  Filler filler_;
  CheckedQueue& queue_;
  std::span<std::byte> staging_;
  std::uint64_t block_bytes_;
  MemoryGate* gate_;
  WriteOutcome& outcome_;
};

}  // namespace

WriteOutcome WriteStream(const layout::Stream& stream, const plan::WritePlan& plan,
                         std::uint64_t block_bytes, QueueFile file,
                         std::unique_ptr<engine::IoEngine>& engine, std::span<std::byte> staging,
                         MemoryGate* gate) {
  WriteOutcome outcome;
  CheckedQueue queue(engine, std::move(file), static_cast<unsigned>(staging.size() / block_bytes));
  Walk walk(stream, queue, staging, block_bytes, gate, outcome);
  if (auto done = walk.Run(plan); !done) outcome.error = std::move(done.error());
  walk.Finish();
  queue.Settle();
  if (gate != nullptr) gate->End();
  outcome.engine_failed = queue.engine_failed() && !outcome.pull_failed;
  outcome.writes_lost = queue.writes_lost();
  outcome.left_direct = queue.left_direct();
  return outcome;
}

}  // namespace fastpersist::pipeline
