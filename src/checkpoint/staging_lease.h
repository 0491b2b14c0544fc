// SPDX-License-Identifier: Apache-2.0
// Keeps one staging pool between saves, because touching and locking it costs milliseconds. A save
// leases it; a second save at the same time gets a pool of its own, which is freed afterwards. So
// the process keeps the memory of one save, however many there were.
#pragma once

#include <cstdint>
#include <span>

#include "fastpersist/error.h"
#include "memory/staging_pool.h"

namespace fastpersist::checkpoint {

class StagingLease {
 public:
  /// At least bytes of staging memory, or less (at least least_bytes) when memory is short.
  [[nodiscard]] static Result<StagingLease> Take(std::uint64_t bytes, std::uint64_t least_bytes);
  StagingLease(StagingLease&&) noexcept = default;
  StagingLease& operator=(StagingLease&&) = delete;
  StagingLease(const StagingLease&) = delete;
  StagingLease& operator=(const StagingLease&) = delete;
  ~StagingLease();

  [[nodiscard]] const memory::StagingPool& pool() const { return pool_; }
  /// Never frees the memory and never gives it to anybody: a read that was lost may still land in
  /// it.
  void Abandon() &&;

 private:
  explicit StagingLease(memory::StagingPool pool) : pool_(std::move(pool)) {}

  memory::StagingPool pool_;
};

}  // namespace fastpersist::checkpoint
