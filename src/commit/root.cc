// SPDX-License-Identifier: Apache-2.0
#include "commit/root.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <utility>

#include "commit/catalog.h"
#include "commit/manifest.h"
#include "commit/manifest_json.h"
#include "commit/small_file.h"
#include "commit/target.h"

namespace fastpersist::commit {
namespace {

constexpr std::uint64_t kMaxSmall = 65'536;  // bytes of the id and of the lock's text
constexpr std::size_t kIdDigits = 32;

std::string ParentOf(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

int OpenDirectory(const std::string& path, const file::FileOps& files) {
  return files.Open(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY, 0);
}

// Makes the directory and what is missing above it; each name is synced in the directory where it
// lies. Returns the descriptor.
Result<base::UniqueFd> MakeDirectories(const std::string& path, const file::FileOps& files) {
  base::UniqueFd fd(OpenDirectory(path, files));
  if (fd.valid()) return fd;
  if (fd.get() != -ENOENT || path.empty()) {
    return std::unexpected(StorageError("open directory", path, -fd.get()));
  }
  const std::string above = ParentOf(path);
  auto parent = MakeDirectories(above, files);
  if (!parent) return std::unexpected(parent.error());
  const int made = files.MakeDirectory(AT_FDCWD, path.c_str(), 0777);
  // Another process may have been quicker.
  if (made < 0 && made != -EEXIST) {
    return std::unexpected(StorageError("make directory", path, -made));
  }
  std::string warning;
  if (const int synced = SyncDirectoryIfPossible(parent->get(), warning, files); synced < 0) {
    return std::unexpected(StorageError("sync the directory", above, -synced));
  }
  fd.Reset(OpenDirectory(path, files));
  if (!fd.valid()) return std::unexpected(StorageError("open directory", path, -fd.get()));
  return fd;
}

std::string BootId() {
  auto text = ReadSmallFile(AT_FDCWD, "/proc/sys/kernel/random/boot_id", "", kMaxSmall,
                            file::RealFileOps());
  if (!text) return {};
  while (text->ends_with('\n')) text->pop_back();
  return *text;
}

std::string HostName() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return {};
  return name.data();
}

std::string LockText() {
  return CanonicalText({{"host", HostName()},
                        {"pid", ::getpid()},
                        {"boot_id", BootId()},
                        {"since", UtcNow()}}) +
         '\n';
}

// A sentence about who holds the lock; only as true as what he wrote.
std::string HolderOf(const std::string& text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  std::string host;
  std::string since;
  std::int64_t pid = 0;
  if (json.is_object()) {
    if (const auto at = json.find("host"); at != json.end() && at->is_string()) host = *at;
    if (const auto at = json.find("since"); at != json.end() && at->is_string()) since = *at;
    if (const auto at = json.find("pid"); at != json.end() && at->is_number_integer()) pid = *at;
  }
  if (pid <= 0) return "it is in use by another process";
  if (pid == ::getpid() && host == HostName())
    return "this process has it open for writing already";
  return fmt::format("it is in use by process {} on {} since {}", pid,
                     host.empty() ? "an unknown host" : host, since.empty() ? "long" : since);
}

bool HasNoLocks(int result) {
  return result == -ENOLCK || result == -EOPNOTSUPP || result == -ENOSYS || result == -EINVAL;
}

bool IsId(std::string_view id) {
  return id.size() == kIdDigits && std::ranges::all_of(id, [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

// The id in the text of the file; empty if there is none.
std::string IdOf(const std::string& text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return {};
  const auto id = json.find("root");
  if (id == json.end() || !id->is_string() || !IsId(id->get_ref<const std::string&>())) return {};
  return *id;
}

// What a crash leaves of a file that was made and not yet synced.
bool IsTorn(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return c == '\0'; });
}

}  // namespace

Root::Root(std::string path, Access access)
    : path_(std::move(path)), access_(access), owner_(::getpid()) {}

Root::~Root() {
  // In a child that was forked meanwhile the number may belong to another file by now.
  if (::getpid() != owner_) (void)lock_.Release();
}

Error Root::Failed(std::string operation, int negative_errno, std::string detail) const {
  return StorageError(std::move(operation), path_, -negative_errno, std::move(detail));
}

Result<std::unique_ptr<Root>> Root::Open(const std::string& path, Access access,
                                         const file::FileOps& files) {
  std::unique_ptr<Root> root(new Root(path, access));
  if (access == Access::kWrite) {
    if (auto opened = root->OpenForWriting(files); !opened) {
      return std::unexpected(opened.error());
    }
    return root;
  }
  root->directory_.Reset(OpenDirectory(path, files));
  if (const int opened = root->directory_.get(); opened < 0) {
    Error error = root->Failed("open directory", opened);
    if (opened == -ENOENT) {
      error.code = ErrorCode::kNotFound;
      error.advice = "check the path";
    }
    return std::unexpected(std::move(error));
  }
  if (auto read = root->ReadId(files); !read && read.error().code != ErrorCode::kCorrupt) {
    return std::unexpected(read.error());
  }
  return root;
}

Result<void> Root::OpenForWriting(const file::FileOps& files) {
  auto directory = MakeDirectories(path_, files);
  if (!directory) return std::unexpected(directory.error());
  directory_ = *std::move(directory);
  job_ = RandomHex(kIdDigits);
  if (auto taken = TakeLock(files); !taken) return taken;
  return ReadOrMakeId(files);
}

Result<void> Root::TakeLock(const file::FileOps& files) {
  lock_.Reset(files.Open(fd(), kLockName, O_RDWR | O_CREAT | O_NOFOLLOW, 0666));
  if (!lock_.valid()) return std::unexpected(Failed("open the lock", lock_.get()));
  lock_fork_closed_ = base::ForkClosed(lock_.get());
  const int taken = files.TryLock(lock_.get());
  if (taken == -EAGAIN) {
    const auto text = ReadSmallFile(fd(), kLockName, path_, kMaxSmall, files);
    Error error = Failed("lock", -EAGAIN, HolderOf(text.value_or("")));
    error.advice =
        "one process writes to a directory at a time: wait for it, end it, or choose "
        "another directory";
    return std::unexpected(std::move(error));
  }
  if (taken < 0 && !HasNoLocks(taken)) return std::unexpected(Failed("lock", taken));
  if (taken < 0) {
    lock_warning_ = fmt::format(
        "this file system has no locks (errno {}); make sure that only one process writes here",
        -taken);
    return {};
  }
  locked_ = true;
  // Only for the message that others get, so it need not be on stable storage.
  int written = files.Truncate(lock_.get(), 0);
  if (written >= 0) written = WriteWhole(lock_.get(), LockText(), files);
  if (written < 0) return std::unexpected(Failed("write the lock", written));
  return {};
}

Result<void> Root::ReadOrMakeId(const file::FileOps& files) {
  auto found = ReadId(files);
  if (!found) return std::unexpected(found.error());
  if (*found) return {};
  if (auto made = MakeId(files); !made) return made;
  std::string warning;
  if (const int synced = SyncDirectoryIfPossible(fd(), warning, files); synced < 0) {
    return std::unexpected(Failed("sync the directory", synced));
  }
  return {};
}

Result<bool> Root::ReadId(const file::FileOps& files) {
  const std::string path = path_ + '/' + kRootName;
  const auto text = ReadSmallFile(fd(), kRootName, path, kMaxSmall, files);
  if (!text && text.error().code == ErrorCode::kNotFound) return false;
  if (!text) return std::unexpected(text.error());
  id_ = IdOf(*text);
  if (!id_.empty()) return true;
  if (locked_ && IsTorn(*text)) {
    const int removed = files.Unlink(fd(), kRootName);
    if (removed < 0) return std::unexpected(Failed("remove the torn id", removed));
    return false;
  }
  return std::unexpected(
      Error{.code = ErrorCode::kCorrupt,
            .operation = "read the id",
            .path = path,
            .detail = "it does not hold the id of a checkpoint directory",
            .advice = "remove this file if the directory is yours: a new id will be made"});
}

Result<void> Root::MakeId(const file::FileOps& files) {
  const std::string id = RandomHex(kIdDigits);
  const std::string text = CanonicalText({{"version", 1}, {"root", id}}) + '\n';
  auto made = MakeSmallFile(fd(), kRootName, path_ + '/' + kRootName, text, files);
  if (made) {
    id_ = id;
    return {};
  }
  // Without a lock another process may have been quicker.
  if (made.error().system_errno != EEXIST) return made;
  auto found = ReadId(files);
  if (!found) return std::unexpected(found.error());
  return *found ? Result<void>() : made;
}

Result<std::uint64_t> Root::NextSequence(const file::FileOps& files) const {
  std::optional<std::uint64_t> highest;
  {
    const std::scoped_lock lock(mutex_);
    if (locked_) highest = highest_;
  }
  if (!highest) {
    auto found = HighestSequence(*this, files);
    if (!found) return std::unexpected(found.error());
    highest = *found;
    NoteSequence(*found);
  }
  if (*highest >= kMaxNumber) {
    return std::unexpected(Failed("commit", -EOVERFLOW, "the sequence numbers are used up"));
  }
  return *highest + 1;
}

void Root::NoteSequence(std::uint64_t sequence) const {
  const std::scoped_lock lock(mutex_);
  highest_ = std::max(highest_.value_or(0), sequence);
}

void Root::NoteActive(const std::string& generation) const {
  const std::scoped_lock lock(mutex_);
  active_.insert(generation);
}

void Root::NoteEnded(const std::string& generation) const {
  const std::scoped_lock lock(mutex_);
  active_.erase(generation);
}

bool Root::IsActive(const std::string& generation) const {
  const std::scoped_lock lock(mutex_);
  return active_.contains(generation);
}

}  // namespace fastpersist::commit
