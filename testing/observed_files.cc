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

std::int64_t ObservedFiles::Pass(Operation operation,
                                 const std::function<std::int64_t()>& call) const {
  std::int64_t result = Before(operation);
  if (result >= 0) result = call();
  operation.result = result;
  After(operation);
  return result;
}

int ObservedFiles::PassInt(Operation operation, const std::function<int()>& call) const {
  return static_cast<int>(Pass(std::move(operation), call));
}

int ObservedFiles::Open(int directory, const char* name, int flags, mode_t mode) const {
  return PassInt({.kind = KindOfOpen(flags), .fd = directory, .name = name},
                 [&] { return inner_.Open(directory, name, flags, mode); });
}

int ObservedFiles::StatLink(int directory, const char* name, struct stat* out) const {
  return PassInt({.kind = Kind::kStatLink, .fd = directory, .name = name},
                 [&] { return inner_.StatLink(directory, name, out); });
}

int ObservedFiles::TryLock(int fd) const {
  return PassInt({.kind = Kind::kTryLock, .fd = fd}, [&] { return inner_.TryLock(fd); });
}

int ObservedFiles::ChangeMode(int fd, mode_t mode) const {
  return PassInt({.kind = Kind::kChangeMode, .fd = fd},
                 [&] { return inner_.ChangeMode(fd, mode); });
}

int ObservedFiles::ChangeGroup(int fd, gid_t group) const {
  return PassInt({.kind = Kind::kChangeGroup, .fd = fd},
                 [&] { return inner_.ChangeGroup(fd, group); });
}

int ObservedFiles::Preallocate(int fd, std::uint64_t size) const {
  return PassInt({.kind = Kind::kPreallocate, .fd = fd, .size = size},
                 [&] { return inner_.Preallocate(fd, size); });
}

int ObservedFiles::SetDirect(int fd, bool direct) const {
  return PassInt({.kind = Kind::kSetDirect, .fd = fd},
                 [&] { return inner_.SetDirect(fd, direct); });
}

int ObservedFiles::Truncate(int fd, std::uint64_t size) const {
  return PassInt({.kind = Kind::kTruncate, .fd = fd, .size = size},
                 [&] { return inner_.Truncate(fd, size); });
}

int ObservedFiles::SyncData(int fd) const {
  return PassInt({.kind = Kind::kSyncData, .fd = fd}, [&] { return inner_.SyncData(fd); });
}

int ObservedFiles::SyncDirectory(int fd) const {
  return PassInt({.kind = Kind::kSyncDirectory, .fd = fd},
                 [&] { return inner_.SyncDirectory(fd); });
}

int ObservedFiles::FlushAsClose(int fd) const {
  return PassInt({.kind = Kind::kFlushAsClose, .fd = fd}, [&] { return inner_.FlushAsClose(fd); });
}

int ObservedFiles::Rename(int directory, const char* from, const char* to) const {
  return PassInt({.kind = Kind::kRename, .fd = directory, .name = from, .new_name = to},
                 [&] { return inner_.Rename(directory, from, to); });
}

int ObservedFiles::Unlink(int directory, const char* name) const {
  return PassInt({.kind = Kind::kUnlink, .fd = directory, .name = name},
                 [&] { return inner_.Unlink(directory, name); });
}

int ObservedFiles::MakeDirectory(int directory, const char* name, mode_t mode) const {
  return PassInt({.kind = Kind::kMakeDirectory, .fd = directory, .name = name},
                 [&] { return inner_.MakeDirectory(directory, name, mode); });
}

int ObservedFiles::RemoveDirectory(int directory, const char* name) const {
  return PassInt({.kind = Kind::kRemoveDirectory, .fd = directory, .name = name},
                 [&] { return inner_.RemoveDirectory(directory, name); });
}

int ObservedFiles::ListDirectory(int directory, std::vector<std::string>& names) const {
  return PassInt({.kind = Kind::kListDirectory, .fd = directory},
                 [&] { return inner_.ListDirectory(directory, names); });
}

std::int64_t ObservedFiles::Write(int fd, std::span<const std::byte> bytes) const {
  return Pass({.kind = Kind::kWrite,
               .fd = fd,
               .size = bytes.size(),
               .bytes = {reinterpret_cast<const char*>(bytes.data()), bytes.size()}},
              [&] { return inner_.Write(fd, bytes); });
}

std::int64_t ObservedFiles::Read(int fd, std::span<std::byte> bytes, std::uint64_t offset) const {
  return Pass({.kind = Kind::kRead, .fd = fd, .offset = offset, .size = bytes.size()},
              [&] { return inner_.Read(fd, bytes, offset); });
}

}  // namespace fastpersist::testing
