// SPDX-License-Identifier: Apache-2.0
// Writing one step: whatever fails, and whenever the process or the power ends, the root holds one
// complete older checkpoint or the new one, and nothing else that claims to be complete.
#include "commit/generation.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "commit/retention.h"
#include "testing/checkpoint_directory.h"
#include "testing/faulty_files.h"
#include "testing/temporary_directory.h"
#include "testing/tree_crash_model.h"

namespace fastpersist::commit {
namespace {

using testing::CheckpointContent;
using testing::CheckpointManifest;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Listing;
using testing::MakeCheckpoint;
using testing::NewestStep;
using testing::OpenForWriting;
using testing::Operation;
using testing::ReadFile;
using testing::TemporaryDirectory;
using testing::Unsynced;
using testing::WriteFile;
using testing::WriteState;
using Kind = Operation::Kind;

TEST(GenerationTest, ACommittedStepIsComplete) {
  const TemporaryDirectory directory;
  const auto root = OpenForWriting(directory.path());
  EXPECT_EQ(MakeCheckpoint(*root, 100), 1U);
  EXPECT_EQ(MakeCheckpoint(*root, 200), 2U);
  EXPECT_THAT(Listing(directory.path()),
              ElementsAre("2 step-00000200 complete", "1 step-00000100 complete"));
  const auto parsed = ParseManifest(ReadFile(directory / "step-00000200/manifest.json"), "");
  ASSERT_TRUE(parsed) << parsed.error().Message();
  EXPECT_EQ(parsed->step, 200U);
  EXPECT_EQ(parsed->generation, "step-00000200");
  EXPECT_EQ(parsed->job, root->job());
  EXPECT_THAT(parsed->library, HasSubstr("fastpersist"));
  EXPECT_THAT(parsed->created, ::testing::MatchesRegex("20..-..-..T..:..:..Z"));
}

TEST(GenerationTest, SavingAStepAgainMakesANewGenerationWhichIsTheNewerOne) {
  const TemporaryDirectory directory;
  const auto root = OpenForWriting(directory.path());
  ASSERT_TRUE(MakeCheckpoint(*root, 7));
  auto again = Generation::Begin(*root, 7, Unsynced());
  ASSERT_TRUE(again);
  EXPECT_THAT(again->name(), ::testing::MatchesRegex("step-00000007\\.g[0-9a-f]+"));
  EXPECT_EQ(StepOfName(again->name()), 7U);
  ASSERT_TRUE(WriteState(*again, CheckpointContent(7), Unsynced()));
  EXPECT_EQ(again->Commit(CheckpointManifest(root->id(), CheckpointContent(7))), 2U);
  EXPECT_THAT(Listing(directory.path()),
              ElementsAre("2 " + again->name() + " complete", "1 step-00000007 complete"));
}

TEST(GenerationTest, TheOrderIsThatOfCommitsWhateverStepsAndTimesSay) {
  const TemporaryDirectory directory;
  {
    const auto root = OpenForWriting(directory.path());
    ASSERT_TRUE(MakeCheckpoint(*root, 900));
  }
  const auto root = OpenForWriting(directory.path());
  auto generation = Generation::Begin(*root, 5, Unsynced());
  ASSERT_TRUE(generation);
  ASSERT_TRUE(WriteState(*generation, CheckpointContent(5), Unsynced()));
  Manifest manifest = CheckpointManifest(root->id(), CheckpointContent(5));
  manifest.created = "1970-01-01T00:00:00Z";  // the clock was set back
  EXPECT_EQ(generation->Commit(std::move(manifest)), 2U);
  EXPECT_EQ(NewestStep(directory.path()), 5U);
}

TEST(GenerationTest, NumbersGoOnAfterDamagedAndRetiredOnes) {
  const TemporaryDirectory directory;
  {
    const auto root = OpenForWriting(directory.path());
    for (const std::uint64_t step : {1U, 2U, 3U}) ASSERT_TRUE(MakeCheckpoint(*root, step));
  }
  const std::string manifest = directory / "step-00000003/manifest.json";
  const std::string text = ReadFile(manifest);
  WriteFile(manifest, text.substr(0, text.size() / 2));
  EXPECT_EQ(MakeCheckpoint(*OpenForWriting(directory.path()), 4), 4U);
  std::filesystem::rename(directory / "step-00000004/manifest.json",
                          directory / "step-00000004/retired.json");
  EXPECT_EQ(MakeCheckpoint(*OpenForWriting(directory.path()), 5), 5U);
}

TEST(GenerationTest, AnAttemptThatIsNotCommittedLeavesNothing) {
  const TemporaryDirectory directory;
  const auto root = OpenForWriting(directory.path());
  const auto before = directory.names();
  {
    auto generation = Generation::Begin(*root, 1, Unsynced());
    ASSERT_TRUE(generation);
    EXPECT_TRUE(root->IsActive("step-00000001"));
    ASSERT_TRUE(WriteState(*generation, "x", Unsynced()));
    const Generation moved = *std::move(generation);
    EXPECT_EQ(moved.name(), "step-00000001");
  }
  EXPECT_EQ(directory.names(), before);
  EXPECT_FALSE(root->IsActive("step-00000001"));
}

TEST(GenerationTest, AbandoningTouchesNoFileThatIsNotOurs) {
  const TemporaryDirectory directory;
  const auto root = OpenForWriting(directory.path());
  {
    auto generation = Generation::Begin(*root, 1, Unsynced());
    ASSERT_TRUE(generation);
    ASSERT_TRUE(WriteState(*generation, "x", Unsynced()));
    WriteFile(directory / "step-00000001/notes.txt", "mine");
  }
  EXPECT_EQ(ReadFile(directory / "step-00000001/notes.txt"), "mine");
  EXPECT_FALSE(std::filesystem::exists(directory / "step-00000001/state.pt"));
}

TEST(GenerationTest, AForkedChildDoesNotAbandonItsParentsAttempt) {
  const TemporaryDirectory directory;
  const auto root = OpenForWriting(directory.path());
  auto generation = std::make_unique<Generation>(*Generation::Begin(*root, 1, Unsynced()));
  ASSERT_TRUE(WriteState(*generation, CheckpointContent(1), Unsynced()));
  const pid_t child = ::fork();
  if (child == 0) {
    generation.reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(generation->Commit(CheckpointManifest(root->id(), CheckpointContent(1))));
  EXPECT_EQ(NewestStep(directory.path()), 1U);
}

TEST(GenerationTest, AManifestThatMakesNoSenseIsRefusedBeforeAnythingIsWritten) {
  const TemporaryDirectory directory;
  const auto root = OpenForWriting(directory.path());
  auto generation = Generation::Begin(*root, 1, Unsynced());
  ASSERT_TRUE(generation);
  Manifest manifest = CheckpointManifest(root->id(), "abc");
  manifest.metadata = "[]";
  const auto refused = generation->Commit(manifest);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  manifest.metadata = "{}";
  EXPECT_TRUE(generation->Commit(manifest)) << "the caller may mend it";
  EXPECT_FALSE(generation->Commit(manifest)) << "once only";
}

TEST(GenerationTest, ARootThatIsOnlyReadTakesNoCheckpoints) {
  const TemporaryDirectory directory;
  const auto root = Root::Open(directory.path(), Root::Access::kRead);
  const auto generation = Generation::Begin(**root, 1, Unsynced());
  ASSERT_FALSE(generation);
  EXPECT_EQ(generation.error().code, ErrorCode::kInvalidArgument);
}

TEST(GenerationTest, WhicheverCallFailsOneCompleteCheckpointIsThereAndANewAttemptWorks) {
  unsigned not_committed = 0;
  unsigned unknown = 0;
  for (unsigned nth = 1;; ++nth) {
    const TemporaryDirectory directory;
    const auto root = OpenForWriting(directory.path());
    ASSERT_TRUE(MakeCheckpoint(*root, 1));
    const testing::FailingCall files(nth, ENOSPC, /*from_then_on=*/false, Unsynced());
    const auto made = MakeCheckpoint(*root, 2, files);
    if (!files.failed()) {
      ASSERT_TRUE(made);
      break;
    }
    if (made) {  // only what cleans up after a success may fail unheard: there is nothing such
      ADD_FAILURE() << "call " << nth << " failed in silence";
    } else if (made.error().operation == "sync the directory" &&
               made.error().detail.find("in place") != std::string::npos) {
      EXPECT_EQ(NewestStep(directory.path()), 2U) << nth;
      ++unknown;
    } else {
      EXPECT_EQ(NewestStep(directory.path()), 1U) << nth << ": " << made.error().Message();
      EXPECT_THAT(Listing(directory.path()), ::testing::SizeIs(1)) << "nothing is left of it";
      ++not_committed;
    }
    ASSERT_TRUE(MakeCheckpoint(*root, 3)) << nth;
    EXPECT_EQ(NewestStep(directory.path()), 3U) << nth;
  }
  EXPECT_GT(not_committed, 12U);
  EXPECT_EQ(unknown, 2U);
}

TEST(GenerationTest, WhereverTheProcessEndsOneCompleteCheckpointIsThereAndTheNextStartCleansUp) {
  bool new_before = false;
  for (unsigned nth = 1;; ++nth) {
    const TemporaryDirectory directory;
    bool reported = false;
    bool ended = false;
    {
      const auto root = OpenForWriting(directory.path());
      ASSERT_TRUE(MakeCheckpoint(*root, 1));
      const testing::FailingCall files(nth, EIO, /*from_then_on=*/true, Unsynced());
      reported = MakeCheckpoint(*root, 2, files).has_value();
      ended = files.failed();
    }
    if (!ended) break;
    const auto newest = NewestStep(directory.path());
    ASSERT_TRUE(newest == 1U || newest == 2U) << nth;
    ASSERT_FALSE(reported);
    ASSERT_FALSE(new_before && newest == 1U) << "once it is committed it stays: " << nth;
    new_before = newest == 2U;
    const auto root = OpenForWriting(directory.path());
    ASSERT_TRUE(RemoveLeftovers(*root, Unsynced())) << nth;
    EXPECT_EQ(NewestStep(directory.path()), newest);
    for (const std::string& line : Listing(directory.path())) {
      // Between mkdir and owner.json nobody can know whose it is.
      EXPECT_THAT(line, ::testing::AnyOf(HasSubstr("complete"), "- step-00000002 foreign")) << nth;
    }
    ASSERT_TRUE(MakeCheckpoint(*root, 3));
  }
  EXPECT_TRUE(new_before);
}

// What is wrong with what a crash left; empty when promises are kept and none is missing.
std::string DamageIn(const std::string& path, bool reported) {
  const auto listing = Listing(path);
  const std::string all = ::testing::PrintToString(listing);
  if (all.find("broken") != std::string::npos) return all;
  const auto newest = NewestStep(path);
  if (newest != 2U && (newest != 1U || reported)) return all;
  const auto root = OpenForWriting(path);
  if (!RemoveLeftovers(*root, Unsynced())) return "leftovers cannot be removed: " + all;
  return NewestStep(path) == newest ? "" : "cleaning removed a checkpoint: " + all;
}

struct Recording {
  testing::TreeCrashModel model;  // of what was there before
  std::vector<testing::TreeOperation> operations;
  bool saved = false;
};

// Records the commit of step 2 after step 1; some calls fail.
Recording Record(const std::vector<testing::FileFault>& faults) {
  const TemporaryDirectory directory;
  const auto root = OpenForWriting(directory.path());
  EXPECT_TRUE(MakeCheckpoint(*root, 1));
  const testing::TreeCrashModel before(directory.path());
  const testing::FaultyFiles faulty(faults, Unsynced());
  const testing::TreeRecorder recorder(faulty);
  const bool saved = MakeCheckpoint(*root, 2, recorder).has_value();
  return {.model = before, .operations = recorder.operations(), .saved = saved};
}

// Crashes after every prefix of the operations; the first damage.
std::string CrashEverywhere(testing::TreeCrashModel model,
                            const std::vector<testing::TreeOperation>& operations, bool saved,
                            int samples = 10) {
  const testing::Seed seed;
  testing::Random random(seed.value());
  using Fate = testing::TreeCrashModel::Fate;
  for (std::size_t prefix = 0; prefix <= operations.size(); ++prefix) {
    if (prefix > 0) model.Apply(operations[prefix - 1]);
    for (int sample = 0; sample < samples; ++sample) {
      const Fate names = sample < 4 ? Fate{static_cast<std::uint8_t>(sample % 2)} : Fate::kRandom;
      const Fate data = sample < 4 ? Fate{static_cast<std::uint8_t>(sample / 2)} : Fate::kRandom;
      const TemporaryDirectory crashed;
      model.Crash(names, data, random, crashed.path());
      const auto damage = DamageIn(crashed.path(), saved && prefix == operations.size());
      if (!damage.empty()) return "after " + std::to_string(prefix) + " operations: " + damage;
    }
  }
  return "";
}

TEST(GenerationTest, APowerCutAtAnyMomentLeavesACompleteCheckpoint) {
  const Recording recording = Record({});
  EXPECT_TRUE(recording.saved);
  EXPECT_GT(recording.operations.size(), 15U);
  EXPECT_EQ(CrashEverywhere(recording.model, recording.operations, true), "");
}

TEST(GenerationTest, APowerCutAfterAFailedSyncLeavesACompleteCheckpoint) {
  for (const auto kind : {Kind::kSyncData, Kind::kSyncDirectory}) {
    for (unsigned nth = 1; nth <= (kind == Kind::kSyncData ? 3U : 5U); ++nth) {
      const Recording recording = Record({{.kind = kind, .system_errno = EIO, .nth = nth}});
      EXPECT_FALSE(recording.saved);
      EXPECT_EQ(CrashEverywhere(recording.model, recording.operations, false, 5), "");
    }
  }
}

TEST(GenerationTest, WithoutAnyOneKindOfSyncThePowerCutsDoDamage) {
  for (const auto kind : {Kind::kSyncData, Kind::kSyncDirectory}) {
    Recording recording = Record({});
    std::erase_if(recording.operations, [&](const testing::TreeOperation& operation) {
      return operation.operation.kind == kind;
    });
    EXPECT_NE(CrashEverywhere(recording.model, recording.operations, true), "")
        << "the model forgets nothing";
  }
}

TEST(GenerationTest, AFailedSyncIsNeverRepeatedByTheSameAttempt) {
  const TemporaryDirectory directory;
  const auto root = OpenForWriting(directory.path());
  const testing::FaultyFiles files({{.kind = Kind::kSyncDirectory, .system_errno = EIO, .nth = 3}});
  auto generation = Generation::Begin(*root, 1, files);
  ASSERT_TRUE(generation);
  ASSERT_TRUE(WriteState(*generation, CheckpointContent(1), files));
  const Manifest manifest = CheckpointManifest(root->id(), CheckpointContent(1));
  EXPECT_EQ(generation->Commit(manifest).error().system_errno, EIO);
  EXPECT_FALSE(generation->committed());
  EXPECT_EQ(generation->Commit(manifest).error().code, ErrorCode::kInvalidArgument);
}

TEST(GenerationTest, AFailingSyncAfterTheRenameSaysThatTheCheckpointIsInPlace) {
  const TemporaryDirectory directory;
  const auto root = OpenForWriting(directory.path());
  const testing::FaultyFiles files({{.kind = Kind::kSyncDirectory, .system_errno = EIO, .nth = 4}});
  {
    auto generation = Generation::Begin(*root, 1, files);
    ASSERT_TRUE(generation);
    ASSERT_TRUE(WriteState(*generation, CheckpointContent(1), files));
    const auto result = generation->Commit(CheckpointManifest(root->id(), CheckpointContent(1)));
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().operation, "sync the directory");
    EXPECT_THAT(result.error().detail, HasSubstr("durability is unknown"));
    EXPECT_TRUE(generation->committed());
  }
  EXPECT_EQ(NewestStep(directory.path()), 1U) << "it is not abandoned";
  EXPECT_EQ(MakeCheckpoint(*root, 2), 2U);
}

TEST(GenerationTest, ADirectoryThatCannotBeSyncedIsAWarning) {
  const TemporaryDirectory directory;
  const auto root = OpenForWriting(directory.path());
  const testing::FaultyFiles files(
      {{.kind = Kind::kSyncDirectory, .system_errno = EINVAL, .from_then_on = true}});
  auto generation = Generation::Begin(*root, 1, files);
  ASSERT_TRUE(generation);
  ASSERT_TRUE(WriteState(*generation, CheckpointContent(1), files));
  EXPECT_TRUE(generation->Commit(CheckpointManifest(root->id(), CheckpointContent(1))));
  EXPECT_THAT(generation->warning(), HasSubstr("cannot sync directories"));
}

// As a server does whose answer is lost.
class LostAnswer final : public file::FileOps {
 public:
  int Rename(int directory, const char* from, const char* to) const override {
    (void)FileOps::Rename(directory, from, to);
    return -EIO;
  }
};

TEST(GenerationTest, ARenameWhoseAnswerWasLostCounts) {
  const TemporaryDirectory directory;
  const auto root = OpenForWriting(directory.path());
  const LostAnswer files;
  EXPECT_EQ(MakeCheckpoint(*root, 1, files), 1U);
  EXPECT_EQ(NewestStep(directory.path()), 1U);
}

TEST(GenerationTest, ARenameOfUnknownOutcomeRemovesNothing) {
  const TemporaryDirectory directory;
  const auto root = OpenForWriting(directory.path());
  const LostAnswer lost;
  const testing::FaultyFiles files({{.kind = Kind::kStatLink, .system_errno = EIO}}, lost);
  // The catalog is scanned first, which looks at nothing in an empty root.
  const auto made = MakeCheckpoint(*root, 1, files);
  ASSERT_FALSE(made);
  EXPECT_THAT(made.error().detail, HasSubstr("unknown"));
  EXPECT_EQ(NewestStep(directory.path()), 1U);
  EXPECT_EQ(MakeCheckpoint(*root, 2), 2U) << "the number is used up";
}

}  // namespace
}  // namespace fastpersist::commit
