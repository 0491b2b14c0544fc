// SPDX-License-Identifier: Apache-2.0
// Descriptors that a forked child must not keep: O_CLOEXEC acts at execve(2), but the workers of a
// data loader never call it, and for as long as they live they would hold the lock of a temporary
// file, the disk space of a checkpoint that was rotated away, or the pinned buffers of a ring.
//
// A registered descriptor is closed in the child right after fork(2) (pthread_atfork(3)).
// Thread-safe.
#pragma once

#include <utility>

namespace fastpersist::base {

class ForkClosed {
 public:
  ForkClosed() = default;
  /// Registers fd. When the table (256 entries) is full the descriptor is inherited after all.
  explicit ForkClosed(int fd);
  ForkClosed(ForkClosed&& other) noexcept : slot_(std::exchange(other.slot_, -1)) {}
  ForkClosed& operator=(ForkClosed&& other) noexcept {
    std::swap(slot_, other.slot_);
    return *this;
  }
  ForkClosed(const ForkClosed&) = delete;
  ForkClosed& operator=(const ForkClosed&) = delete;
  /// Unregisters; to happen before the descriptor is closed, since its number is free after that.
  ~ForkClosed();

 private:
  int slot_ = -1;
};

}  // namespace fastpersist::base
