// SPDX-License-Identifier: Apache-2.0
#include "cli/convert_source.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "base/crc32.h"
#include "cli/interrupt.h"
#include "layout/gather.h"

namespace fastpersist::cli {
namespace {

bool SameContent(const struct stat& a, const struct stat& b) {
  const auto same_time = [](const timespec& x, const timespec& y) {
    return x.tv_sec == y.tv_sec && x.tv_nsec == y.tv_nsec;
  };
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino && a.st_size == b.st_size &&
         same_time(a.st_mtim, b.st_mtim);
}

}  // namespace

TensorSource::TensorSource(const file::InputFile& file, const layout::Contents& contents,
                           Advance advance)
    : file_(file), contents_(contents), advance_(std::move(advance)) {
  (void)::fstat(file_.fd(), &before_);
  (void)::posix_fadvise(file_.fd(), 0, 0, POSIX_FADV_SEQUENTIAL);
}

Result<void> TensorSource::CheckUnchanged() const {
  struct stat now{};
  if (::stat(file_.name().c_str(), &now) == 0 && SameContent(before_, now)) return {};
  return std::unexpected(Error{.operation = "convert",
                               .path = file_.name(),
                               .detail = "the file was changed or replaced meanwhile",
                               .advice = "convert it again"});
}

Result<void> TensorSource::Pull(std::uint32_t pull_id, std::uint64_t at,
                                std::span<std::byte> out) const {
  if (InterruptDeferred::Noted() != 0) {
    return std::unexpected(Error{.operation = "convert", .system_errno = EINTR});
  }
  const layout::StoredTensor& tensor = contents_.tensors[pull_id];
  if (layout::IsRowMajor(tensor.shape, tensor.strides)) {
    const std::uint64_t begin = contents_.storages[tensor.storage].offset + tensor.offset;
    if (auto read = ReadAt(begin + at, out); !read) return read;
    if (auto same = Compare(pull_id, at, out); !same) return same;
  } else {
    if (auto made = Gather(pull_id); !made) return made;
    std::ranges::copy(std::span(gathered_).subspan(at, out.size()), out.begin());
  }
  done_ += out.size();
  if (advance_) advance_(done_);
  return CheckUnchanged();
}

// What is read here is another read than the one that was verified. Most tensors are all of their
// storage, which has a checksum.
Result<void> TensorSource::Compare(std::uint32_t pull_id, std::uint64_t at,
                                   std::span<const std::byte> bytes) const {
  const layout::StoredTensor& tensor = contents_.tensors[pull_id];
  const layout::StoredStorage& storage = contents_.storages[tensor.storage];
  if (!storage.crc || tensor.offset != 0 || tensor.bytes != storage.size) return {};
  crc_ = base::Crc32(bytes, at == 0 ? 0 : crc_);
  if (at + bytes.size() < tensor.bytes || crc_ == *storage.crc) return {};
  return std::unexpected(Error{.code = ErrorCode::kCorrupt,
                               .operation = "read",
                               .path = file_.name(),
                               .offset = storage.offset,
                               .entry = tensor.name,
                               .expected_crc = storage.crc,
                               .found_crc = crc_,
                               .detail = fmt::format("tensor '{}' was good a moment ago and is "
                                                     "read differently now",
                                                     tensor.name),
                               .advice = "look at the device's log, and convert again"});
}

Result<void> TensorSource::ReadAt(std::uint64_t offset, std::span<std::byte> out) const {
  auto read = file_.Read(offset, out);
  if (read) {
    (void)::posix_fadvise(file_.fd(), static_cast<off_t>(offset), static_cast<off_t>(out.size()),
                          POSIX_FADV_DONTNEED);
  }
  return read;
}

Result<void> TensorSource::Gather(std::uint32_t pull_id) const {
  if (gathered_id_ == pull_id) return {};
  const layout::StoredTensor& tensor = contents_.tensors[pull_id];
  gathered_id_ = UINT32_MAX;
  try {
    std::vector<std::byte>().swap(gathered_);
    std::vector<std::byte> span(layout::SpanBytes(tensor.shape, tensor.strides, tensor.item_size));
    const std::uint64_t begin = contents_.storages[tensor.storage].offset + tensor.offset;
    if (auto read = ReadAt(begin, span); !read) return read;
    gathered_.resize(tensor.bytes);
    layout::Gather(span.data(), tensor.shape, tensor.strides, tensor.item_size, gathered_);
  } catch (const std::bad_alloc&) {
    return std::unexpected(Error{.operation = "convert",
                                 .path = file_.name(),
                                 .system_errno = ENOMEM,
                                 .entry = tensor.name,
                                 .detail = fmt::format("tensor '{}' is not row-major, and has to "
                                                       "be in memory to become so",
                                                       tensor.name),
                                 .advice = "save it as a contiguous tensor"});
  }
  gathered_id_ = pull_id;
  return {};
}

}  // namespace fastpersist::cli
