// SPDX-License-Identifier: Apache-2.0
#include "file/file_ops.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <string_view>

#include "base/unique_fd.h"
#include "file/device_kind.h"
#include "file/device_limits.h"
#include "file/page_cache.h"

namespace fastpersist::file {
namespace {

constexpr int kMaxInterruptions = 100;

template <class Call>
auto RetryInterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  if (result < 0) result = -errno;
  return result;
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

int FileOps::MakeDirectory(int directory, const char* name, mode_t mode) const {
  return RetryInterrupted([&] { return ::mkdirat(directory, name, mode); });
}

int FileOps::RemoveDirectory(int directory, const char* name) const {
  return RetryInterrupted([&] { return ::unlinkat(directory, name, AT_REMOVEDIR); });
}

int FileOps::ListDirectory(int directory, std::vector<std::string>& names) const {
  names.clear();
  // fdopendir takes the descriptor over, and a duplicate would share its position.
  base::UniqueFd own(Open(directory, ".", O_RDONLY | O_DIRECTORY, 0));
  if (!own.valid()) return own.get();
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(own.get()), &::closedir);
  if (stream == nullptr) return -errno;
  (void)own.Release();
  for (;;) {
    errno = 0;  // the only way to tell the end from a failure
    const dirent* entry = ::readdir(stream.get());
    if (entry == nullptr) return -errno;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
}

std::int64_t FileOps::Write(int fd, std::span<const std::byte> bytes) const {
  return RetryInterrupted([&] { return ::write(fd, bytes.data(), bytes.size()); });
}

std::int64_t FileOps::Read(int fd, std::span<std::byte> bytes, std::uint64_t offset) const {
  return RetryInterrupted(
      [&] { return ::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
}

plan::DeviceLimits FileOps::Limits(int fd) const { return ProbeLimits(fd); }

plan::DeviceLimits FileOps::ReadLimits(int fd) const { return ProbeReadLimits(fd); }

double FileOps::CachedShare(int fd, std::uint64_t size) const {
  return file::CachedShare(fd, size);
}

bool FileOps::ProcessorCopies(int fd) const {
  struct stat status{};
  return ::fstat(fd, &status) == 0 && file::ProcessorCopies(status.st_dev);
}

const FileOps& RealFileOps() {
  static const FileOps ops;
  return ops;
}

}  // namespace fastpersist::file
