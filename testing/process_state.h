// SPDX-License-Identifier: Apache-2.0
// What a process holds, read from /proc/self: for tests that nothing leaks.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fastpersist::testing {

/// Where every open descriptor leads, sorted; files that were removed end in " (deleted)".
[[nodiscard]] std::vector<std::string> OpenFiles();
/// Without the workers that the kernel starts and ends for io_uring as it sees fit ("iou-...").
[[nodiscard]] unsigned ThreadCount();
/// Anonymous resident memory in bytes: without the page cache and without mapped files.
[[nodiscard]] std::uint64_t ResidentBytes();

/// Sets the process's umask for the life of this object.
class ScopedUmask {
 public:
  explicit ScopedUmask(mode_t mask);
  ScopedUmask(const ScopedUmask&) = delete;
  ScopedUmask& operator=(const ScopedUmask&) = delete;
  ScopedUmask(ScopedUmask&&) = delete;
  ScopedUmask& operator=(ScopedUmask&&) = delete;
  ~ScopedUmask();

 private:
  mode_t before_;
};

}  // namespace fastpersist::testing
