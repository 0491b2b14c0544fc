// SPDX-License-Identifier: Apache-2.0
// A few threads, each in pwrite(2) or pread(2). Asynchronous on every kernel, and as fast as the
// kernel's own interfaces when it is fed large blocks.
#pragma once

#include <memory>

#include "engine/io_engine.h"

namespace fastpersist::engine {

/// Starts up to depth threads, at least one; the depth is the number that could be started. Signals
/// are blocked in them, so that the program's handlers run in the program's threads.
[[nodiscard]] Result<std::unique_ptr<IoEngine>> MakeThreadsEngine(unsigned depth);

}  // namespace fastpersist::engine
