// SPDX-License-Identifier: Apache-2.0
// The staging pool: one fixed piece of private anonymous memory, cut into equal buffers, from which
// the device writes. Huge pages where the kernel gives them, touched before the first use, not
// inherited by fork(2) (direct I/O from memory that a child shares may write wrong bytes, open(2)
// NOTES), locked when the limit allows. Whatever of this is refused costs speed, never a save.
//
// Made once and kept between saves; used by one save at a time. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "fastpersist/error.h"

namespace fastpersist::memory {

class StagingPool {
 public:
  /// Maps bytes (rounded up to huge pages when large). kStorage with ENOMEM when even that fails.
  static Result<StagingPool> Create(std::uint64_t bytes);

  StagingPool() = default;
  StagingPool(StagingPool&& other) noexcept;
  StagingPool& operator=(StagingPool&& other) noexcept;
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;
  ~StagingPool();

  /// All of it; aligned to 64 KiB, and to huge pages when it is at least one huge page.
  [[nodiscard]] std::span<std::byte> memory() const { return {base_, size_}; }
  /// What was refused and why, in a sentence; empty when nothing was.
  [[nodiscard]] const std::string& shortcoming() const { return shortcoming_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
  std::string shortcoming_;
};

}  // namespace fastpersist::memory
