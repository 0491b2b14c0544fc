// SPDX-License-Identifier: Apache-2.0
// After fork(2) the child has neither the threads nor the staging memory of its parent. Using the
// library there is refused with a clear error instead of hanging or writing wrong bytes.
#pragma once

#include "fastpersist/error.h"

namespace fastpersist::base {

/// The first call adopts the calling process. kForked in a child that was forked after that.
/// Thread-safe.
[[nodiscard]] Result<void> CheckNotForked();

}  // namespace fastpersist::base
