// SPDX-License-Identifier: Apache-2.0
#include "base/fork_guard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>

namespace fastpersist::base {

Result<void> CheckNotForked() {
  static std::atomic<pid_t> owner{0};
  const pid_t self = ::getpid();
  pid_t expected = 0;
  if (owner.compare_exchange_strong(expected, self) || expected == self) return {};
  return std::unexpected(Error{
      .code = ErrorCode::kForked,
      .operation = "save",
      .detail = fmt::format("process {} was forked from {} after FastPersist was used there", self,
                            expected),
      .advice = "start child processes that save with 'spawn' or 'forkserver', or fork before the "
                "first save"});
}

}  // namespace fastpersist::base
