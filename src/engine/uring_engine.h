// SPDX-License-Identifier: Apache-2.0
// io_uring: one ring, used by one thread; registered buffers when the lock limit allows.
//
// Sources: io_uring_setup(2) for the flags (DEFER_TASKRUN and SINGLE_ISSUER since Linux 6.1,
// COOP_TASKRUN since 5.19), io_uring_register(2) for buffers.
#pragma once

#include <memory>

#include "engine/io_engine.h"

namespace fastpersist::engine {

/// Makes a ring and sends a no-op through it, so that a sandbox that refuses any of io_uring's
/// three system calls is noticed here. Error: the kernel or the sandbox refuses it, or no
/// descriptors.
[[nodiscard]] Result<std::unique_ptr<IoEngine>> MakeUringEngine(unsigned depth);

}  // namespace fastpersist::engine
