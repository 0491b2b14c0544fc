// SPDX-License-Identifier: Apache-2.0
// A write to a pipe whose reader has gone fails with EPIPE and raises SIGPIPE in the writing
// thread, which ends a process that does not ignore it. While this object lives the calling thread
// gets the error only.
#pragma once

#include <csignal>

namespace fastpersist::file {

/// Made and destroyed by the same thread.
class SigpipeBlocked {
 public:
  SigpipeBlocked();
  SigpipeBlocked(const SigpipeBlocked&) = delete;
  SigpipeBlocked& operator=(const SigpipeBlocked&) = delete;
  SigpipeBlocked(SigpipeBlocked&&) = delete;
  SigpipeBlocked& operator=(SigpipeBlocked&&) = delete;
  /// Takes back what was raised meanwhile, and only that.
  ~SigpipeBlocked();

 private:
  sigset_t before_{};
  bool was_pending_ = false;
};

}  // namespace fastpersist::file
