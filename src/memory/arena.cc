// SPDX-License-Identifier: Apache-2.0
#include "memory/arena.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <limits>
#include <utility>

#include "base/align.h"
#include "memory/map_aligned.h"

namespace fastpersist::memory {

Result<Arena> Arena::Create(std::uint64_t bytes) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max() / 2;
  Arena arena;
  const bool huge = bytes >= kHugePage;
  if (bytes <= kMost) {
    arena.mapped_ = base::AlignUp(bytes + 1, kStrictestDevice);
    arena.base_ = MapAligned(arena.mapped_, huge ? kHugePage : kStrictestDevice);
  } else {
    errno = ENOMEM;
  }
  if (arena.base_ == nullptr) {
    return std::unexpected(
        Error{.operation = "map memory",
              .system_errno = errno,
              .detail = fmt::format("{} bytes for the tensors are not to be had", bytes),
              .advice = "free memory, or read fewer tensors at a time"});
  }
  arena.size_ = bytes;
  // Refusals cost speed only.
  if (huge) (void)::madvise(arena.base_, arena.mapped_, MADV_HUGEPAGE);
  return arena;
}

void Arena::Release(std::uint64_t offset, std::uint64_t length) const {
  const std::uint64_t begin = base::AlignUp(offset, kPage);
  const std::uint64_t end = base::AlignDown(offset + length, kPage);
  if (begin < end) (void)::madvise(base_ + begin, end - begin, MADV_DONTNEED);
}

Arena::Arena(Arena&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapped_(std::exchange(other.mapped_, 0)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(size_, other.size_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

Arena::~Arena() {
  if (base_ != nullptr) ::munmap(base_, mapped_);
}

}  // namespace fastpersist::memory
