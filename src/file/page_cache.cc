// SPDX-License-Identifier: Apache-2.0
#include "file/page_cache.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace fastpersist::file {
namespace {

// Younger than the C library's headers: the same number on every architecture.
constexpr int kCachestat = 451;
constexpr std::uint64_t kPage = 4096;

struct Range {
  std::uint64_t offset;
  std::uint64_t length;  // 0: to the end
};

struct Answer {
  std::uint64_t cached;  // all counts are of pages
  std::uint64_t dirty;
  std::uint64_t writeback;
  std::uint64_t evicted;
  std::uint64_t recently_evicted;
};

}  // namespace

double CachedShare(int fd, std::uint64_t size) {
  if (size == 0) return 0;
  Range all{.offset = 0, .length = 0};
  Answer answer{};
  if (::syscall(kCachestat, fd, &all, &answer, 0U) != 0) return 0;
  const std::uint64_t pages = (size + kPage - 1) / kPage;
  return std::min(1.0, static_cast<double>(answer.cached) / static_cast<double>(pages));
}

}  // namespace fastpersist::file
