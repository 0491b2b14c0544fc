// SPDX-License-Identifier: Apache-2.0
#include "pipeline/read_stream.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace fastpersist::pipeline {

ReadOutcome ReadStream(const plan::ReadPlan& plan, std::uint64_t block_bytes, unsigned slots,
                       QueueFile file, std::unique_ptr<engine::IoEngine>& engine,
                       std::span<std::byte> staging, ByteSink& sink) {
  assert(plan.staged_bytes == 0 || staging.size() >= slots * block_bytes);
  CheckedQueue queue(engine, std::move(file), slots);

  // Read number i uses slot i % slots, so slots come free in the order in which the sink is served.
  const auto memory_of = [&](std::size_t i) {
    const plan::PlannedRead& read = plan.reads[i];
    if (read.in_place != nullptr) return std::span(read.in_place, read.padded_length);
    return staging.subspan(i % slots * block_bytes, read.padded_length);
  };
  const auto start = [&](std::size_t i) {
    return queue.StartRead(static_cast<unsigned>(i % slots), plan.reads[i].offset, memory_of(i),
                           plan.reads[i].length);
  };

  const auto run = [&]() -> Result<void> {
    const std::size_t count = plan.reads.size();
    std::size_t started = 0;
    for (std::size_t i = 0; i < count; ++i) {
      while (started < count && started < i + slots) {
        if (auto begun = start(started++); !begun) return begun;
      }
      if (auto arrived = queue.Await(static_cast<unsigned>(i % slots)); !arrived) return arrived;
      const plan::PlannedRead& read = plan.reads[i];
      if (!sink.Accept(read.offset, memory_of(i).first(read.length))) break;
    }
    return {};
  };
  ReadOutcome outcome;
  if (auto done = run(); !done) outcome.error = std::move(done.error());
  queue.Settle();  // a sink that had enough, or an error, leaves reads in flight
  outcome.engine_failed = queue.engine_failed();
  outcome.reads_lost = queue.writes_lost();
  outcome.left_direct = queue.left_direct();
  return outcome;
}

}  // namespace fastpersist::pipeline
