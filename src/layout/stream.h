// SPDX-License-Identifier: Apache-2.0
// A Stream is the value at the heart of FastPersist: one ordinary file, described as extents in
// file order before any data is read. Every offset and length is known; what cannot be known yet
// (bytes that contain checksums) has a fixed width and is rendered once the checksums are there.
//
// layout makes streams, plan and pipeline consume them. A Stream is immutable and safe to share
// between threads. It does not own the memory that its kMemory extents point to, nor what its
// kPulled extents are pulled from.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "fastpersist/error.h"

namespace fastpersist::layout {

inline constexpr std::uint32_t kNoRecord = std::numeric_limits<std::uint32_t>::max();

/// A contiguous range of the stream with one source. Extents are never empty, and cover the stream
/// without holes or overlaps in ascending order.
struct Extent {
  enum class Kind : std::uint8_t {
    kMemory,     ///< The caller's memory.
    kGenerated,  ///< Bytes made by layout, held by the stream.
    kLate,       ///< Bytes that depend on record checksums; rendered when the range is filled.
    kPulled,     ///< Bytes that are asked for when the range is filled, such as another file's.
  };
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  Kind kind = Kind::kGenerated;
  /// kPulled: the number that PulledBytes::Pull understands.
  std::uint32_t pull_id = 0;
  /// kMemory, kGenerated: the source. kLate, kPulled: null.
  const std::byte* bytes = nullptr;
  /// The record whose body this extent is (its bytes count towards that record's digest), or
  /// kNoRecord.
  std::uint32_t body_of = kNoRecord;
  /// kLate: the number that LateBytes::Render understands.
  std::uint32_t late_id = 0;

  [[nodiscard]] std::uint64_t end() const { return offset + length; }
};

/// What is known of a record's body once it was filled.
struct RecordDigest {
  std::uint32_t crc = 0;            ///< CRC-32 of the body; 0 for an empty one.
  std::array<std::byte, 8> head{};  ///< Its first bytes; as many as the body has, zeros after.
};

/// Renders the late extents of one stream. Implementations are immutable.
class LateBytes {
 public:
  virtual ~LateBytes() = default;
  /// Writes exactly out.size() bytes, the length of the extent. records[r] is final for every
  /// record whose body precedes the extent in the stream.
  virtual void Render(std::uint32_t late_id, std::span<const RecordDigest> records,
                      std::span<std::byte> out) const = 0;
  /// The one record whose digest this extent depends on; none: it depends on all that precede it.
  [[nodiscard]] virtual std::optional<std::uint32_t> NeedsOnly(std::uint32_t /*late_id*/) const {
    return std::nullopt;
  }
};

/// A body that does not lie in memory: what a stream needs to know of it before it is pulled.
struct PulledBody {
  std::uint32_t pull_id = 0;
  std::uint64_t length = 0;
};

/// Gives the bytes of the pulled extents of one stream. Asked by one thread at a time, in file
/// order, though from the first byte again when a save is repeated.
class PulledBytes {
 public:
  virtual ~PulledBytes() = default;
  /// Fills out completely with the bytes of this body from byte `at` of it on. An error ends the
  /// save; what out holds then does not matter.
  [[nodiscard]] virtual Result<void> Pull(std::uint32_t pull_id, std::uint64_t at,
                                          std::span<std::byte> out) const = 0;
};

class Stream {
 public:
  [[nodiscard]] std::uint64_t size() const { return extents_.empty() ? 0 : extents_.back().end(); }
  [[nodiscard]] std::span<const Extent> extents() const { return extents_; }
  [[nodiscard]] std::uint32_t record_count() const { return record_count_; }
  /// Null for streams without late extents.
  [[nodiscard]] const LateBytes* late() const { return late_.get(); }
  [[nodiscard]] const std::shared_ptr<const LateBytes>& shared_late() const { return late_; }
  /// [0, head_end()) differs between processes that hold the same tensors: a torch file's pickle.
  [[nodiscard]] std::uint64_t head_end() const { return head_end_; }
  /// [tail_begin(), size()) depends on the checksums of all that precedes it; size() if nothing
  /// does.
  [[nodiscard]] std::uint64_t tail_begin() const { return std::min(tail_begin_, size()); }
  /// Null for streams without pulled extents.
  [[nodiscard]] const PulledBytes* pulled() const { return pulled_.get(); }
  /// What the pulled extents are pulled from; to be given before the stream is written.
  void set_pulled(std::shared_ptr<const PulledBytes> pulled) { pulled_ = std::move(pulled); }

 private:
  friend class StreamBuilder;
  std::vector<Extent> extents_;
  std::vector<std::byte> generated_;
  std::shared_ptr<const LateBytes> late_;
  std::uint32_t record_count_ = 0;
  std::uint64_t head_end_ = 0;
  std::uint64_t tail_begin_ = std::numeric_limits<std::uint64_t>::max();
  std::shared_ptr<const PulledBytes> pulled_;
};

/// Appends extents in file order. Empty pieces are dropped. Used by one thread, then consumed.
class StreamBuilder {
 public:
  [[nodiscard]] std::uint64_t offset() const { return offset_; }
  void Reserve(std::size_t extents, std::size_t generated_bytes);

  /// Copies the bytes into the stream.
  void AddGenerated(std::span<const std::byte> bytes, std::uint32_t body_of = kNoRecord);
  /// Refers to the caller's memory, which must outlive the stream.
  void AddMemory(std::span<const std::byte> bytes, std::uint32_t body_of = kNoRecord);
  void AddLate(std::uint64_t length, std::uint32_t late_id, std::uint32_t body_of = kNoRecord);
  void AddPulled(PulledBody body, std::uint32_t body_of = kNoRecord);
  /// What was added so far is the head; what comes is the tail.
  void EndHead() { stream_.head_end_ = offset_; }
  void BeginTail() { stream_.tail_begin_ = offset_; }

  [[nodiscard]] Stream Finish(std::uint32_t record_count, std::shared_ptr<const LateBytes> late) &&;

 private:
  Extent& Append(Extent::Kind kind, std::uint64_t length, std::uint32_t body_of);

  Stream stream_;
  // (extent, offset in generated_) until the arena stops moving.
  std::vector<std::pair<std::size_t, std::size_t>> generated_at_;
  std::uint64_t offset_ = 0;
};

}  // namespace fastpersist::layout
