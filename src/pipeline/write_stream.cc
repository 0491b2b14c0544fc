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
std::span<const std::byte> Prepare(const plan::PlannedWrite& write, std::span<std::byte> buffer,
                                   Filler& filler) {
  assert(filler.offset() == write.offset);
  if (write.in_place != nullptr) {
    filler.PassOver(write.length);
    return {write.in_place, write.padded_length};
  }
  const auto padded = buffer.first(write.padded_length);
  filler.Fill(padded.first(write.length));
  std::ranges::fill(padded.subspan(write.length), std::byte{0});
  return padded;
}

}  // namespace

WriteOutcome WriteStream(const layout::Stream& stream, const plan::WritePlan& plan,
                         std::uint64_t block_bytes, QueueFile file,
                         std::unique_ptr<engine::IoEngine>& engine, std::span<std::byte> staging) {
  WriteOutcome outcome;
  Stopwatch watch;
  Filler filler(stream);
  CheckedQueue queue(engine, std::move(file), static_cast<unsigned>(staging.size() / block_bytes));

  const auto run = [&]() -> Result<void> {
    for (const plan::PlannedWrite& write : plan.writes) {
      const auto slot = queue.AcquireSlot();
      if (!slot) return std::unexpected(slot.error());
      outcome.write_seconds += watch.Lap();
      const auto bytes = Prepare(write, staging.subspan(*slot * block_bytes, block_bytes), filler);
      outcome.fill_seconds += watch.Lap();
      if (filler.error()) {
        outcome.pull_failed = true;
        // The error to report is the source's, whatever becomes of what is in flight.
        (void)queue.Drain();
        return std::unexpected(*filler.error());
      }
      if (auto started = queue.Start(*slot, write.offset, bytes, write.length); !started) {
        return started;
      }
    }
    return queue.Drain();
  };
  if (auto done = run(); !done) outcome.error = std::move(done.error());
  outcome.write_seconds += watch.Lap();
  outcome.engine_failed = queue.engine_failed() && !outcome.pull_failed;
  outcome.writes_lost = queue.writes_lost();
  outcome.left_direct = queue.left_direct();
  return outcome;
}

}  // namespace fastpersist::pipeline
