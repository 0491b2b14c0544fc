// SPDX-License-Identifier: Apache-2.0
// The Filler turns stream bytes into device bytes: it walks a range of a stream in file order,
// copies each piece into a staging buffer (or leaves it where it lies), and computes the digest of
// every record in the same pass over the cache. Pulled bytes are written into the buffer by their
// source; the first error of one is kept, and nothing is pulled after it.
//
// Used by one thread. Memory beyond the buffers: one digest a record, and the late extent at hand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fastpersist/error.h"
#include "layout/stream.h"

namespace fastpersist::pipeline {

class Filler {
 public:
  /// Starts at the stream's first byte. The stream must outlive the filler.
  explicit Filler(const layout::Stream& stream);

  [[nodiscard]] std::uint64_t offset() const { return offset_; }

  /// Copies the next out.size() bytes. Precondition: as many are left.
  void Fill(std::span<std::byte> out);
  /// Passes over the next length bytes, which lie within one kMemory extent, computing checksums
  /// only.
  void PassOver(std::uint64_t length);

  [[nodiscard]] std::span<const layout::RecordDigest> digests() const { return digests_; }
  /// The first error of a pull. What was filled with it, and all that follows, is not the stream's.
  [[nodiscard]] const std::optional<Error>& error() const { return error_; }

 private:
  void AdvanceTo(std::uint64_t offset);
  void NoteBody(const layout::Extent& extent, std::uint64_t at, std::span<const std::byte> bytes);
  const std::byte* Rendered(const layout::Extent& extent);
  void Copy(const layout::Extent& extent, std::uint64_t at, std::span<std::byte> out);
  void Pull(const layout::Extent& extent, std::uint64_t at, std::span<std::byte> out);

  const layout::Stream& stream_;
  std::size_t extent_ = 0;
  std::uint64_t offset_ = 0;
  std::vector<layout::RecordDigest> digests_;
  std::vector<std::byte> rendered_;
  std::size_t rendered_extent_ = SIZE_MAX;
  std::optional<Error> error_;
};

}  // namespace fastpersist::pipeline
