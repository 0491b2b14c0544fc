// SPDX-License-Identifier: Apache-2.0
#include "testing/allocation_count.h"

#include <atomic>
#include <cstdlib>
#include <new>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FASTPERSIST_SANITIZER_ALLOCATES
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FASTPERSIST_SANITIZER_ALLOCATES
#endif

namespace {
// Constant-initialised: static constructors of other files allocate.
std::atomic<std::uint64_t> g_allocations{0};
}  // namespace

#ifndef FASTPERSIST_SANITIZER_ALLOCATES
void* operator new(std::size_t size) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }

void operator delete(void* memory, std::size_t /*size*/) noexcept { std::free(memory); }
#endif

namespace fastpersist::testing {

bool AllocationsAreCounted() {
#ifdef FASTPERSIST_SANITIZER_ALLOCATES
  return false;
#else
  return true;
#endif
}

std::uint64_t AllocationCount() { return g_allocations.load(std::memory_order_relaxed); }

}  // namespace fastpersist::testing
