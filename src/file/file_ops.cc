// SPDX-License-Identifier: Apache-2.0
#include "file/file_ops.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/unique_fd.h"
#include "file/device_limits.h"
#include "file/page_cache.h"

namespace fastpersist::file {
namespace {

constexpr int kMaxInterruptions = 100;

template <class Call>
int RetryInterrupted(Call call) {
  int result = 0;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result < 0 ? -errno : result;
}

}  // namespace

int FileOps::Open(int directory, const char* name, int flags, mode_t mode) const {
  return RetryInterrupted([&] { return ::openat(directory, name, flags | O_CLOEXEC, mode); });
}

int FileOps::StatLink(int directory, const char* name, struct stat* out) const {
  return RetryInterrupted([&] { return ::fstatat(directory, name, out, AT_SYMLINK_NOFOLLOW); });
}

int FileOps::TryLock(int fd) const {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  const int result = RetryInterrupted([&] { return ::fcntl(fd, F_OFD_SETLK, &lock); });
  return result == -EACCES ? -EAGAIN : result;
}

int FileOps::ChangeMode(int fd, mode_t mode) const {
  return RetryInterrupted([&] { return ::fchmod(fd, mode); });
}

int FileOps::ChangeGroup(int fd, gid_t group) const {
  return RetryInterrupted([&] { return ::fchown(fd, static_cast<uid_t>(-1), group); });
}

int FileOps::Preallocate(int fd, std::uint64_t size) const {
  // Some file systems undo everything when a signal comes, so a frequent timer could hold this for
  // ever; without preallocation it can go on.
  for (int i = 0; i < kMaxInterruptions; ++i) {
    if (::fallocate(fd, 0, 0, static_cast<off_t>(size)) == 0) return 0;
    if (errno != EINTR) return -errno;
  }
  return -EOPNOTSUPP;
}

int FileOps::SetDirect(int fd, bool direct) const {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0) return -errno;
  const int wanted = direct ? flags | O_DIRECT : flags & ~O_DIRECT;
  return RetryInterrupted([&] { return ::fcntl(fd, F_SETFL, wanted); });
}

int FileOps::Truncate(int fd, std::uint64_t size) const {
  return RetryInterrupted([&] { return ::ftruncate(fd, static_cast<off_t>(size)); });
}

int FileOps::SyncData(int fd) const {
  return RetryInterrupted([&] { return ::fdatasync(fd); });
}

int FileOps::SyncDirectory(int fd) const {
  return RetryInterrupted([&] { return ::fsync(fd); });
}

int FileOps::FlushAsClose(int fd) const {
  const int duplicate = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  // Out of descriptors: what close(2) could report, fdatasync(2) has reported where it matters.
  if (duplicate < 0) return errno == EMFILE || errno == ENFILE ? 0 : -errno;
  // EINTR from close(2) still closed it on Linux.
  return ::close(duplicate) < 0 && errno != EINTR ? -errno : 0;
}

int FileOps::Rename(int directory, const char* from, const char* to) const {
  return RetryInterrupted([&] { return ::renameat(directory, from, directory, to); });
}

int FileOps::Unlink(int directory, const char* name) const {
  return RetryInterrupted([&] { return ::unlinkat(directory, name, 0); });
}

plan::DeviceLimits FileOps::Limits(int fd) const { return ProbeLimits(fd); }

plan::DeviceLimits FileOps::ReadLimits(int fd) const { return ProbeReadLimits(fd); }

double FileOps::CachedShare(int fd, std::uint64_t size) const {
  return file::CachedShare(fd, size);
}

const FileOps& RealFileOps() {
  static const FileOps ops;
  return ops;
}

}  // namespace fastpersist::file
