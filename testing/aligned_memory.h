// SPDX-License-Identifier: Apache-2.0
// Memory at a chosen address residue, for tests of what depends on alignment.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>

#include "testing/seed.h"

namespace fastpersist::testing {

/// The largest alignment that tests demand of memory.
inline constexpr std::size_t kLargestAlignment = std::size_t{64} << 10;

inline void FillWithNoise(std::span<std::byte> bytes, Random& random) {
  while (!bytes.empty()) {
    const std::uint64_t noise = random();
    const std::size_t count = std::min(bytes.size(), sizeof(noise));
    std::memcpy(bytes.data(), &noise, count);
    bytes = bytes.subspan(count);
  }
}

/// size bytes whose first address is residue above a multiple of kLargestAlignment. Zeros.
class AlignedMemory {
 public:
  explicit AlignedMemory(std::size_t size, std::size_t residue = 0)
      : block_(static_cast<std::byte*>(
            std::aligned_alloc(kLargestAlignment, Rounded(size + residue)))),
        residue_(residue),
        size_(size) {
    if (block_ == nullptr) throw std::bad_alloc();
    std::memset(data(), 0, size_);
  }

  [[nodiscard]] std::span<std::byte> bytes() const { return {data(), size_}; }
  [[nodiscard]] std::byte* data() const { return block_.get() + residue_; }

  void FillWithNoise(Random& random) const { testing::FillWithNoise(bytes(), random); }

 private:
  struct Free {
    void operator()(std::byte* block) const { std::free(block); }
  };

  static std::size_t Rounded(std::size_t size) {
    return (size / kLargestAlignment + 1) * kLargestAlignment;
  }

  std::unique_ptr<std::byte, Free> block_;
  std::size_t residue_;
  std::size_t size_;
};

}  // namespace fastpersist::testing
