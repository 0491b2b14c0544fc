// SPDX-License-Identifier: Apache-2.0
// Wires the stages: a stream becomes a published file. The only place that knows them all.
//
//   target → publication → limits → plan → engine → staging → pipeline → seal → publish
//
// An attempt that fails because an engine is refused is repeated with the next engine; one that
// fails on storage is repeated options.retries times; each on a new temporary file.
#pragma once

#include <string>

#include "checkpoint/environment.h"
#include "fastpersist/error.h"
#include "fastpersist/options.h"
#include "fastpersist/save_info.h"
#include "layout/stream.h"

namespace fastpersist::checkpoint {

/// Thread-safe. Errors: kInvalidArgument, kStorage, kForked.
[[nodiscard]] Result<SaveInfo> SaveStream(const layout::Stream& stream, const std::string& path,
                                          const Options& options,
                                          const Environment& environment = {});

}  // namespace fastpersist::checkpoint
