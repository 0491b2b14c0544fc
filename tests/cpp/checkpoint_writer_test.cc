// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/crc32.h"
#include "testing/checkpoint_run.h"
#include "testing/child_process.h"

namespace fastpersist::checkpoint {
namespace {

using pipeline::VerifySource;
using testing::CheckpointRun;
using ::testing::ElementsAre;
using testing::Fault;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Never;
using testing::OwnedState;
using testing::ResultOf;

Error Given(ErrorCode code = ErrorCode::kAbandoned) {
  return {.code = code, .operation = "save", .detail = "given up"};
}

std::uint32_t CrcOf(const std::string& content) {
  return base::Crc32(std::as_bytes(std::span(content)));
}

CheckpointRequest RequestOf(std::uint64_t step, OwnedState& state, bool verdict,
                            std::size_t spare = 0, VerifySource verify = VerifySource::kFull) {
  CheckpointRequest request{.step = step, .verdict = verdict};
  request.streams.push_back(state.Stream("state.pt", verify, spare));
  return request;
}

// Holds the writer at one write until it is let go.
class Hold {
 public:
  Hold(CheckpointRun& run, std::uint64_t position) {
    run.OnWrite([this, position](std::uint64_t nth, const auto&) {
      if (nth != position || reached_ever_.exchange(true)) return Fault{};
      reached_.set_value();
      gone_.wait();
      return Fault{};
    });
  }
  void Await() { reached_.get_future().wait(); }
  void LetGo() { go_.set_value(); }

 private:
  std::atomic<bool> reached_ever_ = false;
  std::promise<void> reached_;
  std::promise<void> go_;
  std::shared_future<void> gone_ = go_.get_future();
};

TEST(CheckpointWriter, CommitsWhatWasSubmittedInOrder) {
  CheckpointRun run;
  OwnedState first(1);
  OwnedState second(2);
  auto one = run.Submit(100, first);
  auto two = run.Submit(7, second);
  const auto& saved = ResultOf(*one);
  ASSERT_TRUE(saved) << saved.error().Message();
  ASSERT_TRUE(ResultOf(*two));
  EXPECT_EQ(saved->step, 100U);
  EXPECT_EQ(saved->sequence, 1U);
  EXPECT_EQ(saved->generation, "step-00000100");
  EXPECT_EQ(saved->save.path, run.path() + "/step-00000100");
  EXPECT_EQ(saved->save.bytes, first.Content().size());
  EXPECT_EQ(saved->crc, CrcOf(first.Content()));
  EXPECT_EQ(one->written(), one->bytes());
  EXPECT_EQ(run.File("step-00000100"), first.Content());
  EXPECT_EQ(run.File("step-00000007"), second.Content());
  EXPECT_THAT(run.listing(), ElementsAre("2 step-00000007 complete", "1 step-00000100 complete"));
}

TEST(CheckpointWriter, TheManifestDescribesEveryStream) {
  CheckpointRun run;
  OwnedState main(1);
  OwnedState rank(2);
  CheckpointRequest request = RequestOf(3, main, /*verdict=*/false);
  request.streams.push_back(rank.Stream("rank-00000.pt"));
  request.metadata = R"({"loss": 0.50})";
  const auto ticket = run.Submit(std::move(request));
  const auto saved = ResultOf(*ticket);
  ASSERT_TRUE(saved) << saved.error().Message();
  EXPECT_EQ(saved->save.bytes, main.Content().size() + rank.Content().size());
  EXPECT_EQ(saved->crc, CrcOf(main.Content())) << "of the first";
  EXPECT_EQ(ticket->written(), ticket->bytes());
  EXPECT_EQ(ticket->bytes(), saved->save.bytes);

  const auto entry = commit::ReadCatalogEntry(*run.root(), "step-00000003", file::RealFileOps());
  ASSERT_TRUE(entry);
  ASSERT_EQ(entry->state, commit::GenerationState::kComplete);
  EXPECT_EQ(entry->manifest->metadata, R"({"loss": 0.50})");
  ASSERT_EQ(entry->manifest->streams.size(), 2U);
  for (const std::size_t i : {0U, 1U}) {
    const auto& stream = entry->manifest->streams[i];
    const std::string content = (i == 0 ? main : rank).Content();
    EXPECT_EQ(stream.name, i == 0 ? "state.pt" : "rank-00000.pt");
    EXPECT_EQ(stream.size, content.size());
    EXPECT_EQ(stream.crc, CrcOf(content));
    EXPECT_EQ(stream.record_crcs.size(), 3U);
    ASSERT_EQ(stream.parts.size(), 1U);
    EXPECT_EQ(stream.parts[0].crc, stream.crc);
    EXPECT_EQ(run.File("step-00000003", stream.name), content);
  }
}

TEST(CheckpointWriter, TheOwnerOfTwoStreamsIsLetGoWhenBothWereRead) {
  CheckpointRun run;
  OwnedState main(1);
  OwnedState rank(2);
  const std::string before = rank.Content();
  Hold hold(run, 5);  // of the first stream
  CheckpointRequest request = RequestOf(3, main, /*verdict=*/false);
  request.streams.push_back(rank.Stream("rank-00000.pt"));
  const auto ticket = run.Submit(std::move(request));
  hold.Await();
  EXPECT_FALSE(ticket->released());
  EXPECT_FALSE(ticket->WaitReleased(Clock::now(), true));
  hold.LetGo();
  EXPECT_TRUE(ticket->WaitReleased(Never(), true));
  main.Change();
  rank.Change();
  ASSERT_TRUE(ResultOf(*ticket));
  EXPECT_EQ(run.File("step-00000003", "rank-00000.pt"), before);
}

TEST(CheckpointWriter, AnOwnerWhoCopiesNeedNotWaitForASlowDevice) {
  CheckpointRun run;
  OwnedState first(1);
  OwnedState second(2);
  const std::string contents[] = {first.Content(), second.Content()};
  Hold hold(run, 2);
  const auto slow = run.Submit(RequestOf(1, first, /*verdict=*/false, 1 << 20));
  const auto queued = run.Submit(RequestOf(2, second, /*verdict=*/false, 1 << 20));
  hold.Await();
  EXPECT_TRUE(slow->WaitReleased(Never(), true)) << "though the writer is held";
  first.Change();
  EXPECT_TRUE(queued->WaitReleased(Never(), true)) << "though it has not begun";
  second.Change();
  EXPECT_FALSE(slow->done());
  hold.LetGo();
  ASSERT_TRUE(ResultOf(*slow)) << ResultOf(*slow).error().Message();
  ASSERT_TRUE(ResultOf(*queued));
  EXPECT_GT(ResultOf(*slow)->captured_bytes, 0U);
  EXPECT_EQ(run.File("step-00000001"), contents[0]);
  EXPECT_EQ(run.File("step-00000002"), contents[1]);
}

TEST(CheckpointWriter, CommitsOnlyWhatWasApproved) {
  CheckpointRun run;
  OwnedState state(1);
  const auto rejected = run.Submit(RequestOf(1, state, /*verdict=*/true));
  ASSERT_TRUE(rejected->WaitWritten(Never()));
  EXPECT_FALSE(rejected->done());
  EXPECT_FALSE(rejected->WaitDone(Clock::now()));
  EXPECT_EQ(rejected->written(), rejected->bytes());
  rejected->Reject(Given(ErrorCode::kStateChanged));
  rejected->Approve();  // too late
  ASSERT_FALSE(ResultOf(*rejected));
  EXPECT_EQ(ResultOf(*rejected).error().code, ErrorCode::kStateChanged);
  EXPECT_THAT(run.listing(), IsEmpty()) << "not even a directory is left";

  const auto approved = run.Submit(RequestOf(2, state, /*verdict=*/true));
  approved->Approve();
  approved->Reject(Given());  // too late
  EXPECT_TRUE(ResultOf(*approved));
  EXPECT_THAT(run.listing(), ElementsAre("1 step-00000002 complete"));
}

TEST(CheckpointWriter, WhatWasRejectedBeforeItsTurnIsNotWritten) {
  CheckpointRun run;
  OwnedState state(1);
  OwnedState other(2);
  Hold hold(run, 0);
  const auto first = run.Submit(1, state);
  const auto second = run.Submit(RequestOf(2, other, /*verdict=*/true));
  hold.Await();
  second->Reject(Given());
  hold.LetGo();
  EXPECT_FALSE(ResultOf(*second));
  EXPECT_EQ(second->written(), 0U);
  EXPECT_TRUE(second->released());
  EXPECT_TRUE(ResultOf(*first));
}

TEST(CheckpointWriter, ClosingFinishesWhatNeedsNoVerdictAndRejectsTheRest) {
  CheckpointRun run;
  OwnedState states[] = {OwnedState(1), OwnedState(2), OwnedState(3), OwnedState(4)};
  Hold hold(run, 0);
  const auto first = run.Submit(1, states[0]);
  const auto second = run.Submit(2, states[1]);
  const auto undecided = run.Submit(RequestOf(3, states[2], /*verdict=*/true));
  const auto approved = run.Submit(RequestOf(4, states[3], /*verdict=*/true));
  approved->Approve();
  hold.Await();
  std::thread closing([&] { run.Close(); });
  hold.LetGo();
  closing.join();
  EXPECT_TRUE(first->done() && second->done() && undecided->done() && approved->done());
  EXPECT_TRUE(first->result());
  EXPECT_TRUE(second->result());
  ASSERT_FALSE(undecided->result());
  EXPECT_EQ(undecided->result().error().code, ErrorCode::kAbandoned);
  EXPECT_TRUE(approved->result());
  EXPECT_EQ(run.listing().size(), 3U);
}

TEST(CheckpointWriter, WhatIsAbandonedAtAnyWriteLeavesTheCheckpointBefore) {
  for (std::uint64_t position = 0; position < 11; ++position) {
    CheckpointRun run;
    OwnedState state(1);
    const std::string before = state.Content();
    ASSERT_TRUE(run.Save(1, state));
    Hold hold(run, position);
    const auto ticket = run.Submit(RequestOf(2, state, /*verdict=*/true));
    ticket->Approve();  // an abandoned save is not committed all the same
    hold.Await();
    ticket->Abandon(Given());
    EXPECT_TRUE(ticket->released());
    state.Change();
    hold.LetGo();
    ASSERT_FALSE(ResultOf(*ticket)) << position;
    EXPECT_EQ(ResultOf(*ticket).error().code, ErrorCode::kAbandoned);
    EXPECT_THAT(run.listing(), ElementsAre("1 step-00000001 complete"));
    EXPECT_EQ(run.File("step-00000001"), before);
    EXPECT_TRUE(run.Save(3, state)) << "and later saves work";
  }
}

TEST(CheckpointWriter, WhatIsAbandonedWhileItWaitsForAVerdictIsNotCommitted) {
  CheckpointRun run;
  OwnedState state(1);
  const auto ticket = run.Submit(RequestOf(1, state, /*verdict=*/true));
  ASSERT_TRUE(ticket->WaitWritten(Never()));
  ticket->Abandon(Given());
  EXPECT_FALSE(ResultOf(*ticket));
  EXPECT_THAT(run.listing(), IsEmpty());
  const auto committed = run.Submit(2, state);
  ASSERT_TRUE(ResultOf(*committed));
  committed->Abandon(Given());
  EXPECT_TRUE(ResultOf(*committed)) << "too late";
}

TEST(CheckpointWriter, MemoryThatChangedIsNotCommitted) {
  CheckpointRun run;
  OwnedState state(1);
  ASSERT_TRUE(run.Save(1, state));
  Hold hold(run, 6);
  const auto ticket = run.Submit(2, state);
  hold.Await();
  state.Change();
  hold.LetGo();
  const auto& result = ResultOf(*ticket);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kStateChanged);
  EXPECT_EQ(result.error().entry, "tensor");
  EXPECT_THAT(run.listing(), ElementsAre("1 step-00000001 complete"));
}

TEST(CheckpointWriter, ASampleFindsAChangeWithinSixteenSaves) {
  CheckpointRun run;
  OwnedState state(1);
  int found = 0;
  for (std::uint64_t turn = 0; turn < 16; ++turn) {
    Hold hold(run, 6);
    CheckpointRequest request = RequestOf(turn, state, false, 0, VerifySource::kSample);
    request.streams[0].memory.turn = turn;
    const auto ticket = run.Submit(std::move(request));
    hold.Await();
    state.Change();
    hold.LetGo();
    if (!ResultOf(*ticket)) ++found;
  }
  // Of two live extents the first was read whole then and the second in part; a save looks at one.
  EXPECT_EQ(found, 16);
}

TEST(CheckpointWriter, SavingAStepAgainReplacesItAndRetentionFollowsTheCommit) {
  CheckpointRun run(nullptr, {.keep_last = 2});
  OwnedState state(1);
  for (const std::uint64_t step : {1U, 2U, 2U, 3U}) {
    ASSERT_TRUE(run.Save(step, state));
  }
  const auto again = run.Save(4, state);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->save.warning, "");
  EXPECT_EQ(again->retired.size(), 1U);
  EXPECT_THAT(run.listing(), ElementsAre("5 step-00000004 complete", "4 step-00000003 complete"));
}

TEST(CheckpointWriter, AStepThatIsSavedAgainIsReplacedWithoutAnyRetention) {
  CheckpointRun run;
  OwnedState state(1);
  ASSERT_TRUE(run.Save(1, state));
  ASSERT_TRUE(run.Save(2, state));
  state.Change();
  const auto again = run.Save(2, state);
  ASSERT_TRUE(again);
  EXPECT_THAT(again->retired, ElementsAre("step-00000002"));
  EXPECT_EQ(run.listing().size(), 2U);
  EXPECT_EQ(run.File(again->generation), state.Content());
}

TEST(CheckpointWriter, AFailedSaveIsRepeatedWhileTheMemoryIsNotGivenBack) {
  for (std::uint64_t position = 0; position < 12; ++position) {
    CheckpointRun run;
    OwnedState state(1);
    const std::string before = state.Content();
    std::atomic<int> failures = 0;
    run.OnWrite([&](std::uint64_t nth, const auto&) {
      return nth == position && failures++ == 0 ? Fault::Reports(-EIO) : Fault{};
    });
    const auto ticket = run.Submit(1, state);
    EXPECT_TRUE(ticket->WaitReleased(Never(), true));
    state.Change();
    const auto& result = ResultOf(*ticket);
    if (result) {
      EXPECT_EQ(run.File("step-00000001"), before) << position;
    } else {
      EXPECT_EQ(result.error().system_errno, EIO);
      EXPECT_THAT(run.listing(), IsEmpty());
    }
    EXPECT_TRUE(run.Save(2, state));
  }
}

// --- Fork ---

const testing::RegisterRole kForksWhileSaving(
    "forks while it saves checkpoints", [](const testing::Arguments& /*arguments*/) {
      auto run = std::make_unique<CheckpointRun>();
      OwnedState state(1);
      Hold hold(*run, 3);
      auto ticket = run->Submit(1, state);
      hold.Await();
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(60);  // a hang becomes a signal
        OwnedState other(2);
        const auto refused = run->writer().Submit(RequestOf(2, other, /*verdict=*/false));
        if (refused || refused.error().code != ErrorCode::kForked) ::_exit(1);
        run->Close();
        ticket.reset();
        ::_exit(0);
      }
      int status = 0;
      if (::waitpid(child, &status, 0) != child) return 1;
      hold.LetGo();
      return ResultOf(*ticket) && status == 0 ? 0 : 2;
    });

TEST(CheckpointWriter, AForkedChildIsRefusedAndDestroysTheWriterWithoutWaiting) {
  EXPECT_EQ(testing::RunRole("forks while it saves checkpoints").exit_code, 0);
}

}  // namespace
}  // namespace fastpersist::checkpoint
