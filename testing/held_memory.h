// SPDX-License-Identifier: Apache-2.0
// Memory whose first toucher is held until the test lets him go on: a thread can be stopped in the
// middle of a copy.
#pragma once

#include <cstddef>
#include <span>

namespace fastpersist::testing {

/// One at a time in the process: it takes the signal of forbidden accesses for itself.
class HeldMemory {
 public:
  explicit HeldMemory(std::size_t size);
  HeldMemory(const HeldMemory&) = delete;
  HeldMemory& operator=(const HeldMemory&) = delete;
  HeldMemory(HeldMemory&&) = delete;
  HeldMemory& operator=(HeldMemory&&) = delete;
  ~HeldMemory();

  [[nodiscard]] std::span<std::byte> bytes() const { return {base_, size_}; }
  /// Until a thread is held.
  void AwaitToucher() const;
  /// From now on it is memory like any other.
  void LetGo() const;

 private:
  std::byte* base_;
  std::size_t size_;
};

}  // namespace fastpersist::testing
