// SPDX-License-Identifier: Apache-2.0
// The tensors of an open file as a source that a stream pulls from, so that a conversion needs no
// more memory than a save. The exception: a tensor that is not row-major is gathered, and for that
// the part of its storage that it spans, and the result, are in memory while it is written.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "file/input_file.h"
#include "layout/contents.h"
#include "layout/stream.h"

namespace fastpersist::cli {

/// Pull ids are indices into contents.tensors. Reads through the page cache, ahead, and drops what
/// was read. Fails when the file changes meanwhile, and when an interrupt was noted.
class TensorSource final : public layout::PulledBytes {
 public:
  /// Bytes given so far.
  using Advance = std::function<void(std::uint64_t done)>;

  /// file and contents must outlive the source.
  TensorSource(const file::InputFile& file, const layout::Contents& contents, Advance advance);

  [[nodiscard]] Result<void> Pull(std::uint32_t pull_id, std::uint64_t at,
                                  std::span<std::byte> out) const override;

  /// Whether the file is as it was when this object was made, under the same name still.
  [[nodiscard]] Result<void> CheckUnchanged() const;

 private:
  [[nodiscard]] Result<void> ReadAt(std::uint64_t offset, std::span<std::byte> out) const;
  [[nodiscard]] Result<void> Gather(std::uint32_t pull_id) const;
  [[nodiscard]] Result<void> Compare(std::uint32_t pull_id, std::uint64_t at,
                                     std::span<const std::byte> bytes) const;

  const file::InputFile& file_;
  const layout::Contents& contents_;
  Advance advance_;
  struct stat before_{};
  // Asked by one thread: what was gathered last, and how far we are.
  mutable std::vector<std::byte> gathered_;
  mutable std::uint32_t gathered_id_ = UINT32_MAX;
  mutable std::uint64_t done_ = 0;
  mutable std::uint32_t crc_ = 0;  // of the tensor at hand so far
};

}  // namespace fastpersist::cli
