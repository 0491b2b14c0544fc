// SPDX-License-Identifier: Apache-2.0
#include "file/device_limits.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "base/align.h"

namespace fastpersist::file {
namespace {

constexpr std::array<std::uint32_t, 3> kTried{4096, 16384, 65536};
constexpr plan::DeviceLimits kBuffered{.memory_align = 1, .offset_align = 1, .direct = false};

#ifdef STATX_DIOALIGN
bool AskKernel(int fd, plan::DeviceLimits& limits) {
  struct statx answer{};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &answer) != 0) return false;
  if ((answer.stx_mask & STATX_DIOALIGN) == 0) return false;
  if (answer.stx_dio_mem_align == 0 || answer.stx_dio_offset_align == 0) {
    limits = kBuffered;
    return true;
  }
  limits = {.memory_align = answer.stx_dio_mem_align,
            .offset_align = answer.stx_dio_offset_align,
            .direct = true};
  return base::IsPowerOfTwo(limits.memory_align) && base::IsPowerOfTwo(limits.offset_align);
}
#else
bool AskKernel(int /*fd*/, plan::DeviceLimits& /*limits*/) { return false; }
#endif

// Then even a probing write would raise SIGXFSZ, whose default action ends the process.
bool NoFileMayGrow() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur == 0;
}

using Move = ssize_t (*)(int fd, void* block, std::size_t length);

ssize_t WriteBlock(int fd, void* block, std::size_t length) {
  return ::pwrite(fd, block, length, 0);
}

ssize_t ReadBlock(int fd, void* block, std::size_t length) { return ::pread(fd, block, length, 0); }

bool Works(int fd, std::uint32_t alignment, Move move) {
  const std::unique_ptr<void, decltype(&std::free)> block(std::aligned_alloc(alignment, alignment),
                                                          &std::free);
  if (block == nullptr) return false;
  std::fill_n(static_cast<std::byte*>(block.get()), alignment, std::byte{0});
  ssize_t moved = 0;
  do {
    moved = move(fd, block.get(), alignment);
  } while (moved < 0 && errno == EINTR);
  // Errors other than EINVAL (a full disk) say nothing about alignment; the real transfers report
  // them.
  return moved >= 0 || errno != EINVAL;
}

plan::DeviceLimits Try(int fd, Move move) {
  for (const std::uint32_t alignment : kTried) {
    if (Works(fd, alignment, move)) {
      return {.memory_align = alignment, .offset_align = alignment, .direct = true};
    }
  }
  return kBuffered;
}

}  // namespace

plan::DeviceLimits ProbeLimits(int fd) {
  plan::DeviceLimits limits;
  if (AskKernel(fd, limits)) return limits;
  if (NoFileMayGrow()) return kBuffered;
  return Try(fd, WriteBlock);
}

plan::DeviceLimits ProbeReadLimits(int fd) {
  plan::DeviceLimits limits;
  return AskKernel(fd, limits) ? limits : Try(fd, ReadBlock);
}

}  // namespace fastpersist::file
