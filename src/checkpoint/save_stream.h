// SPDX-License-Identifier: Apache-2.0
// Wires the stages: a stream becomes a published file. The only place that knows them all.
//
//   target → publication → limits → plan → engine → staging → pipeline → seal → publish
//
// An attempt that fails because an engine is refused is repeated with the next engine; one that
// fails on storage is repeated options.retries times; each on a new temporary file.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/environment.h"
#include "commit/target.h"
#include "fastpersist/error.h"
#include "fastpersist/options.h"
#include "fastpersist/save_info.h"
#include "layout/stream.h"
#include "pipeline/memory_gate.h"

namespace fastpersist::checkpoint {

/// Thread-safe. Errors: kInvalidArgument, kStorage, kForked.
[[nodiscard]] Result<SaveInfo> SaveStream(const layout::Stream& stream, const std::string& path,
                                          const Options& options,
                                          const Environment& environment = {});

/// How a save that runs beside its caller is followed.
struct Watch {
  pipeline::MemoryGate* gate = nullptr;           ///< The memory's owner goes on using it.
  std::atomic<std::uint64_t>* written = nullptr;  ///< Bytes that reached the kernel.
};

/// What a manifest says of one stream.
struct SavedStream {
  SaveInfo info;
  std::uint32_t crc = 0;  ///< Of all bytes; with a gate only, like the next.
  std::vector<std::uint32_t> record_crcs;
};

/// The same to a target that is known. watch.gate is closed on return, whatever happened. An
/// attempt is repeated only while the memory was not given back. Errors: also kStateChanged and
/// kAbandoned, from the gate; then nothing is published.
[[nodiscard]] Result<SavedStream> SaveToTarget(const layout::Stream& stream,
                                               const commit::Target& target, const Options& options,
                                               const Environment& environment,
                                               const Watch& watch = {});

}  // namespace fastpersist::checkpoint
