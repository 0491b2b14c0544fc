// SPDX-License-Identifier: Apache-2.0
#include "memory/map_aligned.h"

#include <sys/mman.h>

#include <cstdint>

#include "base/align.h"

namespace fastpersist::memory {

// mmap gives page alignment; over-allocate and trim to reach more.
std::byte* MapAligned(std::size_t size, std::size_t alignment) {
  const std::size_t mapped = size + alignment - kPage;
  void* raw = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto* start = static_cast<std::byte*>(raw);
  const auto address = reinterpret_cast<std::uintptr_t>(start);
  const std::size_t head = base::AlignUp(address, alignment) - address;
  if (head > 0) ::munmap(start, head);
  if (const std::size_t tail = mapped - head - size; tail > 0) {
    ::munmap(start + head + size, tail);
  }
  return start + head;
}

}  // namespace fastpersist::memory
