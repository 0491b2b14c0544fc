// SPDX-License-Identifier: Apache-2.0
// A checkpoint file opened for reading. Small pieces are read through the page cache here; data
// goes through a second, direct descriptor of the same file, since O_DIRECT belongs to an open file
// and would make unaligned reads of structure fail.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "base/fork_closed.h"
#include "base/unique_fd.h"
#include "file/file_ops.h"
#include "layout/byte_source.h"

namespace fastpersist::file {

/// Thread-safe after Open.
class InputFile final : public layout::ByteSource {
 public:
  /// Never waits: a FIFO without a writer is refused like every other thing that is no regular file
  /// (kUnsupportedFile). kNotFound, kStorage.
  [[nodiscard]] static Result<InputFile> Open(const std::string& path, const FileOps& files);

  [[nodiscard]] const std::string& name() const override { return path_; }
  [[nodiscard]] std::uint64_t size() const override { return size_; }
  [[nodiscard]] Result<void> Read(std::uint64_t offset, std::span<std::byte> out) const override;

  [[nodiscard]] int fd() const { return fd_.get(); }

 private:
  InputFile(std::string path, int fd, std::uint64_t size)
      : path_(std::move(path)), fd_(fd), fork_closed_(fd), size_(size) {}

  std::string path_;
  base::UniqueFd fd_;
  base::ForkClosed fork_closed_;  // after fd_: unregistered before it is closed
  std::uint64_t size_ = 0;
};

}  // namespace fastpersist::file
