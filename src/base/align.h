// SPDX-License-Identifier: Apache-2.0
// Alignment arithmetic on file offsets, lengths and addresses. Alignments are powers of two.
#pragma once

#include <bit>
#include <cassert>
#include <cstdint>

namespace fastpersist::base {

[[nodiscard]] constexpr bool IsPowerOfTwo(std::uint64_t value) {
  return std::has_single_bit(value);
}

[[nodiscard]] constexpr bool IsAligned(std::uint64_t value, std::uint64_t alignment) {
  assert(IsPowerOfTwo(alignment));
  return (value & (alignment - 1)) == 0;
}

[[nodiscard]] constexpr std::uint64_t AlignDown(std::uint64_t value, std::uint64_t alignment) {
  assert(IsPowerOfTwo(alignment));
  return value & ~(alignment - 1);
}

/// Precondition: value + alignment does not overflow.
[[nodiscard]] constexpr std::uint64_t AlignUp(std::uint64_t value, std::uint64_t alignment) {
  return AlignDown(value + alignment - 1, alignment);
}

[[nodiscard]] inline bool IsAlignedAddress(const void* address, std::uint64_t alignment) {
  return IsAligned(reinterpret_cast<std::uintptr_t>(address), alignment);
}

}  // namespace fastpersist::base
