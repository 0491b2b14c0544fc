// SPDX-License-Identifier: Apache-2.0
#include "testing/held_memory.h"

#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <csignal>
#include <new>

namespace fastpersist::testing {
namespace {

// For the handler, which finds nothing else.
std::atomic<std::byte*> held_begin = nullptr;
std::atomic<std::byte*> held_end = nullptr;
std::atomic<bool> touched = false;
std::atomic<bool> free_again = false;
struct sigaction before;

// Returning repeats the access.
void Hold(int signal, siginfo_t* info, void* /*context*/) {
  auto* const at = static_cast<std::byte*>(info->si_addr);
  if (at < held_begin || at >= held_end) {
    ::sigaction(signal, &before, nullptr);  // a real fault: it happens again
    return;
  }
  touched = true;
  while (!free_again) ::sched_yield();
}

}  // namespace

HeldMemory::HeldMemory(std::size_t size)
    : base_(static_cast<std::byte*>(
          ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
      size_(size) {
  if (base_ == MAP_FAILED) throw std::bad_alloc();
  held_begin = base_;
  held_end = base_ + size;
  touched = free_again = false;
  struct sigaction action{};
  action.sa_sigaction = Hold;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  ::sigaction(SIGSEGV, &action, &before);
}

HeldMemory::~HeldMemory() {
  LetGo();
  ::sigaction(SIGSEGV, &before, nullptr);
  ::munmap(base_, size_);
}

void HeldMemory::AwaitToucher() const {
  while (!touched) ::sched_yield();
}

void HeldMemory::LetGo() const {
  ::mprotect(base_, size_, PROT_READ | PROT_WRITE);
  free_again = true;
}

}  // namespace fastpersist::testing
