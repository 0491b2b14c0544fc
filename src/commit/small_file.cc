// SPDX-License-Identifier: Apache-2.0
#include "commit/small_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <ctime>
#include <span>
#include <utility>

#include "base/unique_fd.h"
#include "commit/target.h"

namespace fastpersist::commit {
namespace {

std::uint64_t RandomNumber() {
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof number, 0) == sizeof number) return number;
  // Names are made with O_EXCL even then; this only has to differ between tries.
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  return static_cast<std::uint64_t>(now) ^ (static_cast<std::uint64_t>(::getpid()) << 32U);
}

Error Strange(const std::string& path, std::string detail) {
  return {
      .code = ErrorCode::kCorrupt, .operation = "read", .path = path, .detail = std::move(detail)};
}

}  // namespace

Result<std::string> ReadSmallFile(int directory, const char* name, const std::string& path,
                                  std::uint64_t limit, const file::FileOps& files) {
  const base::UniqueFd fd(
      files.Open(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0));
  if (fd.get() == -ENOENT) {
    return std::unexpected(Error{
        .code = ErrorCode::kNotFound, .operation = "open", .path = path, .system_errno = ENOENT});
  }
  if (fd.get() == -ELOOP) return std::unexpected(Strange(path, "it is a symbolic link"));
  if (!fd.valid()) return std::unexpected(StorageError("open", path, -fd.get()));
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) return std::unexpected(StorageError("look at", path, errno));
  if (!S_ISREG(info.st_mode)) return std::unexpected(Strange(path, "it is no regular file"));
  if (static_cast<std::uint64_t>(info.st_size) > limit) {
    return std::unexpected(Strange(
        path, fmt::format("it has {} bytes, more than the {} allowed", info.st_size, limit)));
  }
  // One byte more than expected: a file that grows meanwhile is read to its end all the same.
  std::string text(static_cast<std::size_t>(info.st_size) + 1, '\0');
  std::size_t length = 0;
  for (;;) {
    const auto got =
        files.Read(fd.get(), std::as_writable_bytes(std::span(text)).subspan(length), length);
    if (got < 0) return std::unexpected(StorageError("read", path, static_cast<int>(-got)));
    if (got == 0) break;
    length += static_cast<std::size_t>(got);
    if (length > limit) return std::unexpected(Strange(path, "it grows while it is read"));
    if (length == text.size()) text.resize(length * 2);
  }
  text.resize(length);
  return text;
}

int WriteWhole(int fd, std::string_view text, const file::FileOps& files) {
  while (!text.empty()) {
    const auto written = files.Write(fd, std::as_bytes(std::span(text)));
    if (written < 0) return static_cast<int>(written);
    if (written == 0) return -EIO;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

Result<void> MakeSmallFile(int directory, const char* name, const std::string& path,
                           std::string_view text, const file::FileOps& files) {
  const base::UniqueFd fd(
      files.Open(directory, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0666));
  if (!fd.valid()) return std::unexpected(StorageError("create", path, -fd.get()));
  std::string operation = "write";
  int failed = WriteWhole(fd.get(), text, files);
  if (failed >= 0) {
    operation = "fdatasync";
    failed = files.SyncData(fd.get());
  }
  if (failed >= 0) {
    operation = "close";
    failed = files.FlushAsClose(fd.get());
  }
  if (failed >= 0) return {};
  (void)files.Unlink(directory, name);
  return std::unexpected(StorageError(std::move(operation), path, -failed));
}

int SyncDirectoryIfPossible(int directory, std::string& warning, const file::FileOps& files) {
  const int synced = files.SyncDirectory(directory);
  if (synced != -EINVAL && synced != -EOPNOTSUPP) return std::min(synced, 0);
  warning =
      "this file system cannot sync directories; names are as durable as it makes them by itself";
  return 0;
}

std::string RandomHex(unsigned digits) {
  std::string text;
  while (text.size() < digits) text += fmt::format("{:016x}", RandomNumber());
  text.resize(digits);
  return text;
}

std::string UtcNow() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  std::array<char, 32> text{};
  if (::gmtime_r(&now, &parts) == nullptr) return {};
  const std::size_t length = std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return {text.data(), length};
}

}  // namespace fastpersist::commit
