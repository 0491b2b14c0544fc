// SPDX-License-Identifier: Apache-2.0
#include "commit/publish.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "commit/temporary.h"

namespace fastpersist::commit {
namespace {

// The kernel would send SIGXFSZ, whose default action kills the process.
bool ExceedsFileSizeLimit(std::uint64_t size) {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
         size > limit.rlim_cur;
}

}  // namespace

Publication::Publication(const Target& target, const Options& options, const file::FileOps& files)
    : target_(target), options_(options), files_(files), owner_(::getpid()) {}

Publication::Publication(Publication&& other) noexcept
    : target_(other.target_),
      options_(other.options_),
      files_(other.files_),
      owner_(other.owner_),
      fd_(std::move(other.fd_)),
      regular_(other.regular_),
      fork_closed_(std::move(other.fork_closed_)),
      temporary_(std::exchange(other.temporary_, {})) {}

Publication::~Publication() {
  // A child that was forked meanwhile unwinds its copy; the file is the parent's.
  if (!temporary_.empty() && ::getpid() == owner_) {
    (void)files_.Unlink(target_.directory.get(), temporary_.c_str());
  }
}

Error Publication::Failed(std::string operation, int negative_errno, std::string detail) const {
  return StorageError(std::move(operation), target_.path, -negative_errno, std::move(detail));
}

Result<Publication> Publication::Begin(const Target& target, const Options& options,
                                       const file::FileOps& files) {
  Publication publication(target, options, files);
  if (target.fresh) {
    if (auto opened = publication.OpenFresh(); !opened) return std::unexpected(opened.error());
    return publication;
  }
  if (target.special || !options.atomic) {
    if (auto opened = publication.OpenInPlace(); !opened) return std::unexpected(opened.error());
    return publication;
  }
  if (target.mounted) return std::unexpected(publication.Failed("replace", -EBUSY));
  RemoveLeftovers(target, files);
  auto temporary = MakeTemporary(target, files);
  if (!temporary) return std::unexpected(temporary.error());
  publication.fd_ = std::move(temporary->fd);
  publication.fork_closed_ = std::move(temporary->fork_closed);
  publication.temporary_ = std::move(temporary->name);
  return publication;
}

Result<void> Publication::OpenFresh() {
  const int opened = files_.Open(target_.directory.get(), target_.name.c_str(),
                                 O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0666);
  if (opened < 0) return std::unexpected(Failed("create", opened));
  fd_.Reset(opened);
  fork_closed_ = base::ForkClosed(opened);
  temporary_ = target_.name;
  return {};
}

Result<void> Publication::OpenInPlace() {
  const int opened = target_.special ? files_.Open(AT_FDCWD, target_.path.c_str(), O_WRONLY, 0)
                                     : files_.Open(target_.directory.get(), target_.name.c_str(),
                                                   O_WRONLY | O_CREAT, 0666);
  if (opened < 0) return std::unexpected(Failed("open", opened));
  fd_.Reset(opened);
  fork_closed_ = base::ForkClosed(opened);
  struct stat info{};
  regular_ = ::fstat(opened, &info) == 0 && S_ISREG(info.st_mode);
  return {};
}

Result<void> Publication::Preallocate(std::uint64_t size, std::uint64_t padded_size) {
  if (!regular() || size == 0) return {};
  if (ExceedsFileSizeLimit(size)) {
    return std::unexpected(Failed("preallocate", -EFBIG, fmt::format("{} bytes are needed", size)));
  }
  const std::uint64_t wanted = ExceedsFileSizeLimit(padded_size) ? size : padded_size;
  int result = files_.Preallocate(fd(), wanted);
  // Not every file system can; a hole of the right size still saves extending at every write.
  if (result == -EOPNOTSUPP || result == -ENOSYS) result = files_.Truncate(fd(), wanted);
  if (result < 0) {
    return std::unexpected(
        Failed("preallocate", result, fmt::format("{} bytes are needed", wanted)));
  }
  return {};
}

Result<void> Publication::Seal(std::uint64_t size) {
  if (regular()) {
    if (const int cut = files_.Truncate(fd(), size); cut < 0) {
      return std::unexpected(Failed("truncate", cut));
    }
  }
  if (options_.sync) {
    const int synced = files_.SyncData(fd());
    // Pipes and terminals cannot be synced.
    if (synced < 0 && (regular() || (synced != -EINVAL && synced != -EROFS))) {
      return std::unexpected(Failed("fdatasync", synced));
    }
  }
  if (const int flushed = files_.FlushAsClose(fd()); flushed < 0) {
    return std::unexpected(Failed("close", flushed));
  }
  return {};
}

Result<void> Publication::Publish(std::string& warning) {
  if (target_.fresh) {
    temporary_.clear();
    return {};
  }
  if (!temporary_.empty()) {
    const int renamed =
        files_.Rename(target_.directory.get(), temporary_.c_str(), target_.name.c_str());
    if (renamed < 0) return std::unexpected(Failed("rename", renamed));
    temporary_.clear();
  }
  if (!options_.sync || target_.special) return {};
  const int synced = files_.SyncDirectory(target_.directory.get());
  // EBADF: a directory that may not be listed was opened as a path only.
  if (synced == -EINVAL || synced == -EOPNOTSUPP || synced == -EBADF) {
    warning =
        "this directory cannot be synced; the rename is as durable as the file system makes it";
  } else if (synced < 0) {
    return std::unexpected(Failed("sync the directory", synced,
                                  "the new file is in place, its durability is unknown"));
  }
  return {};
}

}  // namespace fastpersist::commit
