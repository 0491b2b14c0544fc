// SPDX-License-Identifier: Apache-2.0
// Whatever fails while a checkpoint is written, and wherever the power is cut: one complete older
// checkpoint is there, or the new one, and later saves work.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_writer.h"
#include "commit/retention.h"
#include "engine/buffered_engine.h"
#include "testing/checkpoint_run.h"
#include "testing/faulty_files.h"
#include "testing/seed.h"
#include "testing/tree_crash_model.h"

namespace fastpersist::checkpoint {
namespace {

using testing::AnyEngineFiles;
using testing::CheckpointRun;
using testing::FailingCall;
using testing::Fault;
using testing::NewestStep;
using testing::OwnedState;
using testing::Random;
using testing::ResultOf;
using testing::Seed;
using testing::TreeCrashModel;
using testing::TreeRecorder;
using testing::Unsynced;

// One save to a directory that has a checkpoint of step 1, with the nth call failing. False: there
// is no such call.
bool SaveWithFailingCall(unsigned nth, int system_errno, bool from_then_on) {
  const FailingCall failing(nth, system_errno, from_then_on, Unsynced());
  const AnyEngineFiles files(failing);
  CheckpointRun run(&files, {.keep_last = 1}, /*retries=*/nth % 2);
  OwnedState state(1);
  EXPECT_TRUE(testing::MakeCheckpoint(*run.root(), 1));
  const std::string before = state.Content();
  const auto ticket = run.Submit(2, state);
  EXPECT_TRUE(ticket->WaitReleased(testing::Never(), true));
  state.Change();
  const auto& result = ResultOf(*ticket);
  const bool reached = failing.failed();
  const auto newest = NewestStep(run.path());
  if (result) {
    EXPECT_EQ(newest, 2U) << nth;
    EXPECT_EQ(run.File("step-00000002"), before);
  } else {
    EXPECT_EQ(result.error().system_errno, system_errno) << result.error().Message();
    EXPECT_TRUE(newest == 1U || newest == 2U) << nth << ": " << result.error().Message();
    if (newest == 2U) {
      EXPECT_EQ(result.error().operation, "sync the directory") << nth;
      EXPECT_EQ(run.File("step-00000002"), before);
    }
  }
  if (!reached) return false;
  if (from_then_on) {
    // As after a kill: the next run cleans up and goes on.
    EXPECT_TRUE(commit::RemoveLeftovers(*run.root(), Unsynced()));
    EXPECT_TRUE(testing::MakeCheckpoint(*run.root(), 3));
  } else {
    EXPECT_TRUE(run.Save(3, state)) << nth;
  }
  EXPECT_EQ(NewestStep(run.path()), 3U);
  return true;
}

TEST(CheckpointFaults, EveryCallThatFailsLeavesACompleteCheckpointAndLaterSavesWork) {
  for (const int system_errno : {EIO, ENOSPC}) {
    unsigned nth = 1;
    while (SaveWithFailingCall(nth, system_errno, /*from_then_on=*/false)) ++nth;
    EXPECT_GT(nth, 20U) << "calls of a save";
  }
}

TEST(CheckpointFaults, NothingThatWorksAnyMoreLeavesACompleteCheckpoint) {
  unsigned nth = 1;
  while (SaveWithFailingCall(nth, EIO, /*from_then_on=*/true)) ++nth;
  EXPECT_GT(nth, 20U);
}

TEST(CheckpointFaults, EveryWriteThatFailsForGoodLeavesTheCheckpointBefore) {
  for (const int system_errno : {ENOSPC, EFBIG}) {
    for (std::uint64_t position = 0; position < 11; ++position) {
      CheckpointRun run;
      OwnedState state(1);
      ASSERT_TRUE(run.Save(1, state));
      run.OnWrite([&](std::uint64_t nth, const auto&) {
        return nth >= position ? Fault::Reports(-system_errno) : Fault{};
      });
      const auto failed = run.Save(2, state);
      ASSERT_FALSE(failed);
      EXPECT_EQ(failed.error().system_errno, system_errno);
      EXPECT_EQ(failed.error().path, run.path() + "/step-00000002/state.pt");
      EXPECT_THAT(run.listing(), ::testing::ElementsAre("1 step-00000001 complete"));
      run.OnWrite({});
      EXPECT_TRUE(run.Save(3, state));
    }
  }
}

// --- Power cuts ---

// Writes through the files, which record it; in order, as it is asked to.
class FilesEngine final : public engine::IoEngine {
 public:
  explicit FilesEngine(const file::FileOps& files) : files_(files) {}
  [[nodiscard]] Engine kind() const override { return Engine::kThreads; }
  [[nodiscard]] unsigned depth() const override { return 1; }
  [[nodiscard]] Result<engine::Submitted> Submit(const engine::IoRequest& request,
                                                 engine::IoCompletion* completed) override {
    *completed = {.tag = request.tag,
                  .result = files_.Write(request.fd, {request.data, request.length})};
    return engine::Submitted::kCompleted;
  }
  [[nodiscard]] Result<std::size_t> Reap(std::span<engine::IoCompletion> /*out*/) override {
    return std::unexpected(Error{.operation = "reap", .system_errno = EDEADLK});
  }

 private:
  const file::FileOps& files_;
};

TEST(CheckpointFaults, APowerCutAtAnyMomentLeavesTheCheckpointBeforeOrTheNewOne) {
  const Seed seed;
  Random random(seed.value());
  const testing::TemporaryDirectory directory;
  const std::string path = directory / "run";
  const std::shared_ptr<const commit::Root> root = testing::OpenForWriting(path);
  ASSERT_TRUE(testing::MakeCheckpoint(*root, 1));
  TreeCrashModel model(path);
  const TreeRecorder recorder(Unsynced());
  const AnyEngineFiles files(recorder);
  std::vector<std::size_t> done;  // operations when a save was reported
  {
    CheckpointWriter writer(
        root, {.engine = Engine::kThreads, .block_bytes = testing::kRunBlock}, {.keep_last = 1},
        {.files = &files, .make_engine = [&](Engine, unsigned) {
           return Result<std::unique_ptr<engine::IoEngine>>(std::make_unique<FilesEngine>(files));
         }});
    OwnedState state(1);
    for (const std::uint64_t step : {2U, 3U}) {
      CheckpointRequest request{.step = step};
      request.streams.push_back(state.Stream());
      const auto ticket = writer.Submit(std::move(request));
      ASSERT_TRUE(ticket);
      ASSERT_TRUE(ResultOf(**ticket)) << ResultOf(**ticket).error().Message();
      done.push_back(recorder.operations().size());
    }
  }
  const auto operations = recorder.operations();
  for (std::size_t at = 0; at <= operations.size(); ++at) {
    if (at > 0) model.Apply(operations[at - 1]);
    for (const auto names : {TreeCrashModel::Fate::kLoseAll, TreeCrashModel::Fate::kKeepAll,
                             TreeCrashModel::Fate::kRandom}) {
      const testing::TemporaryDirectory after;
      model.Crash(names, names, random, after / "run");
      const auto newest = NewestStep(after / "run");
      const std::uint64_t least = at >= done[1] ? 3 : at >= done[0] ? 2 : 1;
      ASSERT_TRUE(newest) << "after operation " << at;
      EXPECT_GE(*newest, least) << "after operation " << at;
    }
  }
}

}  // namespace
}  // namespace fastpersist::checkpoint
