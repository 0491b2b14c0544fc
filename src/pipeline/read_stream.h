// SPDX-License-Identifier: Apache-2.0
// Carries out a read plan: keeps several reads in flight, and hands the bytes to the sink in file
// order while later ones are being read.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "engine/io_engine.h"
#include "fastpersist/error.h"
#include "pipeline/byte_sink.h"
#include "pipeline/checked_queue.h"
#include "plan/read_plan.h"

namespace fastpersist::pipeline {

struct ReadOutcome {
  std::optional<Error> error;  ///< None: the sink got every byte, or wanted no more.
  bool engine_failed = false;  ///< The error is the engine's; another one may succeed.
  bool reads_lost = false;     ///< The failed engine may still write into the memory given to it.
  std::string left_direct;     ///< Why direct I/O was left on the way; empty if it was not.
};

/// Reads by the plan. slots is how many reads may be pending or in flight; staging holds that many
/// buffers of block_bytes, or is empty when the plan stages nothing. file.kind is kRead. The engine
/// may be exchanged for the buffered one on the way. On return nothing is in flight, unless even
/// reaping failed.
[[nodiscard]] ReadOutcome ReadStream(const plan::ReadPlan& plan, std::uint64_t block_bytes,
                                     unsigned slots, QueueFile file,
                                     std::unique_ptr<engine::IoEngine>& engine,
                                     std::span<std::byte> staging, ByteSink& sink);

}  // namespace fastpersist::pipeline
