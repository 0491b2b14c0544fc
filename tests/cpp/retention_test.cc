// SPDX-License-Identifier: Apache-2.0
// Retiring and cleaning: what goes never counts half gone, what stays is untouched, and what is not
// ours is left alone.
#include "commit/retention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include "commit/generation.h"
#include "fmt/format.h"
#include "testing/checkpoint_directory.h"
#include "testing/faulty_files.h"
#include "testing/temporary_directory.h"
#include "testing/tree_crash_model.h"

namespace fastpersist::commit {
namespace {

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

namespace fs = std::filesystem;

// A catalog of complete entries with these steps, newest first.
std::vector<CatalogEntry> Complete(const std::vector<std::uint64_t>& steps) {
  std::vector<CatalogEntry> catalog;
  for (const std::uint64_t step : steps) {
    catalog.push_back({.name = fmt::format("step-{:08}", step),
                       .step = step,
                       .state = GenerationState::kComplete,
                       .sequence = steps.size() - catalog.size()});
  }
  return catalog;
}

std::vector<std::uint64_t> ChosenSteps(const std::vector<CatalogEntry>& catalog,
                                       const RetentionPolicy& policy) {
  std::vector<std::uint64_t> steps;
  for (const std::size_t index : ChooseRetired(catalog, policy)) {
    steps.push_back(catalog[index].step);
  }
  return steps;
}

TEST(ChooseRetiredTest, KeepsTheLastAndThoseDivisible) {
  const auto catalog = Complete({500, 400, 300, 200, 100});
  EXPECT_THAT(ChosenSteps(catalog, {}), IsEmpty());
  EXPECT_THAT(ChosenSteps(catalog, {.keep_every = 300}), IsEmpty()) << "keep_last keeps all";
  EXPECT_THAT(ChosenSteps(catalog, {.keep_last = 2}), ElementsAre(100, 200, 300));
  EXPECT_THAT(ChosenSteps(catalog, {.keep_last = 2, .keep_every = 200}), ElementsAre(100, 300));
  EXPECT_THAT(ChosenSteps(catalog, {.keep_last = 9}), IsEmpty());
  EXPECT_THAT(ChosenSteps(catalog, {.keep_last = 1, .keep_every = 0}),
              ElementsAre(100, 200, 300, 400));
}

TEST(ChooseRetiredTest, NeverTheNewest) {
  for (const std::uint64_t keep : {0U, 1U}) {
    EXPECT_THAT(ChosenSteps(Complete({7}), {.keep_last = keep}), IsEmpty());
    EXPECT_THAT(ChosenSteps(Complete({7, 6}), {.keep_last = keep}), ElementsAre(6));
  }
}

TEST(ChooseRetiredTest, AnOlderGenerationOfAStepGoesAndDoesNotCount) {
  auto catalog = Complete({3, 3, 2, 3, 1});
  EXPECT_THAT(ChooseRetired(catalog, {}), ElementsAre(3U, 1U));
  EXPECT_THAT(ChooseRetired(catalog, {.keep_last = 2}), ElementsAre(4U, 3U, 1U));
  EXPECT_THAT(ChooseRetired(catalog, {.keep_last = 3, .keep_every = 3}), ElementsAre(3U, 1U));
}

TEST(ChooseRetiredTest, OnlyCompleteOnesAreChosenOrCounted) {
  for (const auto state :
       {GenerationState::kUnfinished, GenerationState::kRetired, GenerationState::kDamaged,
        GenerationState::kNewer, GenerationState::kForeign}) {
    auto catalog = Complete({5, 4, 3, 2});
    catalog[0].state = catalog[2].state = state;
    EXPECT_THAT(ChosenSteps(catalog, {.keep_last = 1}), ElementsAre(2)) << StateName(state);
    EXPECT_THAT(ChosenSteps(catalog, {.keep_last = 2}), IsEmpty());
  }
}

TEST(ChooseRetiredTest, WhatIsNotOursOrOfUncertainOrderStays) {
  auto catalog = Complete({5, 4, 3, 2});
  catalog[1].owned = false;
  catalog[2].reason = "the same sequence number";
  EXPECT_THAT(ChosenSteps(catalog, {.keep_last = 1}), ElementsAre(2));
}

class Retention : public ::testing::Test {
 protected:
  Retention() {
    const auto root = OpenForWriting(directory_.path());
    for (const std::uint64_t step : {1U, 2U, 3U}) EXPECT_TRUE(MakeCheckpoint(*root, step));
  }
  TemporaryDirectory directory_;
};

TEST_F(Retention, ARetiredCheckpointIsGone) {
  const auto root = OpenForWriting(directory_.path());
  ASSERT_TRUE(Retire(*root, "step-00000002", Unsynced()));
  EXPECT_THAT(Listing(directory_.path()),
              ElementsAre("3 step-00000003 complete", "1 step-00000001 complete"));
  EXPECT_FALSE(fs::exists(directory_ / "step-00000002"));
  EXPECT_EQ(MakeCheckpoint(*root, 4), 4U);
}

TEST_F(Retention, FilesThatAreNotOursStayWithTheirDirectory) {
  WriteFile(directory_ / "step-00000001/notes.txt", "mine");
  const auto root = OpenForWriting(directory_.path());
  ASSERT_TRUE(Retire(*root, "step-00000001", Unsynced()));
  EXPECT_EQ(ReadFile(directory_ / "step-00000001/notes.txt"), "mine");
  EXPECT_FALSE(fs::exists(directory_ / "step-00000001/state.pt"));
  EXPECT_THAT(Listing(directory_.path()).back(), "- step-00000001 foreign");
}

TEST_F(Retention, ADamagedOneCanBeRetiredByName) {
  WriteFile(directory_ / "step-00000002/manifest.json", "garbage");
  const auto root = OpenForWriting(directory_.path());
  EXPECT_THAT(*Prune(*root, {.keep_last = 1}, false, Unsynced()), ElementsAre("step-00000001"));
  EXPECT_TRUE(fs::exists(directory_ / "step-00000002/state.pt")) << "not by itself";
  ASSERT_TRUE(Retire(*root, "step-00000002", Unsynced()));
  EXPECT_FALSE(fs::exists(directory_ / "step-00000002"));
}

TEST_F(Retention, WhatIsNoCheckpointOfOursIsRefused) {
  const auto root = OpenForWriting(directory_.path());
  fs::create_directory(directory_ / "step-00000009");
  WriteFile(directory_ / "step-00000009/manifest.json", "{}");
  const auto foreign = Retire(*root, "step-00000009", Unsynced());
  ASSERT_FALSE(foreign);
  EXPECT_THAT(foreign.error().detail, HasSubstr("owner.json"));
  EXPECT_TRUE(fs::exists(directory_ / "step-00000009/manifest.json"));
  for (const char* name : {"step-00000008", "..", "", "/tmp"}) {
    EXPECT_EQ(Retire(*root, name, Unsynced()).error().code, ErrorCode::kNotFound) << name;
  }
  const auto generation = Generation::Begin(*root, 5, Unsynced());
  EXPECT_THAT(Retire(*root, "step-00000005", Unsynced()).error().detail,
              HasSubstr("being written"));
  const auto reading = Root::Open(directory_.path(), Root::Access::kRead);
  EXPECT_FALSE(Retire(**reading, "step-00000001", Unsynced()));
  EXPECT_EQ(NewestStep(directory_.path()), 3U);
}

TEST_F(Retention, PruningDryNamesAndChangesNothing) {
  const auto reading = Root::Open(directory_.path(), Root::Access::kRead);
  const auto before = Listing(directory_.path());
  EXPECT_THAT(*Prune(**reading, {.keep_last = 1}, true, Unsynced()),
              ElementsAre("step-00000001", "step-00000002"));
  EXPECT_EQ(Listing(directory_.path()), before);
}

TEST_F(Retention, LeftoversGoAndNothingElse) {
  const auto root = OpenForWriting(directory_.path());
  fs::remove(directory_ / "step-00000001/manifest.json");  // unfinished
  fs::rename(directory_ / "step-00000002/manifest.json", directory_ / "step-00000002/retired.json");
  ASSERT_TRUE(MakeCheckpoint(*root, 4));
  fs::remove(directory_ / "step-00000004/state.pt");   // damaged
  fs::create_directory(directory_ / "step-00000009");  // foreign
  fs::create_directory(directory_ / "step-00000008");  // of another root
  WriteFile(directory_ / "step-00000008/owner.json",
            R"({"job": "j", "generation": "step-00000008", "root": "ffff"})");
  const auto active = Generation::Begin(*root, 7, Unsynced());
  const auto found = RemoveLeftovers(*root, Unsynced());
  ASSERT_TRUE(found) << found.error().Message();
  EXPECT_THAT(found->removed, ::testing::UnorderedElementsAre("step-00000001", "step-00000002"));
  EXPECT_THAT(found->kept, ElementsAre("step-00000008"));
  EXPECT_THAT(
      Listing(directory_.path()),
      ElementsAre("4 step-00000004 damaged", "3 step-00000003 complete", "- step-00000009 foreign",
                  "- step-00000008 unfinished", "- step-00000007 unfinished"));
}

TEST_F(Retention, WithoutALockNoLeftoverIsRemoved) {
  fs::remove(directory_ / "step-00000001/manifest.json");
  const testing::FaultyFiles files(
      {{.kind = Operation::Kind::kTryLock, .system_errno = ENOLCK, .from_then_on = true}});
  const auto root = Root::Open(directory_.path(), Root::Access::kWrite, files);
  ASSERT_TRUE(root);
  EXPECT_THAT(RemoveLeftovers(**root, Unsynced())->kept, ElementsAre("step-00000001"));
  EXPECT_TRUE(fs::exists(directory_ / "step-00000001/state.pt"));
}

TEST_F(Retention, ALeftoverThatCannotBeRemovedIsKeptWithTheReasonAndTheOthersGo) {
  fs::remove(directory_ / "step-00000001/manifest.json");
  fs::remove(directory_ / "step-00000001/state.pt");
  fs::create_directories(directory_ / "step-00000001/state.pt/inside");
  fs::remove(directory_ / "step-00000002/manifest.json");
  const auto root = OpenForWriting(directory_.path());
  const auto found = RemoveLeftovers(*root, Unsynced());
  ASSERT_TRUE(found) << found.error().Message();
  EXPECT_THAT(found->kept,
              ElementsAre(::testing::AllOf(HasSubstr("step-00000001: "), HasSubstr("state.pt"))));
  EXPECT_THAT(found->removed, ElementsAre("step-00000002"));
  EXPECT_EQ(NewestStep(directory_.path()), 3U);
}

TEST_F(Retention, WhicheverCallFailsTheOtherLeftoversGoAndWhatStaysIsNamed) {
  for (const bool from_then_on : {false, true}) {
    for (unsigned nth = 1;; ++nth) {
      const TemporaryDirectory directory;
      const auto root = OpenForWriting(directory.path());
      for (const std::uint64_t step : {1U, 2U, 3U}) ASSERT_TRUE(MakeCheckpoint(*root, step));
      fs::remove(directory / "step-00000001/manifest.json");
      fs::rename(directory / "step-00000002/manifest.json",
                 directory / "step-00000002/retired.json");
      const testing::FailingCall files(nth, EACCES, from_then_on, Unsynced());
      const auto found = RemoveLeftovers(*root, files);
      ASSERT_EQ(NewestStep(directory.path()), 3U) << nth;
      // The first call lists the root: without it nothing is known.
      ASSERT_EQ(found.has_value(), nth > 1) << nth;
      if (!found) continue;
      for (const char* name : {"step-00000001", "step-00000002"}) {
        if (!fs::exists(directory / name)) continue;
        ASSERT_THAT(found->kept, ::testing::Contains(HasSubstr(name))) << nth;
      }
      if (!from_then_on) {
        ASSERT_GE(found->removed.size(), 1U) << nth;
        ASSERT_LE(found->kept.size(), 1U) << nth;
      }
      for (const std::string& kept : found->kept) {
        ASSERT_THAT(kept, HasSubstr("Permission denied")) << nth;
      }
      if (!files.failed()) {
        ASSERT_THAT(found->removed, ElementsAre("step-00000001", "step-00000002"));
        break;
      }
    }
  }
}

TEST_F(Retention, WhicheverCallFailsTheNewerStaysAndTheNextStartGoesOn) {
  for (const bool killed : {false, true}) {
    for (unsigned nth = 1;; ++nth) {
      const TemporaryDirectory directory;
      bool failed = false;
      {
        const auto root = OpenForWriting(directory.path());
        ASSERT_TRUE(MakeCheckpoint(*root, 1));
        ASSERT_TRUE(MakeCheckpoint(*root, 2));
        const testing::FailingCall files(nth, EIO, killed, Unsynced());
        const auto retired = Retire(*root, "step-00000001", files);
        failed = files.failed();
        ASSERT_EQ(retired.has_value(), !failed) << "call " << nth;
      }
      if (!failed) break;
      ASSERT_EQ(NewestStep(directory.path()), 2U) << nth;
      for (const std::string& line : Listing(directory.path())) {
        ASSERT_THAT(line,
                    ::testing::Not(::testing::AnyOf(HasSubstr("damaged"), HasSubstr("broken"))))
            << nth;
      }
      const auto root = OpenForWriting(directory.path());
      ASSERT_TRUE(RemoveLeftovers(*root, Unsynced())) << nth;
      (void)Retire(*root, "step-00000001", Unsynced());
      EXPECT_THAT(
          Listing(directory.path()),
          ::testing::AnyOf(ElementsAre("2 step-00000002 complete"),
                           // Killed between the last file and the directory.
                           ElementsAre("2 step-00000002 complete", "- step-00000001 foreign")))
          << nth;
    }
  }
}

TEST_F(Retention, APowerCutAtAnyMomentLeavesNoHalfCheckpointThatCounts) {
  const testing::Seed seed;
  testing::Random random(seed.value());
  const auto root = OpenForWriting(directory_.path());
  testing::TreeCrashModel model(directory_.path());
  const testing::TreeRecorder recorder(Unsynced());
  ASSERT_TRUE(Retire(*root, "step-00000001", recorder));
  const auto operations = recorder.operations();
  using Fate = testing::TreeCrashModel::Fate;
  for (std::size_t prefix = 0; prefix <= operations.size(); ++prefix) {
    if (prefix > 0) model.Apply(operations[prefix - 1]);
    for (const Fate fate : {Fate::kLoseAll, Fate::kKeepAll, Fate::kRandom, Fate::kRandom,
                            Fate::kRandom, Fate::kRandom, Fate::kRandom, Fate::kRandom}) {
      const TemporaryDirectory crashed;
      model.Crash(fate, fate, random, crashed.path());
      const auto listing = Listing(crashed.path());
      ASSERT_EQ(NewestStep(crashed.path()), 3U);
      for (const std::string& line : listing) {
        ASSERT_THAT(line,
                    ::testing::Not(::testing::AnyOf(HasSubstr("damaged"), HasSubstr("broken"))))
            << "after " << prefix << " operations";
      }
      const auto again = OpenForWriting(crashed.path());
      ASSERT_TRUE(RemoveLeftovers(*again, Unsynced()));
      ASSERT_EQ(NewestStep(crashed.path()), 3U);
      ASSERT_FALSE(fs::exists(crashed / "step-00000001/state.pt") &&
                   !fs::exists(crashed / "step-00000001/manifest.json"))
          << "data stay for ever after " << prefix << " operations";
    }
  }
}

}  // namespace
}  // namespace fastpersist::commit
