// SPDX-License-Identifier: Apache-2.0
#include "memory/staging_pool.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <utility>

#include "base/align.h"
#include "memory/map_aligned.h"

namespace fastpersist::memory {
namespace {

void TouchEveryPage(std::byte* base, std::size_t size) {
  for (std::size_t i = 0; i < size; i += kPage) {
    *static_cast<volatile std::byte*>(base + i) = std::byte{0};
  }
}

std::string LockLimitText() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : fmt::format("{} bytes", limit.rlim_cur);
}

}  // namespace

Result<StagingPool> StagingPool::Create(std::uint64_t bytes) {
  const bool huge = bytes >= kHugePage;
  StagingPool pool;
  pool.size_ = base::AlignUp(bytes, huge ? kHugePage : kPage);
  pool.base_ = MapAligned(pool.size_, huge ? kHugePage : kStrictestDevice);
  if (pool.base_ == nullptr) {
    return std::unexpected(Error{.operation = "map staging memory",
                                 .system_errno = errno,
                                 .detail = fmt::format("{} bytes are not to be had", pool.size_),
                                 .advice = "free memory or set a smaller staging_bytes"});
  }
  if (huge && ::madvise(pool.base_, pool.size_, MADV_HUGEPAGE) != 0) {
    pool.shortcoming_ = "no huge pages for staging (transparent huge pages are off)";
  }
  ::madvise(pool.base_, pool.size_, MADV_DONTFORK);
  TouchEveryPage(pool.base_, pool.size_);
  if (::mlock(pool.base_, pool.size_) != 0) {
    pool.shortcoming_ =
        fmt::format("staging memory is not locked (RLIMIT_MEMLOCK: have {}, need {} bytes)",
                    LockLimitText(), pool.size_);
  }
  return pool;
}

StagingPool::StagingPool(StagingPool&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      shortcoming_(std::move(other.shortcoming_)) {}

StagingPool& StagingPool::operator=(StagingPool&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(size_, other.size_);
  std::swap(shortcoming_, other.shortcoming_);
  return *this;
}

StagingPool::~StagingPool() {
  if (base_ != nullptr) ::munmap(base_, size_);
}

}  // namespace fastpersist::memory
