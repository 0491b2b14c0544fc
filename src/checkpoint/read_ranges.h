// SPDX-License-Identifier: Apache-2.0
// Wires the stages of reading: ranges of an open file go to their memory, past a sink.
//
//   file → direct descriptor → limits → plan → engine → staging → pipeline → sink
//
// An engine that fails is replaced by the next, and the read begins anew.
#pragma once

#include <span>

#include "checkpoint/environment.h"
#include "fastpersist/error.h"
#include "fastpersist/file.h"
#include "fastpersist/options.h"
#include "file/input_file.h"
#include "pipeline/byte_sink.h"
#include "plan/read_plan.h"

namespace fastpersist::checkpoint {

/// Reads all wanted ranges (ascending, without overlaps) and delivers on the way; see
/// plan::PlanReads. The sink sees every wanted byte once, or an error is returned. options.sync,
/// atomic and retries mean nothing here. Thread-safe. Errors: kInvalidArgument, kStorage, kCorrupt
/// (the file shrank), kForked.
[[nodiscard]] Result<ReadInfo> ReadRanges(const file::InputFile& file,
                                          std::span<const plan::Range> wanted,
                                          std::span<const plan::Delivery> deliveries,
                                          pipeline::ByteSink& sink, const Options& options,
                                          const Environment& environment = {});

}  // namespace fastpersist::checkpoint
