// SPDX-License-Identifier: Apache-2.0
// Anonymous private memory at an address of the caller's alignment, for the staging pool and the
// arena.
#pragma once

#include <cstddef>

namespace fastpersist::memory {

inline constexpr std::size_t kPage = 4096;
inline constexpr std::size_t kHugePage = std::size_t{2} << 20;
/// The strictest alignment of memory that a device is probed for (file/device_limits.cc).
inline constexpr std::size_t kStrictestDevice = std::size_t{64} << 10;

/// size is a multiple of kPage, alignment a power of two from kPage on. Null when there is no
/// memory (errno says why). To be freed with munmap(2).
[[nodiscard]] std::byte* MapAligned(std::size_t size, std::size_t alignment);

}  // namespace fastpersist::memory
