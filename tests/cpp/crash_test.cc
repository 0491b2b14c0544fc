// SPDX-License-Identifier: Apache-2.0
// Power may fail at any moment of a save. Real saves are recorded, every prefix of the record is
// replayed into a model of a file system that forgets whatever was not synced, and the name must
// lead to the complete old file or the complete new one. Wrong orders show that the checks can
// fail.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "testing/crash_model.h"
#include "testing/faulty_files.h"
#include "testing/limited_files.h"
#include "testing/recording_engine.h"
#include "testing/recording_files.h"
#include "testing/save_content.h"
#include "testing/temporary_directory.h"

namespace fastpersist::checkpoint {
namespace {

using ::testing::Contains;
using testing::CrashDamage;
using testing::FileFault;
using testing::GenerationFile;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Operation;
using testing::ProtocolViolations;
using testing::TemporaryDirectory;
using testing::WriteFile;
using Kind = Operation::Kind;
using OperationList = std::vector<Operation>;

constexpr std::size_t kSize = 100'000;
constexpr const char* kName = "model.pt";

struct Recording {
  OperationList trace;
  bool saved = false;
};

// Records one real save, in which files fail by the script.
Recording Record(const std::optional<std::string>& old, const std::string& content,
                 const Options& options, const std::vector<FileFault>& faults = {}) {
  const TemporaryDirectory directory;
  if (old) WriteFile(directory / kName, *old);
  testing::OperationTrace trace;
  // Blocks of 4 KiB, so that the padding of the last one is there to be cut off.
  const testing::LimitedFiles limited({.memory_align = 512, .offset_align = 4096});
  const testing::FaultyFiles faulty(faults, limited);
  const testing::RecordingFiles files(trace, faulty);
  const auto saved =
      testing::SaveContent(content, directory / kName, options,
                           {.files = &files, .make_engine = testing::RecordingFactory(trace)});
  if (saved) trace.Add({.kind = Kind::kReportSuccess});
  return {.trace = trace.operations(), .saved = saved.has_value()};
}

Options SmallBlocks(Engine engine) {
  return {.engine = engine, .block_bytes = 16384, .queue_depth = 3};
}

TEST(CrashTest, EveryEngineSurvivesACrashAtEveryPoint) {
  const testing::Seed seed;
  const std::string saved = GenerationFile(2, kSize);
  for (const Engine engine : {Engine::kUring, Engine::kLibaio, Engine::kThreads}) {
    for (const auto& old :
         {std::optional<std::string>(), std::optional(GenerationFile(1, kSize))}) {
      const Recording recording = Record(old, saved, SmallBlocks(engine));
      ASSERT_TRUE(recording.saved);
      EXPECT_THAT(ProtocolViolations(recording.trace, kName), IsEmpty());
      EXPECT_THAT(CrashDamage(recording.trace,
                              {.name = kName, .old = old, .saved = saved, .seed = seed.value()}),
                  IsEmpty())
          << Describe(recording.trace);
    }
  }
}

TEST(CrashTest, TheRecordHoldsEveryByteOfTheFile) {
  // Otherwise the model would judge something else than what was written.
  const std::string saved = GenerationFile(2, kSize);
  const Recording recording = Record(std::nullopt, saved, SmallBlocks(Engine::kThreads));
  testing::CrashModel model({});
  for (const Operation& operation : recording.trace) model.Apply(operation);
  const testing::Seed seed;
  testing::Random random(seed.value());
  EXPECT_EQ(model.pending_names(), 0U) << "all names are durable at the end";
  const auto directory = model.Crash(0, testing::CrashModel::Data::kLoseAll, random);
  ASSERT_EQ(directory.size(), 1U);
  EXPECT_TRUE(directory.at(kName) == saved);
}

TEST(CrashTest, FailuresAndRetriesSurviveACrashAtEveryPoint) {
  const testing::Seed seed;
  const std::string old = GenerationFile(1, kSize);
  const std::string saved = GenerationFile(2, kSize);
  const FileFault faults[] = {
      {.kind = Kind::kPreallocate, .system_errno = ENOSPC},
      {.kind = Kind::kPreallocate, .system_errno = EOPNOTSUPP},
      {.kind = Kind::kTruncate, .system_errno = EIO},
      {.kind = Kind::kSyncData, .system_errno = EIO},
      {.kind = Kind::kFlushAsClose, .system_errno = EIO},
      {.kind = Kind::kRename, .system_errno = EIO},
      {.kind = Kind::kUnlink, .system_errno = EIO},
      {.kind = Kind::kSyncDirectory, .system_errno = EIO},
  };
  for (const FileFault& fault : faults) {
    for (const std::uint32_t retries : {0U, 1U}) {
      Options options = SmallBlocks(Engine::kThreads);
      options.retries = retries;
      const Recording recording = Record(old, saved, options, {fault});
      EXPECT_THAT(ProtocolViolations(recording.trace, kName), IsEmpty());
      EXPECT_THAT(CrashDamage(recording.trace,
                              {.name = kName, .old = old, .saved = saved, .seed = seed.value()}),
                  IsEmpty())
          << Describe(recording.trace);
    }
  }
}

TEST(CrashTest, WithoutSyncTheOldOrTheNewFileIsNotPromised) {
  // sync=false gives durability up, and the model shows what that means.
  const testing::Seed seed;
  const std::string old = GenerationFile(1, kSize);
  const std::string saved = GenerationFile(2, kSize);
  Options options = SmallBlocks(Engine::kThreads);
  options.sync = false;
  const Recording recording = Record(old, saved, options);
  EXPECT_THAT(CrashDamage(recording.trace,
                          {.name = kName, .old = old, .saved = saved, .seed = seed.value()}),
              Contains(HasSubstr("a damaged file")));
}

// Edits of a good trace that make it a bad one.

OperationList::iterator Find(OperationList& trace, Kind kind) {
  const auto found = std::ranges::find(trace, kind, &Operation::kind);
  EXPECT_NE(found, trace.end());
  return found;
}

OperationList::iterator FindLast(OperationList& trace, Kind kind) {
  const auto found = std::ranges::find(trace.rbegin(), trace.rend(), kind, &Operation::kind);
  EXPECT_NE(found, trace.rend());
  return std::prev(found.base());
}

void Remove(OperationList& trace, Kind kind) { trace.erase(Find(trace, kind)); }

void MoveBefore(OperationList& trace, Kind what, Kind where) {
  const Operation moved = *FindLast(trace, what);
  trace.erase(FindLast(trace, what));
  trace.insert(Find(trace, where), moved);
}

void MoveAfter(OperationList& trace, Kind what, Kind where) {
  const Operation moved = *FindLast(trace, what);
  trace.erase(FindLast(trace, what));
  trace.insert(std::next(Find(trace, where)), moved);
}

struct WrongOrder {
  const char* name;
  std::function<void(OperationList& trace)> make;
  const char* violation;
};

class WrongOrderTest : public ::testing::TestWithParam<WrongOrder> {};

TEST_P(WrongOrderTest, IsCaughtByTheOrderCheckAndByItsDamage) {
  const testing::Seed seed;
  const std::string old = GenerationFile(1, kSize);
  const std::string saved = GenerationFile(2, kSize);
  OperationList trace = Record(old, saved, SmallBlocks(Engine::kThreads)).trace;
  GetParam().make(trace);
  EXPECT_THAT(ProtocolViolations(trace, kName), Contains(HasSubstr(GetParam().violation)));
  EXPECT_FALSE(
      CrashDamage(trace, {.name = kName, .old = old, .saved = saved, .seed = seed.value()}).empty())
      << Describe(trace);
}

const WrongOrder kWrongOrders[] = {
    {"NoSyncOfTheData", [](OperationList& trace) { Remove(trace, Kind::kSyncData); },
     "before the data was synced"},
    {"RenameBeforeTheSyncOfTheData",
     [](OperationList& trace) { MoveBefore(trace, Kind::kRename, Kind::kSyncData); },
     "before the data was synced"},
    {"NoSyncOfTheDirectory", [](OperationList& trace) { Remove(trace, Kind::kSyncDirectory); },
     "before the directory was synced"},
    {"SuccessBeforeTheSyncOfTheDirectory",
     [](OperationList& trace) { MoveBefore(trace, Kind::kReportSuccess, Kind::kSyncDirectory); },
     "before the directory was synced"},
    {"SyncOfTheDirectoryBeforeTheRename",
     [](OperationList& trace) { MoveBefore(trace, Kind::kSyncDirectory, Kind::kRename); },
     "before the directory was synced"},
    {"NoTruncation", [](OperationList& trace) { Remove(trace, Kind::kTruncate); },
     "before the truncation"},
    {"TruncationAfterTheSync",
     [](OperationList& trace) { MoveAfter(trace, Kind::kTruncate, Kind::kSyncData); },
     "before the data was synced"},
    {"AWriteInFlightAtTheSync",
     [](OperationList& trace) { MoveAfter(trace, Kind::kCompleteWrite, Kind::kSyncData); },
     "with writes in flight"},
    {"AWriteAfterTheSync",
     [](OperationList& trace) {
       MoveAfter(trace, Kind::kCompleteWrite, Kind::kSyncData);
       MoveAfter(trace, Kind::kSubmitWrite, Kind::kSyncData);
     },
     "before the data was synced"},
    {"UnlinkThenRename",
     [](OperationList& trace) {
       const auto rename = Find(trace, Kind::kRename);
       trace.insert(rename, {.kind = Kind::kUnlink, .fd = rename->fd, .name = kName});
     },
     "the target was unlinked"},
    {"AFailedSyncThatIsRepeated",
     [](OperationList& trace) {
       Operation failed = *Find(trace, Kind::kSyncData);
       failed.result = -EIO;
       trace.insert(Find(trace, Kind::kSyncData), failed);
     },
     "a failed sync was repeated"},
};

INSTANTIATE_TEST_SUITE_P(Canaries, WrongOrderTest, ::testing::ValuesIn(kWrongOrders),
                         [](const auto& order) { return std::string(order.param.name); });

}  // namespace
}  // namespace fastpersist::checkpoint
