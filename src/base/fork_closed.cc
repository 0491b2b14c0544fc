// SPDX-License-Identifier: Apache-2.0
#include "base/fork_closed.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>

namespace fastpersist::base {
namespace {

constexpr int kFree = -1;

struct Table {
  std::array<std::atomic<int>, 256> descriptors;

  Table() {
    for (auto& descriptor : descriptors) descriptor.store(kFree, std::memory_order_relaxed);
    ::pthread_atfork(nullptr, nullptr, &CloseAll);
  }
  // Runs in the child of a process with threads: nothing here but atomics and close(2).
  static void CloseAll();
};

Table& TheTable() {
  static Table table;
  return table;
}

void Table::CloseAll() {
  for (auto& descriptor : TheTable().descriptors) {
    if (const int fd = descriptor.exchange(kFree); fd != kFree) ::close(fd);
  }
}

}  // namespace

ForkClosed::ForkClosed(int fd) {
  auto& descriptors = TheTable().descriptors;
  for (std::size_t slot = 0; slot < descriptors.size(); ++slot) {
    int expected = kFree;
    if (descriptors[slot].compare_exchange_strong(expected, fd)) {
      slot_ = static_cast<int>(slot);
      return;
    }
  }
}

ForkClosed::~ForkClosed() {
  if (slot_ >= 0) TheTable().descriptors[static_cast<std::size_t>(slot_)].store(kFree);
}

}  // namespace fastpersist::base
