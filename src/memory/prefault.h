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
  /// Clears from ahead bytes into the memory on: nearer ones the reads get to first. Small memory
  /// is left to them altogether. The memory must outlive this object.
  Prefault(std::span<std::byte> memory, std::uint64_t ahead);
  Prefault(const Prefault&) = delete;
  Prefault& operator=(const Prefault&) = delete;
  Prefault(Prefault&&) = delete;
  Prefault& operator=(Prefault&&) = delete;
  /// Stops the thread and waits for it.
  ~Prefault() = default;

  /// The reads have come this far; pages up to ahead bytes further are not worth the trouble. The
  /// first call starts the thread: while a read is set up, clearing would only hold the lock on the
  /// address space that setting it up needs, and keep the device waiting. Not thread-safe.
  void Reached(std::uint64_t offset);

 private:
  void Start();
  void Work(const std::stop_token& stop);

  std::span<std::byte> memory_;
  std::uint64_t ahead_;
  bool to_be_started_;
  std::atomic<std::uint64_t> reached_ = 0;
  std::jthread thread_;  // last: joined before the rest goes
};

}  // namespace fastpersist::memory
