// SPDX-License-Identifier: Apache-2.0
// What a user can do about a failed system call: one clause for each errno that saving meets.
#pragma once

#include <string>

namespace fastpersist::base {

/// Without a final period; empty when there is nothing better to say than the error itself.
[[nodiscard]] std::string AdviceFor(int system_errno);

}  // namespace fastpersist::base
