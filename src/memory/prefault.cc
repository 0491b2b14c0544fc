// SPDX-License-Identifier: Apache-2.0
#include "memory/prefault.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/signals_blocked.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace fastpersist::memory {
namespace {

// Below this the thread would cost more than it saves.
constexpr std::uint64_t kLeast = std::uint64_t{64} << 20;
// A few milliseconds of the kernel's time: how long the destructor may wait.
constexpr std::uint64_t kStep = std::uint64_t{8} << 20;

}  // namespace

Prefault::Prefault(std::span<std::byte> memory, std::uint64_t ahead)
    : memory_(memory), ahead_(ahead), to_be_started_(memory.size() >= std::max(kLeast, ahead)) {}

void Prefault::Reached(std::uint64_t offset) {
  reached_.store(offset, std::memory_order_relaxed);
  if (std::exchange(to_be_started_, false)) Start();
}

void Prefault::Start() {
  const base::SignalsBlocked blocked;
  try {
    thread_ = std::jthread([this](const std::stop_token& stop) { Work(stop); });
    ::pthread_setname_np(thread_.native_handle(), "fastpersist-mem");
  } catch (const std::system_error&) {
    return;  // no thread to be had: the reads clear their pages themselves
  }
}

void Prefault::Work(const std::stop_token& stop) {
  std::uint64_t at = ahead_;
  while (!stop.stop_requested()) {
    at = std::max(at, reached_.load(std::memory_order_relaxed) + ahead_);
    if (at >= memory_.size()) return;
    const std::uint64_t length = std::min(kStep, memory_.size() - at);
    if (::madvise(memory_.data() + at, length, MADV_POPULATE_WRITE) != 0) return;
    at += length;
  }
}

}  // namespace fastpersist::memory
