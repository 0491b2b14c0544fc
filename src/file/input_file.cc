// SPDX-License-Identifier: Apache-2.0
#include "file/input_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <string_view>

namespace fastpersist::file {
namespace {

// Linux moves at most 2 GiB - 4 KiB in one call (read(2)).
constexpr std::size_t kMaxRead = std::size_t{1} << 30;

std::string_view KindName(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISCHR(mode)) return "a character device";
  if (S_ISBLK(mode)) return "a block device";
  return "no regular file";
}

Error NotRegular(const std::string& path, mode_t mode) {
  return {
      .code = ErrorCode::kUnsupportedFile,
      .operation = "open",
      .path = path,
      .detail = fmt::format("it is {}; checkpoints are read from regular files", KindName(mode))};
}

Error OpenError(const std::string& path, int system_errno) {
  Error error{.operation = "open", .path = path, .system_errno = system_errno};
  // A socket cannot even be opened (ENXIO), nor can a device without a driver.
  struct stat status{};
  if (system_errno == ENXIO && ::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    return NotRegular(path, status.st_mode);
  }
  if (system_errno == ENOENT || system_errno == ENOTDIR) {
    error.code = ErrorCode::kNotFound;
    error.advice = "check the path";
  } else if (system_errno == EMFILE || system_errno == ENFILE) {
    error.advice = "close files or raise the limit (ulimit -n)";
  } else if (system_errno == EACCES || system_errno == EPERM) {
    error.advice = "check who may read the file and its directories";
  }
  return error;
}

}  // namespace

Result<InputFile> InputFile::Open(const std::string& path, const FileOps& files) {
  if (path.empty() || path.find('\0') != std::string::npos) {
    return std::unexpected(Error{.code = ErrorCode::kInvalidArgument,
                                 .operation = "open",
                                 .detail = "the path is empty or contains a null byte"});
  }
  // Without O_NONBLOCK a FIFO would make us wait for its writer; regular files ignore it.
  const int fd = files.Open(AT_FDCWD, path.c_str(), O_RDONLY | O_NONBLOCK, 0);
  if (fd < 0) return std::unexpected(OpenError(path, -fd));
  InputFile file(path, fd, 0);
  struct stat status{};
  if (::fstat(fd, &status) != 0) {
    return std::unexpected(Error{.operation = "stat", .path = path, .system_errno = errno});
  }
  if (!S_ISREG(status.st_mode)) return std::unexpected(NotRegular(path, status.st_mode));
  file.size_ = static_cast<std::uint64_t>(status.st_size);
  return file;
}

Result<void> InputFile::Read(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got =
        ::pread(fd_.get(), out.data(), std::min(out.size(), kMaxRead), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return std::unexpected(
          Error{.operation = "read", .path = path_, .offset = offset, .system_errno = errno});
    }
    if (got == 0) {
      return std::unexpected(Error{.code = ErrorCode::kCorrupt,
                                   .operation = "read",
                                   .path = path_,
                                   .offset = offset,
                                   .detail = "the file ends here; it was longer when it was opened",
                                   .advice = "do not change a checkpoint while it is read"});
    }
    offset += static_cast<std::uint64_t>(got);
    out = out.subspan(static_cast<std::size_t>(got));
  }
  return {};
}

}  // namespace fastpersist::file
