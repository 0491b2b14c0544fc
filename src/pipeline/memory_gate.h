// SPDX-License-Identifier: Apache-2.0
// The MemoryGate lets a stream be written from memory that goes on being used. It stands between
// the writer, which reads that memory block by block in file order, and its owner, who wants to
// change it again:
//
//   stream:   [ read by the writer | block at work | not read yet        | captured            ]
//                                                  ^ claimed             ^ captured_from
//
// The writer moves claimed up, a capturing owner moves captured_from down by copying from the end;
// where they meet, nobody reads the memory any more. Then the gate looks once more at a sample of
// what was read (did it change while it was read?) and is released: from that moment the owner may
// do as it likes. Live memory is what is read where it lies; everything else of the stream is
// constant.
//
// A gate serves one stream and every attempt to write it. Thread-safe: one writer, any number of
// owners' threads.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fastpersist/error.h"
#include "layout/stream.h"

namespace fastpersist::pipeline {

/// An extent whose memory its owner will change.
struct LiveExtent {
  /// Index of a kMemory extent of the stream; it is the whole body of a record.
  std::size_t extent = 0;
  std::string name;  ///< For messages.
  /// Where the owner keeps the memory's address and size at any moment; null: not to be watched.
  const std::uintptr_t* address = nullptr;
  const std::uint64_t* size = nullptr;
};

/// How much of the live memory is read a second time, to see that it did not change meanwhile.
enum class VerifySource : std::uint8_t {
  kOff,
  kSample,  ///< One extent in 16 at least; all of them within 16 saves.
  kFull,
};

class MemoryGate {
 public:
  using Clock = std::chrono::steady_clock;

  struct Setting {
    std::vector<LiveExtent> live;  ///< In stream order.
    VerifySource verify = VerifySource::kSample;
    std::uint64_t turn = 0;      ///< Number of the save: decides which sample.
    std::span<std::byte> spare;  ///< Memory for captures; as much as may be captured.
  };

  /// The stream and the spare memory must outlive the gate.
  MemoryGate(const layout::Stream& stream, Setting setting);

  // The writer's side.

  /// Begins an attempt, from the first byte. False: the memory was given back, it is too late.
  [[nodiscard]] bool Begin();
  /// The writer will read the stream's memory up to end. Errors: kStateChanged when a storage moved
  /// or shrank; the one of Abandon.
  [[nodiscard]] Result<void> Claim(std::uint64_t end);
  /// Where the bytes of a kMemory extent from `at` on lie now, at most length of them.
  [[nodiscard]] std::span<const std::byte> Source(const layout::Extent& extent, std::uint64_t at,
                                                  std::uint64_t length) const;
  /// The block that was claimed is read. in_place: the device still reads it. digests are those of
  /// the whole stream so far.
  void Filled(std::span<const layout::RecordDigest> digests, bool in_place);
  /// True when the bytes of the claimed block are still where the stream says.
  [[nodiscard]] bool InPlace() const;
  /// True when all that keeps the owner waiting is in-place writes in flight.
  [[nodiscard]] bool InPlaceOnly() const;
  /// No in-place write is in flight any more.
  void InPlaceDone();
  /// The attempt reads nothing more, for good or ill, and nothing of it is in flight. Waits for
  /// owners who look at the memory.
  void End();
  /// The last attempt is over: the owner is let go in any case. May be called again.
  void Close();

  // The owner's side.

  /// Waits until the memory may be changed, at most until the deadline. capture: copies meanwhile
  /// what the writer has not reached, as far as there is spare memory. False: the time is over.
  [[nodiscard]] bool WaitReleased(Clock::time_point deadline, bool capture);
  [[nodiscard]] bool released() const;
  /// Gives the memory back without waiting for the device: only for whoever copies or compares a
  /// block at this moment. The save fails with this error unless its stream was written already. A
  /// write in flight may still read the memory, for a file that is thrown away.
  void Abandon(Error error);
  /// Reads all of these extents (indices into Setting::live) again, as far as they were read from
  /// live memory, and compares. To be called after the release, before anything is changed. False:
  /// one differs, or can no longer be compared.
  [[nodiscard]] bool StillTheSame(std::span<const std::size_t> live);
  /// Why the save must not be committed; none if all is well.
  [[nodiscard]] std::optional<Error> error() const;
  /// Bytes copied by owners in WaitReleased.
  [[nodiscard]] std::uint64_t captured_bytes() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Chunk {
    std::uint64_t begin = 0;  // in the stream
    std::span<const std::byte> bytes;
  };
  // What a live extent was when it was read: enough to compare later.
  struct Read {
    std::uint64_t length = 0;  // of its first bytes
    std::uint32_t crc = 0;
    std::optional<std::uint32_t> whole;  // the CRC of all of it, in this attempt or an earlier one
  };
  struct Room {  // what CaptureChunk copies
    std::size_t live = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };

  [[nodiscard]] const layout::Extent& ExtentOf(std::size_t live) const;
  [[nodiscard]] std::size_t FirstLiveFrom(std::uint64_t offset) const;
  [[nodiscard]] std::size_t FirstLiveAt(std::uint64_t offset) const;
  [[nodiscard]] std::uint64_t LiveEnd() const;
  [[nodiscard]] bool Unmoved(std::size_t live) const;
  [[nodiscard]] bool Sampled(std::size_t live) const;
  [[nodiscard]] bool Same(std::size_t live, const Read& read) const;
  void Changed(std::size_t live, std::string detail);
  [[nodiscard]] std::optional<Room> FindRoom() const;
  bool CaptureChunk(Lock& lock);
  void NoteRead(std::size_t live, std::uint32_t crc);
  void ReleaseIfDone(Lock& lock);
  void VerifySample(Lock& lock);

  const layout::Stream& stream_;
  const Setting setting_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t claimed_ = 0;      // live memory before this is or was read where it lies
  std::uint64_t block_begin_ = 0;  // of the block at work
  std::uint64_t block_end_ = 0;
  std::uint64_t captured_from_;
  std::vector<Chunk> chunks_;  // descending
  std::uint64_t spare_used_ = 0;
  std::uint64_t captured_bytes_ = 0;
  std::vector<Read> read_;  // of each live extent
  bool filling_ = false;    // the writer reads live memory
  bool in_place_ = false;   // the device does
  bool capturing_ = false;  // an owner copies some
  bool verifying_ = false;  // somebody reads it again; then nobody else does
  bool ending_ = false;     // nobody shall begin to copy
  bool released_ = false;
  bool closed_ = false;
  std::optional<Error> error_;
  std::atomic<bool> failed_ = false;  // error_ is there, for whoever verifies
};

}  // namespace fastpersist::pipeline
