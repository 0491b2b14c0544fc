// SPDX-License-Identifier: Apache-2.0
// Threads of the library take no signals: the program's handlers run in the program's threads.
#pragma once

#include <csignal>

namespace fastpersist::base {

/// While this object lives, all signals are blocked in the calling thread and in those that it
/// starts.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  SignalsBlocked(SignalsBlocked&&) = delete;
  SignalsBlocked& operator=(SignalsBlocked&&) = delete;
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace fastpersist::base
