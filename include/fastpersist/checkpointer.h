// SPDX-License-Identifier: Apache-2.0
// The checkpoints of a run, in one directory. A save goes on beside the program; a checkpoint
// counts only once it is complete on stable storage, and a program that ends at any moment, however
// it ends, finds the newest one that does.
//
//   auto run = Checkpointer::Open("runs/gpt", {.keep_last = 3});
//   auto ticket = run->Save(step, state, {.live = {"weight"}});   // returns after copying the rest
//   ... compute, reading "weight" ...
//   ticket->WaitReleased();                                       // now "weight" may change
//
// One process writes to a directory at a time. What every call may answer besides its own errors:
// kForked in a child that was forked after the library was used, kInvalidArgument after Close.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fastpersist/error.h"
#include "fastpersist/file.h"
#include "fastpersist/options.h"
#include "fastpersist/save_info.h"
#include "fastpersist/state.h"
#include "fastpersist/version.h"

namespace fastpersist {
inline namespace v0 {

/// How much of the memory that is read in place is read a second time, once all of it was read, to
/// see that it did not change meanwhile (kStateChanged). A change before the first read cannot be
/// seen.
enum class VerifySource : std::uint8_t {
  kOff,
  kSample,  ///< A sixteenth of the tensors at least, all of them within sixteen saves.
  kFull,
};

/// A wait without an end.
inline constexpr std::chrono::nanoseconds kForever = std::chrono::nanoseconds::max();

/// How a Checkpointer saves, and which checkpoints it keeps.
struct CheckpointerOptions {
  /// Checkpoints that stay, at least 1. Default: all.
  std::optional<std::uint64_t> keep_last;
  /// Besides: steps divisible by it, at least 1.
  std::optional<std::uint64_t> keep_every;
  VerifySource verify = VerifySource::kSample;  ///< Of the live memory, once it was read.
  /// Bytes of memory for copies of what is not read in place; touched as needed, and kept.
  std::uint64_t memory = std::uint64_t{512} << 20;
  Options options = {};  ///< How files are written. sync and atomic are always on.
};

/// What Save takes besides the state.
struct SaveRequest {
  /// Names in the state whose memory is read where it lies: it must neither change nor go away
  /// until the ticket's WaitReleased. Memory of which another name is not among them is copied.
  std::vector<std::string> live;
  std::string metadata = "{}";  ///< Text of a JSON object, kept with the checkpoint.
};

/// One save on its way. A handle: copies are of the same save. Thread-safe; it may outlive its
/// Checkpointer. In a forked child waits return false at once.
class FASTPERSIST_EXPORT Ticket {
 public:
  [[nodiscard]] std::uint64_t step() const;  ///< As it was saved.
  /// Waits until all live memory may be changed; copies meanwhile, as far as there is memory for
  /// it, what was not read yet. False: the timeout passed, the memory is still being read.
  [[nodiscard]] bool WaitReleased(std::chrono::nanoseconds timeout = kForever);
  /// Waits until the checkpoint is committed, or the save failed. False: the timeout passed.
  [[nodiscard]] bool Wait(std::chrono::nanoseconds timeout = kForever) const;
  [[nodiscard]] bool Done() const;  ///< Whether Wait would return at once.
  /// Waits for it. SaveInfo::path is the checkpoint's directory. Errors: kStorage; kStateChanged
  /// when live memory changed; kAbandoned. With the operation "sync the directory" the checkpoint
  /// may be in place; otherwise the older ones are as they were.
  [[nodiscard]] Result<SaveInfo> Get() const;
  /// Gives the save up, and all memory back: when the storage hangs, say. It fails with kAbandoned
  /// unless it is being committed already.
  void Abandon(std::string_view reason);
  [[nodiscard]] std::uint64_t bytes_written() const;  ///< That the storage took so far.
  [[nodiscard]] std::uint64_t bytes() const;          ///< In all.

 private:
  friend class Checkpointer;
  struct Impl;
  explicit Ticket(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

/// A checkpoint that was found.
struct Checkpoint {
  File file;                         ///< Its state.
  std::uint64_t step = 0;            ///< As it was saved.
  std::filesystem::path path;        ///< Its directory.
  std::string metadata;              ///< Text of a JSON object, as it was saved.
  std::vector<std::string> skipped;  ///< Newer ones, or maybe newer, and why; sentences.
};

/// The newest complete checkpoint in a directory, or that of a step. Takes no lock: a directory
/// that is being written to may be read. Structure is looked at, and the checksums that a file
/// states for its records are compared with the manifest's; File::Read compares the bytes. One that
/// turns out damaged is skipped for the next older one. kNotFound:
/// there is none (of that step). kCorrupt: there are some, and none is good, or two claim to be the
/// newest. kStorage.
[[nodiscard]] FASTPERSIST_EXPORT Result<Checkpoint> OpenCheckpoint(
    const std::filesystem::path& directory, std::optional<std::uint64_t> step = std::nullopt);

/// The checkpoints of one run. Thread-safe. Cheap to move; one that was moved from may only be
/// assigned to and destroyed.
class FASTPERSIST_EXPORT Checkpointer {
 public:
  /// Makes the directory if it is not there, and removes what killed runs left unfinished.
  /// kStorage; with EAGAIN when another process writes to it. kInvalidArgument for options that
  /// cannot work.
  [[nodiscard]] static Result<Checkpointer> Open(const std::filesystem::path& directory,
                                                 const CheckpointerOptions& options = {});
  Checkpointer(Checkpointer&&) noexcept;             ///< The other one can only be destroyed.
  Checkpointer& operator=(Checkpointer&&) noexcept;  ///< Closes this one first.
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;
  /// As Close, and nobody is told of errors. Nothing in a forked child.
  ~Checkpointer();

  /// Something the user should know once; mostly empty.
  [[nodiscard]] const std::string& warning() const;

  /// Starts to save, as a PyTorch file; takes any state that fastpersist::Save takes. Waits for the
  /// save before this one, then copies what is not live; what does not fit into
  /// CheckpointerOptions::memory is written before it returns, and the result has a warning. The
  /// state itself is needed no more afterwards. Saving a step again replaces it. kInvalidArgument
  /// (a name in live that is not in the state, metadata that are no JSON object, a step of 2^63 or
  /// more), kStorage (ENOMEM). What goes wrong later is in the ticket.
  [[nodiscard]] Result<Ticket> Save(std::uint64_t step, const State& state,
                                    const SaveRequest& request = {});

  /// Step of the newest complete checkpoint, if there is one. kStorage.
  [[nodiscard]] Result<std::optional<std::uint64_t>> LatestStep() const;
  /// Of all complete ones, ascending. kStorage.
  [[nodiscard]] Result<std::vector<std::uint64_t>> AllSteps() const;
  /// As OpenCheckpoint.
  [[nodiscard]] Result<Checkpoint> Load(std::optional<std::uint64_t> step = std::nullopt) const;
  /// Removes the checkpoints of a step, damaged ones included. kNotFound, kStorage.
  [[nodiscard]] Result<void> Delete(std::uint64_t step);
  /// Waits for the save in flight and lets go of the directory. The error of the first save that
  /// failed and whose ticket nobody asked. Once closed it answers nothing but success.
  [[nodiscard]] Result<void> Close();

 private:
  struct Impl;
  explicit Checkpointer(std::unique_ptr<Impl> impl);
  void LetGo();
  std::unique_ptr<Impl> impl_;
};

}  // namespace v0
}  // namespace fastpersist
