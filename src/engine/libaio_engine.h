// SPDX-License-Identifier: Apache-2.0
// Linux native asynchronous I/O (io_submit(2)), for kernels and sandboxes without io_uring. Needs
// direct I/O to be asynchronous; on a buffered file every submission blocks until it is done.
#pragma once

#include <memory>

#include "engine/io_engine.h"

namespace fastpersist::engine {

/// Makes a context. When fs.aio-max-nr is nearly used up (EAGAIN) smaller depths are tried first.
[[nodiscard]] Result<std::unique_ptr<IoEngine>> MakeLibaioEngine(unsigned depth);

}  // namespace fastpersist::engine
