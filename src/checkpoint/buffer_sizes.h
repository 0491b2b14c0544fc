// SPDX-License-Identifier: Apache-2.0
// How large the blocks are, and how much staging memory a transfer gets. Pure.
#pragma once

#include <cstdint>

#include "fastpersist/options.h"
#include "plan/write_plan.h"

namespace fastpersist::checkpoint {

// Large enough to fill a device; neither larger blocks nor deeper queues were seen to gain
// anything.
inline constexpr std::uint64_t kDefaultBlock = std::uint64_t{4} << 20;
inline constexpr std::uint32_t kDefaultDepth = 8;
inline constexpr std::uint64_t kDefaultStaging = std::uint64_t{64} << 20;
// Reading where the processor copies (from the page cache, or for the device): few blocks in
// flight, and one buffer more, so that what has arrived is still in a cache when it is looked at
// and copied. Four times as many were seen to cost a quarter of the speed.
inline constexpr std::uint32_t kCopiedDepth = 2;
// Below this, registering buffers costs more than it saves.
inline constexpr std::uint64_t kMinRegistered = std::uint64_t{16} << 20;
// Aligned tensor memory of at least this size is written from, and read to, where it lies.
inline constexpr std::uint64_t kMinInPlace = std::uint64_t{1} << 20;

/// How staging memory is cut: whole buffers of one block each. Blocks are multiples of the
/// alignment but need not be powers of two.
struct BufferSizes {
  std::uint64_t align = 0;
  std::uint64_t block = 0;
  std::uint64_t staging = 0;

  /// Fewer buffers, then shorter ones, when less memory than that is to be had.
  void FitInto(std::uint64_t available);
};

/// For a transfer of that many bytes; staging_bytes: what is taken unless the options say.
[[nodiscard]] BufferSizes ChooseSizes(const Options& options, const plan::DeviceLimits& limits,
                                      std::uint64_t bytes,
                                      std::uint64_t staging_bytes = kDefaultStaging);

}  // namespace fastpersist::checkpoint
