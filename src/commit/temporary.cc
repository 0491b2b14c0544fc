// SPDX-License-Identifier: Apache-2.0
#include "commit/temporary.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace fastpersist::commit {
namespace {

constexpr std::string_view kSuffix = ".tmp";
constexpr int kMaxTries = 100;

// FNV-1a, 64 bits: stable over versions and machines, unlike std::hash.
std::uint64_t HashName(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : name) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 0x100000001b3U;
  }
  return hash;
}

std::uint64_t RandomNumber() {
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof number, 0) == sizeof number) return number;
  // O_EXCL keeps names unique even then; this only has to differ between tries.
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  return static_cast<std::uint64_t>(now) ^ (static_cast<std::uint64_t>(::getpid()) << 32U);
}

bool IsUnlinked(int fd) {
  struct stat info{};
  return ::fstat(fd, &info) == 0 && info.st_nlink == 0;
}

std::vector<std::string> NamesWithPrefix(int directory, std::string_view prefix) {
  std::vector<std::string> names;
  // fdopendir takes the descriptor over, and a duplicate would share its position.
  const int own = ::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (own < 0) return names;
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(own), &::closedir);
  if (stream == nullptr) {
    ::close(own);
    return names;
  }
  while (const dirent* entry = ::readdir(stream.get())) {
    const std::string_view name = entry->d_name;
    if (name.starts_with(prefix) && name.ends_with(kSuffix)) names.emplace_back(name);
  }
  return names;
}

Error Explain(const Target& target, int system_errno) {
  Error error = StorageError("create a temporary file", target.path, system_errno,
                             "the file is written beside its target and renamed over it");
  if (target.replaced &&
      (system_errno == EACCES || system_errno == EPERM || system_errno == EROFS)) {
    error.advice +=
        "; or save with atomic=False, which writes in place and loses the old file if "
        "it fails";
  }
  return error;
}

// Gives the new file the group and mode of the one that it replaces; >= 0 or -errno. The group
// first: changing it may clear set-id bits. Not being a member is no reason to fail.
int TakeOverMode(int fd, const Replaced& replaced, const file::FileOps& files) {
  (void)files.ChangeGroup(fd, replaced.group);
  return files.ChangeMode(fd, replaced.mode);
}

}  // namespace

std::string TemporaryPrefix(std::string_view name) {
  return fmt::format(".fp-{:016x}-", HashName(name));
}

Result<Temporary> MakeTemporary(const Target& target, const file::FileOps& files) {
  const int directory = target.directory.get();
  // Made as private as the file that it replaces; ChangeMode below gives the exact mode.
  const mode_t mode = target.replaced ? target.replaced->mode & 0600 : 0666;
  int error = -EEXIST;
  for (int i = 0; i < kMaxTries; ++i) {
    Temporary made;
    made.name = fmt::format("{}{:016x}{}", TemporaryPrefix(target.name), RandomNumber(), kSuffix);
    const int opened =
        files.Open(directory, made.name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, mode);
    if (opened == -EEXIST) continue;
    if (opened < 0) {
      error = opened;
      break;
    }
    made.fd.Reset(opened);
    made.fork_closed = base::ForkClosed(opened);
    // Between open and lock another save may have taken it for a leftover. File systems without
    // locks never show leftovers as unlocked, so they need none.
    if (files.TryLock(opened) == -EAGAIN || IsUnlinked(opened)) continue;
    if (target.replaced) {
      if (const int changed = TakeOverMode(opened, *target.replaced, files); changed < 0) {
        (void)files.Unlink(directory, made.name.c_str());
        return std::unexpected(StorageError("change the mode", target.path, -changed));
      }
    }
    return made;
  }
  return std::unexpected(Explain(target, -error));
}

void RemoveLeftovers(const Target& target, const file::FileOps& files) {
  const int directory = target.directory.get();
  for (const std::string& name : NamesWithPrefix(directory, TemporaryPrefix(target.name))) {
    const base::UniqueFd fd(
        files.Open(directory, name.c_str(), O_WRONLY | O_NOFOLLOW | O_NONBLOCK, 0));
    if (!fd.valid() || files.TryLock(fd.get()) < 0) continue;
    if (!IsUnlinked(fd.get())) (void)files.Unlink(directory, name.c_str());
  }
}

}  // namespace fastpersist::commit
