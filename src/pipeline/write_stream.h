// SPDX-License-Identifier: Apache-2.0
// Carries out a write plan: fills staging buffers from the stream while earlier ones are being
// written, and passes in-place writes through.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/io_engine.h"
#include "fastpersist/error.h"
#include "layout/stream.h"
#include "pipeline/checked_queue.h"
#include "pipeline/memory_gate.h"
#include "plan/write_plan.h"

namespace fastpersist::pipeline {

struct WriteOutcome {
  std::optional<Error> error;  ///< None: every byte was accepted by the kernel.
  bool engine_failed = false;  ///< The error is the engine's; another one may succeed.
  bool writes_lost = false;    ///< The failed engine may still carry out writes.
  bool pull_failed = false;    ///< The error is that of a pull: the source's, not the file's.
  std::string left_direct;     ///< Why direct I/O was left on the way; empty if it was not.
  std::vector<layout::RecordDigest> digests;  ///< Of the records, as far as they were filled.
  std::uint32_t crc = 0;                      ///< Of all that was filled; 0 without a gate.
  double fill_seconds = 0;
  double write_seconds = 0;  ///< Submitting and waiting.
};

/// Writes the whole stream by the plan. gate: null, or the one that the memory is read through,
/// begun; it is asked before each block, released as soon as the memory is read and no in-place
/// write of it is in flight, and ended. staging holds at least one buffer of block_bytes; its
/// number of buffers is the number of writes pending or in flight. The engine may be exchanged for
/// the buffered one on the way. On return nothing is in flight, unless even reaping failed.
[[nodiscard]] WriteOutcome WriteStream(const layout::Stream& stream, const plan::WritePlan& plan,
                                       std::uint64_t block_bytes, QueueFile file,
                                       std::unique_ptr<engine::IoEngine>& engine,
                                       std::span<std::byte> staging, MemoryGate* gate = nullptr);

}  // namespace fastpersist::pipeline
