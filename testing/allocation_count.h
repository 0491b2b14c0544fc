// SPDX-License-Identifier: Apache-2.0
// Counts what is allocated, for tests that a loop allocates nothing: the test program replaces the
// global operator new. Not under sanitizers, which bring their own.
#pragma once

#include <cstdint>

namespace fastpersist::testing {

[[nodiscard]] bool AllocationsAreCounted();

/// Calls of operator new since the program started, by all threads.
[[nodiscard]] std::uint64_t AllocationCount();

}  // namespace fastpersist::testing
