// SPDX-License-Identifier: Apache-2.0
// Addresses that nobody may read, in any amount: for tests that only sizes and addresses are used.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

namespace fastpersist::testing {

/// Takes address space only. Touching it ends the program.
class ForbiddenMemory {
 public:
  explicit ForbiddenMemory(std::uint64_t size)
      : memory_(
            ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)),
        size_(size) {
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
  }
  ForbiddenMemory(const ForbiddenMemory&) = delete;
  ForbiddenMemory& operator=(const ForbiddenMemory&) = delete;
  ForbiddenMemory(ForbiddenMemory&&) = delete;
  ForbiddenMemory& operator=(ForbiddenMemory&&) = delete;
  ~ForbiddenMemory() { ::munmap(memory_, size_); }

  [[nodiscard]] std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(memory_), size_};
  }

 private:
  void* memory_;
  std::uint64_t size_;
};

}  // namespace fastpersist::testing
