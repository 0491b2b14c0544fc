// SPDX-License-Identifier: Apache-2.0
// A background writer of checkpoints in a directory of its own, on files that tests can fail and
// engines that they can hold or fail, and states whose memory its owner changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_writer.h"
#include "commit/root.h"
#include "file/file_ops.h"
#include "testing/checkpoint_directory.h"
#include "testing/faulty_engine.h"
#include "testing/observed_files.h"
#include "testing/streams.h"
#include "testing/temporary_directory.h"

namespace fastpersist::testing {

/// The bytes in one write of a CheckpointRun.
inline constexpr std::uint64_t kRunBlock = 4096;

/// Files that take "direct" writes without any alignment, so that an engine of the test's choice is
/// asked for. Real, and never synced, unless given others.
class AnyEngineFiles final : public ObservedFiles {
 public:
  explicit AnyEngineFiles(const file::FileOps& inner = Unsynced()) : ObservedFiles(inner) {}
  int SetDirect(int /*fd*/, bool /*direct*/) const override { return 0; }
  plan::DeviceLimits Limits(int /*fd*/) const override {
    return {.memory_align = 1, .offset_align = 1, .direct = true};
  }
};

/// A stream of about twelve blocks with three tensors in memory, the first and the last of which
/// are live. Its owner may change them when he was told so.
class OwnedState {
 public:
  explicit OwnedState(std::uint64_t seed);

  /// For one save: how it was laid out then.
  [[nodiscard]] checkpoint::CheckpointStream Stream(
      const std::string& name = "state.pt",
      pipeline::VerifySource verify = pipeline::VerifySource::kFull, std::size_t spare = 0);
  void Change();
  /// The file that the bytes of now make.
  [[nodiscard]] std::string Content() const;

 private:
  std::shared_ptr<TestStream> made_;
};

class CheckpointRun {
 public:
  /// files: what checkpoints are written through; default AnyEngineFiles.
  explicit CheckpointRun(const file::FileOps* files = nullptr,
                         commit::RetentionPolicy retention = {}, std::uint32_t retries = 1);
  CheckpointRun(const CheckpointRun&) = delete;
  CheckpointRun& operator=(const CheckpointRun&) = delete;
  CheckpointRun(CheckpointRun&&) = delete;
  CheckpointRun& operator=(CheckpointRun&&) = delete;
  ~CheckpointRun();

  /// Called in the writer's thread for each write before it is done; counted anew for each engine.
  void OnWrite(std::function<Fault(std::uint64_t nth, const engine::IoRequest& request)> function);

  [[nodiscard]] std::shared_ptr<checkpoint::CheckpointTicket> Submit(
      checkpoint::CheckpointRequest request);
  /// With one stream, committed without a verdict.
  [[nodiscard]] std::shared_ptr<checkpoint::CheckpointTicket> Submit(std::uint64_t step,
                                                                     OwnedState& state);
  /// Submits, and waits for its end.
  [[nodiscard]] Result<checkpoint::CheckpointInfo> Save(std::uint64_t step, OwnedState& state);
  void Close() { writer_.reset(); }
  [[nodiscard]] checkpoint::CheckpointWriter& writer() { return *writer_; }

  [[nodiscard]] std::string path() const { return directory_ / "run"; }
  [[nodiscard]] std::vector<std::string> listing() const { return Listing(path()); }
  /// The content of a file in a generation.
  [[nodiscard]] std::string File(const std::string& generation,
                                 const std::string& name = "state.pt") const;
  [[nodiscard]] const std::shared_ptr<const commit::Root>& root() const { return root_; }

 private:
  TemporaryDirectory directory_;
  AnyEngineFiles files_;
  std::shared_ptr<const commit::Root> root_;
  std::mutex mutex_;
  std::function<Fault(std::uint64_t, const engine::IoRequest&)> on_write_;
  std::unique_ptr<checkpoint::CheckpointWriter> writer_;
};

/// The result of a ticket, once it is done.
[[nodiscard]] const Result<checkpoint::CheckpointInfo>& ResultOf(
    checkpoint::CheckpointTicket& ticket);

/// A wait that a test would not survive.
[[nodiscard]] checkpoint::Clock::time_point Never();

}  // namespace fastpersist::testing
