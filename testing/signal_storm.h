// SPDX-License-Identifier: Apache-2.0
// Interrupts the process every millisecond, so that every system call that can end in EINTR does.
#pragma once

#include <sys/types.h>

#include <csignal>

namespace fastpersist::testing {

/// Active for as long as it lives; one at a time. Its handlers for SIGALRM and SIGCHLD are set
/// without SA_RESTART.
class SignalStorm {
 public:
  SignalStorm();
  SignalStorm(const SignalStorm&) = delete;
  SignalStorm& operator=(const SignalStorm&) = delete;
  SignalStorm(SignalStorm&&) = delete;
  SignalStorm& operator=(SignalStorm&&) = delete;
  ~SignalStorm();

  /// Signals handled so far.
  [[nodiscard]] static unsigned Count();

 private:
  struct sigaction alarm_before_{};
  struct sigaction child_before_{};
};

}  // namespace fastpersist::testing
