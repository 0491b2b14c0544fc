// SPDX-License-Identifier: Apache-2.0
// How much of a file lies in the page cache: what was just written or read through it is faster
// copied from there than read again from the device.
#pragma once

#include <cstdint>

namespace fastpersist::file {

/// Between 0 and 1, by cachestat(2) (Linux 6.5). 0 where the kernel cannot say.
[[nodiscard]] double CachedShare(int fd, std::uint64_t size);

}  // namespace fastpersist::file
