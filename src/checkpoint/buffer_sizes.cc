// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/buffer_sizes.h"

#include <algorithm>

#include "base/align.h"

namespace fastpersist::checkpoint {

void BufferSizes::FitInto(std::uint64_t available) {
  block = std::min(block, base::AlignDown(available, align));
  staging = std::min(staging, available) / block * block;
}

BufferSizes ChooseSizes(const Options& options, const plan::DeviceLimits& limits,
                        std::uint64_t bytes, std::uint64_t staging_bytes) {
  BufferSizes sizes;
  sizes.align = std::max({limits.offset_align, limits.memory_align, 4096U});
  const std::uint64_t all = base::AlignUp(std::max<std::uint64_t>(bytes, 1), sizes.align);
  sizes.block =
      std::min(base::AlignUp(options.block_bytes.value_or(kDefaultBlock), sizes.align), all);
  const std::uint64_t blocks = (all + sizes.block - 1) / sizes.block;
  sizes.staging = blocks * sizes.block;
  sizes.FitInto(std::max(sizes.align, options.staging_bytes.value_or(staging_bytes)));
  return sizes;
}

}  // namespace fastpersist::checkpoint
