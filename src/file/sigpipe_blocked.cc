// SPDX-License-Identifier: Apache-2.0
#include "file/sigpipe_blocked.h"

#include <pthread.h>

#include <cerrno>
#include <ctime>

namespace fastpersist::file {
namespace {

sigset_t OnlySigpipe() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGPIPE);
  return set;
}

bool IsPending() {
  sigset_t pending;
  return ::sigpending(&pending) == 0 && ::sigismember(&pending, SIGPIPE) == 1;
}

}  // namespace

SigpipeBlocked::SigpipeBlocked() : was_pending_(IsPending()) {
  const sigset_t sigpipe = OnlySigpipe();
  ::pthread_sigmask(SIG_BLOCK, &sigpipe, &before_);
}

SigpipeBlocked::~SigpipeBlocked() {
  const int saved_errno = errno;
  if (!was_pending_ && IsPending()) {
    const sigset_t sigpipe = OnlySigpipe();
    const timespec no_wait{};
    while (::sigtimedwait(&sigpipe, nullptr, &no_wait) < 0 && errno == EINTR) {
    }
  }
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = saved_errno;
}

}  // namespace fastpersist::file
