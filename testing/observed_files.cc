// SPDX-License-Identifier: Apache-2.0
#include "testing/observed_files.h"

#include <fcntl.h>

#include <utility>

namespace fastpersist::testing {
namespace {

using Kind = Operation::Kind;

Kind KindOfOpen(int flags) {
  if ((flags & O_DIRECTORY) != 0) return Kind::kOpenDirectory;
  if ((flags & O_EXCL) != 0) return Kind::kCreateTemporary;
  if ((flags & O_NOFOLLOW) != 0) return Kind::kOpenLeftover;
  return Kind::kOpenInPlace;
}

}  // namespace

int ObservedFiles::Pass(Operation operation, const std::function<int()>& call) const {
  int result = Before(operation);
  if (result >= 0) result = call();
  operation.result = result;
  After(operation);
  return result;
}

int ObservedFiles::Open(int directory, const char* name, int flags, mode_t mode) const {
  return Pass({.kind = KindOfOpen(flags), .fd = directory, .name = name},
              [&] { return inner_.Open(directory, name, flags, mode); });
}

int ObservedFiles::StatLink(int directory, const char* name, struct stat* out) const {
  return Pass({.kind = Kind::kStatLink, .fd = directory, .name = name},
              [&] { return inner_.StatLink(directory, name, out); });
}

int ObservedFiles::TryLock(int fd) const {
  return Pass({.kind = Kind::kTryLock, .fd = fd}, [&] { return inner_.TryLock(fd); });
}

int ObservedFiles::ChangeMode(int fd, mode_t mode) const {
  return Pass({.kind = Kind::kChangeMode, .fd = fd}, [&] { return inner_.ChangeMode(fd, mode); });
}

int ObservedFiles::ChangeGroup(int fd, gid_t group) const {
  return Pass({.kind = Kind::kChangeGroup, .fd = fd},
              [&] { return inner_.ChangeGroup(fd, group); });
}

int ObservedFiles::Preallocate(int fd, std::uint64_t size) const {
  return Pass({.kind = Kind::kPreallocate, .fd = fd, .size = size},
              [&] { return inner_.Preallocate(fd, size); });
}

int ObservedFiles::SetDirect(int fd, bool direct) const {
  return Pass({.kind = Kind::kSetDirect, .fd = fd}, [&] { return inner_.SetDirect(fd, direct); });
}

int ObservedFiles::Truncate(int fd, std::uint64_t size) const {
  return Pass({.kind = Kind::kTruncate, .fd = fd, .size = size},
              [&] { return inner_.Truncate(fd, size); });
}

int ObservedFiles::SyncData(int fd) const {
  return Pass({.kind = Kind::kSyncData, .fd = fd}, [&] { return inner_.SyncData(fd); });
}

int ObservedFiles::SyncDirectory(int fd) const {
  return Pass({.kind = Kind::kSyncDirectory, .fd = fd}, [&] { return inner_.SyncDirectory(fd); });
}

int ObservedFiles::FlushAsClose(int fd) const {
  return Pass({.kind = Kind::kFlushAsClose, .fd = fd}, [&] { return inner_.FlushAsClose(fd); });
}

int ObservedFiles::Rename(int directory, const char* from, const char* to) const {
  return Pass({.kind = Kind::kRename, .fd = directory, .name = from, .new_name = to},
              [&] { return inner_.Rename(directory, from, to); });
}

int ObservedFiles::Unlink(int directory, const char* name) const {
  return Pass({.kind = Kind::kUnlink, .fd = directory, .name = name},
              [&] { return inner_.Unlink(directory, name); });
}

}  // namespace fastpersist::testing
