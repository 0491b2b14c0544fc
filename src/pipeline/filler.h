// SPDX-License-Identifier: Apache-2.0
// The Filler turns stream bytes into device bytes: it walks a range of a stream in file order,
// copies each piece into a staging buffer (or leaves it where it lies), and computes the digest of
// every record in the same pass over the cache. Pulled bytes are written into the buffer by their
// source; the first error of one is kept, and nothing is pulled after it.
//
// Memory that its owner goes on using is read where the gate says it lies (memory_gate.h).
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
#include "pipeline/memory_gate.h"

namespace fastpersist::pipeline {

class Filler {
 public:
  /// Starts at the stream's first byte. Stream and gate (null: all memory is constant) must outlive
  /// the filler. whole_crc: crc() will be asked for, which costs a little for each record.
  explicit Filler(const layout::Stream& stream, const MemoryGate* gate = nullptr,
                  bool whole_crc = false);

  [[nodiscard]] std::uint64_t offset() const { return offset_; }

  /// Copies the next out.size() bytes. Precondition: as many are left.
  void Fill(std::span<std::byte> out);
  /// Passes over the next length bytes, which lie within one kMemory extent, computing checksums
  /// only.
  void PassOver(std::uint64_t length);

  [[nodiscard]] std::span<const layout::RecordDigest> digests() const { return digests_; }
  /// CRC-32 of all bytes up to offset(). Precondition: whole_crc.
  [[nodiscard]] std::uint32_t crc() const;
  /// The first error of a pull. What was filled with it, and all that follows, is not the stream's.
  [[nodiscard]] const std::optional<Error>& error() const { return error_; }

 private:
  void AdvanceTo(std::uint64_t offset);
  void NoteBody(const layout::Extent& extent, std::uint64_t at, std::span<const std::byte> bytes);
  const std::byte* Rendered(const layout::Extent& extent);
  void Copy(const layout::Extent& extent, std::uint64_t at, std::span<std::byte> out);
  void CopyFrom(std::span<const std::byte> source, const layout::Extent& extent, std::uint64_t at,
                std::span<std::byte> out);
  void Pull(const layout::Extent& extent, std::uint64_t at, std::span<std::byte> out);
  void Count(std::uint32_t record, std::span<const std::byte> bytes);

  const layout::Stream& stream_;
  const MemoryGate* gate_;
  bool whole_crc_;
  std::size_t extent_ = 0;
  std::uint64_t offset_ = 0;
  std::vector<layout::RecordDigest> digests_;
  std::uint32_t crc_ = 0;                     // of all bytes before the record at hand; see Count
  std::uint32_t record_ = layout::kNoRecord;  // the record at hand
  std::uint64_t record_bytes_ = 0;            // that were filled of it
  std::vector<std::byte> rendered_;
  std::size_t rendered_extent_ = SIZE_MAX;
  std::optional<Error> error_;
};

}  // namespace fastpersist::pipeline
