// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/staging_lease.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "memory/allowance.h"

namespace fastpersist::checkpoint {
namespace {

struct Kept {
  std::mutex mutex;
  memory::StagingPool pool;  // empty while leased
};

Kept& TheKept() {
  // Never destroyed: a save may still run in another thread when the process exits.
  static auto* kept = new Kept;
  return *kept;
}

// The kept pool, if it has at least that many bytes.
std::optional<memory::StagingPool> TakeKept(std::uint64_t bytes) {
  Kept& kept = TheKept();
  const std::scoped_lock lock(kept.mutex);
  if (kept.pool.memory().size() < bytes) return std::nullopt;
  return std::move(kept.pool);
}

}  // namespace

Result<StagingLease> StagingLease::Take(std::uint64_t bytes, std::uint64_t least_bytes) {
  if (auto pool = TakeKept(bytes)) return StagingLease(*std::move(pool));
  // Half of what is left: the rest of the program needs some too. The kept pool may be all of it.
  if (const auto allowance = memory::MemoryAllowance()) {
    bytes = std::max(least_bytes, std::min(bytes, *allowance / 2));
    if (auto pool = TakeKept(bytes)) return StagingLease(*std::move(pool));
  }
  for (;;) {
    auto pool = memory::StagingPool::Create(bytes);
    if (pool) return StagingLease(*std::move(pool));
    if (bytes / 2 < least_bytes) return std::unexpected(pool.error());
    bytes /= 2;
  }
}

void StagingLease::Abandon() && {
  // Reachable for ever, so that nobody takes it for a leak.
  static auto* abandoned = new std::vector<memory::StagingPool>;
  const std::scoped_lock lock(TheKept().mutex);
  abandoned->push_back(std::move(pool_));
}

StagingLease::~StagingLease() {
  if (pool_.memory().empty()) return;
  Kept& kept = TheKept();
  const std::scoped_lock lock(kept.mutex);
  // The larger one stays; swap leaves the other to be freed with this lease.
  if (pool_.memory().size() > kept.pool.memory().size()) std::swap(kept.pool, pool_);
}

}  // namespace fastpersist::checkpoint
