// SPDX-License-Identifier: Apache-2.0
// The kernel clears new pages when they are first used. Left to the thread that reads, this takes
// longer than the device needs to fill them (5 to 8 GB/s on one core; less in a virtual machine
// whose host has to find the memory first). A Prefault is a thread that lets the kernel do it ahead
// of the reads. It changes no byte, so it does no harm wherever the reads are.
//
// Source: madvise(2), MADV_POPULATE_WRITE (Linux 5.14); without it, or without a thread, the reads
// find their pages uncleared, as ever.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>

namespace fastpersist::memory {

class Prefault {
 public:
  /// Begins ahead bytes into the memory: nearer ones the reads get to first. Small memory is left
  /// to them altogether. The memory must outlive this object.
  Prefault(std::span<std::byte> memory, std::uint64_t ahead);
  Prefault(const Prefault&) = delete;
  Prefault& operator=(const Prefault&) = delete;
  Prefault(Prefault&&) = delete;
  Prefault& operator=(Prefault&&) = delete;
  /// Stops the thread and waits for it.
  ~Prefault() = default;

  /// The reads have come this far; pages up to ahead bytes further are not worth the trouble.
  void Reached(std::uint64_t offset) { reached_.store(offset, std::memory_order_relaxed); }

 private:
  void Work(const std::stop_token& stop);

  std::span<std::byte> memory_;
  std::uint64_t ahead_;
  std::atomic<std::uint64_t> reached_ = 0;
  std::jthread thread_;  // last: joined before the rest goes
};

}  // namespace fastpersist::memory
