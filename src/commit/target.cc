// SPDX-License-Identifier: Apache-2.0
#include "commit/target.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <utility>

#include "base/advice.h"

namespace fastpersist::commit {
namespace {

constexpr int kMaxLinks = 40;  // as the kernel: path_resolution(7)

struct Split {
  std::string directory;
  std::string name;
};

Split SplitPath(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return {.directory = ".", .name = path};
  return {.directory = slash == 0 ? "/" : path.substr(0, slash), .name = path.substr(slash + 1)};
}

// A directory that may be entered and written but not listed (mode 0300) can take a file; only its
// entries cannot be synced then.
int OpenDirectory(const std::string& directory, const file::FileOps& files) {
  const int opened = files.Open(AT_FDCWD, directory.c_str(), O_RDONLY | O_DIRECTORY, 0);
  if (opened != -EACCES) return opened;
  return files.Open(AT_FDCWD, directory.c_str(), O_PATH | O_DIRECTORY, 0);
}

bool IsOnProc(int directory) {
  struct statfs info{};
  return ::fstatfs(directory, &info) == 0 && info.f_type == PROC_SUPER_MAGIC;
}

Result<std::string> ReadLink(int directory, const std::string& name, const std::string& path) {
  std::string text(PATH_MAX, '\0');
  const ssize_t length = ::readlinkat(directory, name.c_str(), text.data(), text.size());
  if (length < 0) return std::unexpected(StorageError("follow symbolic link", path, errno));
  text.resize(static_cast<std::size_t>(length));
  return text;
}

// A file of its own mount (bind mount) has another mount id than its directory.
bool IsMountPoint(int directory, const std::string& name) {
#ifdef STATX_MNT_ID
  struct statx of_file{};
  struct statx of_directory{};
  if (::statx(directory, name.c_str(), AT_SYMLINK_NOFOLLOW, STATX_MNT_ID, &of_file) != 0 ||
      ::statx(directory, "", AT_EMPTY_PATH, STATX_MNT_ID, &of_directory) != 0) {
    return false;
  }
  return (of_file.stx_mask & of_directory.stx_mask & STATX_MNT_ID) != 0 &&
         of_file.stx_mnt_id != of_directory.stx_mnt_id;
#else
  return false;
#endif
}

Result<void> CheckName(const Split& at, int directory, const std::string& path) {
  if (at.name.empty() || at.name == "." || at.name == "..") {
    return std::unexpected(StorageError("open", path, path.empty() ? ENOENT : EISDIR));
  }
  const auto longest = ::fpathconf(directory, _PC_NAME_MAX);
  if (longest > 0 && at.name.size() > static_cast<std::size_t>(longest)) {
    return std::unexpected(StorageError(
        "open", path, ENAMETOOLONG,
        fmt::format("the name has {} bytes, the file system takes {}", at.name.size(), longest)));
  }
  return {};
}

// Looks at an existing file that will be replaced.
Result<void> Inspect(const struct stat& there, Target& target) {
  if (S_ISDIR(there.st_mode)) return std::unexpected(StorageError("open", target.path, EISDIR));
  if (!S_ISREG(there.st_mode)) {
    target.special = true;
    return {};
  }
  // Replacing needs only the directory, but nobody expects a read-only file to change.
  if (::faccessat(target.directory.get(), target.name.c_str(), W_OK, AT_EACCESS) != 0) {
    return std::unexpected(StorageError("open", target.path, errno));
  }
  target.replaced = Replaced{.mode = there.st_mode & 07777, .group = there.st_gid};
  target.mounted = IsMountPoint(target.directory.get(), target.name);
  return {};
}

}  // namespace

Error StorageError(std::string operation, const std::string& path, int system_errno,
                   std::string detail) {
  return {.operation = std::move(operation),
          .path = path,
          .system_errno = system_errno,
          .detail = std::move(detail),
          .advice = base::AdviceFor(system_errno)};
}

Result<Target> ResolveTarget(const std::string& path, const file::FileOps& files) {
  Target target;
  target.path = path;
  std::string current = path;
  for (int links = 0; links <= kMaxLinks; ++links) {
    const Split at = SplitPath(current);
    target.directory.Reset(OpenDirectory(at.directory, files));
    if (const int opened = target.directory.get(); opened < 0) {
      return std::unexpected(StorageError("open directory", path, -opened,
                                          fmt::format("the directory is '{}'", at.directory)));
    }
    if (auto checked = CheckName(at, target.directory.get(), path); !checked) {
      return std::unexpected(checked.error());
    }
    target.name = at.name;
    struct stat there{};
    const int found = files.StatLink(target.directory.get(), at.name.c_str(), &there);
    if (found == -ENOENT) {
      // A descriptor that is not open: opening it will say so. Nothing can be made there.
      target.special = IsOnProc(target.directory.get());
      return target;
    }
    if (found < 0) return std::unexpected(StorageError("look at", path, -found));
    if (!S_ISLNK(there.st_mode)) {
      if (auto inspected = Inspect(there, target); !inspected) {
        return std::unexpected(inspected.error());
      }
      return target;
    }
    if (IsOnProc(target.directory.get())) {
      target.special = true;  // /dev/fd/N and friends: not a name that a rename could replace
      return target;
    }
    auto text = ReadLink(target.directory.get(), at.name, path);
    if (!text) return std::unexpected(text.error());
    current = text->starts_with('/') ? *text : at.directory + '/' + *text;
  }
  return std::unexpected(StorageError("open", path, ELOOP));
}

}  // namespace fastpersist::commit
