// SPDX-License-Identifier: Apache-2.0
#include "base/fork_closed.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>

namespace fastpersist::base {
namespace {

// Stored as fd + 1, so that the table is ready before any code runs: a fork may come at any moment.
constexpr int kFree = 0;
constinit std::array<std::atomic<int>, 256> descriptors{};

// Runs in the child of a process with threads: nothing here but atomics and close(2).
void CloseAll() {
  for (auto& descriptor : descriptors) {
    if (const int stored = descriptor.exchange(kFree); stored != kFree) ::close(stored - 1);
  }
}

void RegisterHandlerOnce() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, &CloseAll);
  (void)registered;
}

}  // namespace

ForkClosed::ForkClosed(int fd) {
  RegisterHandlerOnce();
  for (std::size_t slot = 0; slot < descriptors.size(); ++slot) {
    int expected = kFree;
    if (descriptors[slot].compare_exchange_strong(expected, fd + 1)) {
      slot_ = static_cast<int>(slot);
      return;
    }
  }
}

ForkClosed::~ForkClosed() {
  if (slot_ >= 0) descriptors[static_cast<std::size_t>(slot_)].store(kFree);
}

}  // namespace fastpersist::base
