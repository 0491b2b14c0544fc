// SPDX-License-Identifier: Apache-2.0
// Every file operation of a save fails once, in every way that matters: nothing is lost, nothing is
// left behind, the error says what to do, and the next save works.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include "testing/faulty_files.h"
#include "testing/process_state.h"
#include "testing/recording_files.h"
#include "testing/save_content.h"
#include "testing/temporary_directory.h"

namespace fastpersist::checkpoint {
namespace {

using ::testing::ElementsAre;
using testing::FaultyFiles;
using testing::GenerationFile;
using ::testing::HasSubstr;
using testing::Operation;
using testing::ReadFile;
using ::testing::SizeIs;
using testing::TemporaryDirectory;
using testing::WriteFile;
using Kind = Operation::Kind;

constexpr std::size_t kSize = 300'000;

Result<SaveInfo> Save(const std::string& content, const std::string& path, const Options& options,
                      const file::FileOps& files) {
  return testing::SaveContent(content, path, options, {.files = &files});
}

struct Case {
  Kind kind;
  int system_errno;
  const char* operation;  ///< Error::operation.
  const char* advice;     ///< What the advice must mention.
  bool may_pass = false;  ///< A second attempt is made when retries allow one.
};

const Case kFatal[] = {
    {Kind::kOpenDirectory, EMFILE, "open directory", "ulimit -n"},
    {Kind::kOpenDirectory, ENFILE, "open directory", "too many files"},
    {Kind::kOpenDirectory, EIO, "open directory", "kernel log"},
    {Kind::kStatLink, EIO, "look at", "kernel log"},
    {Kind::kStatLink, EACCES, "look at", "permissions"},
    {Kind::kCreateTemporary, EACCES, "create a temporary file", "atomic=False"},
    {Kind::kCreateTemporary, EROFS, "create a temporary file", "atomic=False"},
    {Kind::kCreateTemporary, EMFILE, "create a temporary file", "ulimit -n"},
    {Kind::kCreateTemporary, ENOSPC, "create a temporary file", "free space", true},
    {Kind::kCreateTemporary, EDQUOT, "create a temporary file", "quota", true},
    {Kind::kCreateTemporary, EIO, "create a temporary file", "kernel log", true},
    {Kind::kChangeMode, EPERM, "change the mode", "permissions"},
    {Kind::kPreallocate, ENOSPC, "preallocate", "free space", true},
    {Kind::kPreallocate, EDQUOT, "preallocate", "quota", true},
    {Kind::kPreallocate, EFBIG, "preallocate", "ulimit -f"},
    {Kind::kPreallocate, EIO, "preallocate", "kernel log", true},
    {Kind::kTruncate, EIO, "truncate", "kernel log", true},
    {Kind::kSyncData, EIO, "fdatasync", "kernel log", true},
    {Kind::kSyncData, ENOSPC, "fdatasync", "free space", true},
    {Kind::kSyncData, EDQUOT, "fdatasync", "quota", true},
    {Kind::kFlushAsClose, EIO, "close", "kernel log", true},
    {Kind::kFlushAsClose, ENOSPC, "close", "free space", true},
    {Kind::kRename, EIO, "rename", "kernel log", true},
    {Kind::kRename, EBUSY, "rename", "atomic=False"},
    {Kind::kRename, EACCES, "rename", "permissions"},
    {Kind::kRename, ENOSPC, "rename", "free space", true},
};

// Before and after are compared: whatever happens in between leaves no trace.
class SingleFaultTest : public ::testing::Test {
 protected:
  SingleFaultTest() {
    WriteFile(path_, old_, 0640);
    // The first save keeps staging memory and opens what stays open.
    EXPECT_TRUE(Save("warm-up", directory_ / "warm-up", {}, file::RealFileOps()));
    std::filesystem::remove(directory_ / "warm-up");
    descriptors_ = testing::OpenFiles();
  }

  void ExpectUntouched() const {
    EXPECT_TRUE(ReadFile(path_) == old_) << "the old file is bit-identical";
    EXPECT_EQ(testing::ModeOf(path_), 0640U);
    ExpectClean();
  }

  void ExpectClean() const {
    EXPECT_THAT(directory_.names(), ElementsAre("model.pt")) << "no temporary file stays";
    EXPECT_EQ(testing::OpenFiles(), descriptors_);
  }

  void ExpectNextSaveWorks() const {
    const auto saved = Save(new_, path_, {}, file::RealFileOps());
    ASSERT_TRUE(saved) << saved.error().Message();
    EXPECT_TRUE(ReadFile(path_) == new_);
    ExpectClean();
  }

  const TemporaryDirectory directory_;
  const std::string path_ = directory_ / "model.pt";
  const std::string old_ = GenerationFile(1, kSize);
  const std::string new_ = GenerationFile(2, kSize);
  std::vector<std::string> descriptors_;
};

class StorageFaultsTest : public SingleFaultTest, public ::testing::WithParamInterface<Case> {};

TEST_P(StorageFaultsTest, WithoutRetriesTheFirstFailureIsReportedAndNothingIsLost) {
  const Case& fault = GetParam();
  const FaultyFiles files({{.kind = fault.kind, .system_errno = fault.system_errno}});
  const auto saved = Save(new_, path_, {.retries = 0}, files);
  ASSERT_FALSE(saved);
  EXPECT_EQ(saved.error().code, ErrorCode::kStorage);
  EXPECT_EQ(saved.error().operation, fault.operation);
  EXPECT_EQ(saved.error().path, path_);
  EXPECT_EQ(saved.error().system_errno, fault.system_errno);
  EXPECT_THAT(saved.error().advice, HasSubstr(fault.advice));
  EXPECT_THAT(saved.error().Message(), HasSubstr(path_));
  ExpectUntouched();
  ExpectNextSaveWorks();
}

TEST_P(StorageFaultsTest, WithOneRetryWhatPassesByItselfIsOvercomeOnANewFile) {
  const Case& fault = GetParam();
  testing::OperationTrace trace;
  const FaultyFiles faulty({{.kind = fault.kind, .system_errno = fault.system_errno}});
  const testing::RecordingFiles files(trace, faulty);
  const auto saved = Save(new_, path_, {.retries = 1}, files);
  ASSERT_EQ(saved.has_value(), fault.may_pass);
  if (!fault.may_pass) {
    ExpectUntouched();
    return;
  }
  EXPECT_TRUE(ReadFile(path_) == new_);
  EXPECT_EQ(testing::ModeOf(path_), 0640U);
  ExpectClean();
  std::vector<std::string> tried;
  for (const Operation& operation : trace.operations()) {
    if (operation.kind == Kind::kCreateTemporary) tried.push_back(operation.name);
  }
  ASSERT_THAT(tried, SizeIs(2));
  EXPECT_NE(tried[0], tried[1]) << "the second attempt never touches the first one's file";
}

TEST_P(StorageFaultsTest, AFailureThatStaysIsReportedAfterTheRetries) {
  const Case& fault = GetParam();
  const FaultyFiles files(
      {{.kind = fault.kind, .system_errno = fault.system_errno, .from_then_on = true}});
  const auto saved = Save(new_, path_, {.retries = 1}, files);
  ASSERT_FALSE(saved);
  EXPECT_EQ(saved.error().system_errno, fault.system_errno);
  EXPECT_EQ(files.calls(fault.kind), fault.may_pass ? 2U : 1U);
  ExpectUntouched();
  ExpectNextSaveWorks();
}

std::string CaseName(const ::testing::TestParamInfo<Case>& info) {
  std::string name;
  for (const char c : fmt::format("{} errno {}", testing::OperationName(info.param.kind),
                                  info.param.system_errno)) {
    name += c == ' ' ? '_' : c;
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(EveryOperation, StorageFaultsTest, ::testing::ValuesIn(kFatal), CaseName);

class StorageFaultsToleratedTest : public StorageFaultsTest {};

// What a save must survive without failing.
const Case kTolerated[] = {
    {Kind::kTryLock, ENOLCK, "", ""},
    {Kind::kTryLock, EOPNOTSUPP, "", ""},
    {Kind::kChangeGroup, EPERM, "", ""},
    {Kind::kPreallocate, EOPNOTSUPP, "", ""},
    {Kind::kPreallocate, ENOSYS, "", ""},
    {Kind::kSetDirect, EINVAL, "", "direct"},
    {Kind::kSetDirect, EOPNOTSUPP, "", "direct"},
    {Kind::kSyncDirectory, EINVAL, "", "cannot be synced"},
    {Kind::kSyncDirectory, EOPNOTSUPP, "", "cannot be synced"},
};

TEST_P(StorageFaultsToleratedTest, TheSaveGoesOnAndSaysWhatIsWorthSaying) {
  const Case& fault = GetParam();
  const FaultyFiles files(
      {{.kind = fault.kind, .system_errno = fault.system_errno, .from_then_on = true}});
  const auto saved = Save(new_, path_, {.retries = 0}, files);
  ASSERT_TRUE(saved) << saved.error().Message();
  EXPECT_GE(files.calls(fault.kind), 1U);
  EXPECT_TRUE(ReadFile(path_) == new_);
  EXPECT_THAT(saved->warning, HasSubstr(fault.advice));
  ExpectClean();
}

INSTANTIATE_TEST_SUITE_P(EveryOperation, StorageFaultsToleratedTest,
                         ::testing::ValuesIn(kTolerated), CaseName);

TEST_F(SingleFaultTest, ADirectoryThatCannotBeSyncedLeavesTheNewFileInPlace) {
  const FaultyFiles files(
      {{.kind = Kind::kSyncDirectory, .system_errno = EIO, .from_then_on = true}});
  const auto saved = Save(new_, path_, {.retries = 1}, files);
  ASSERT_FALSE(saved);
  EXPECT_EQ(saved.error().operation, "sync the directory");
  EXPECT_THAT(saved.error().Message(), HasSubstr("the new file is in place"));
  EXPECT_EQ(files.calls(Kind::kSyncDirectory), 1U) << "a failed sync is not repeated";
  EXPECT_TRUE(ReadFile(path_) == new_);
  ExpectClean();
}

TEST_F(SingleFaultTest, ADirectoryThatMayNotBeListedIsGoodEnough) {
  const FaultyFiles once({{.kind = Kind::kOpenDirectory, .system_errno = EACCES}});
  const auto saved = Save(new_, path_, {}, once);
  ASSERT_TRUE(saved) << saved.error().Message();
  EXPECT_TRUE(ReadFile(path_) == new_);
  EXPECT_THAT(saved->warning, HasSubstr("cannot be synced"));
  ExpectClean();

  const FaultyFiles always(
      {{.kind = Kind::kOpenDirectory, .system_errno = EACCES, .from_then_on = true}});
  const auto refused = Save(old_, path_, {}, always);
  ASSERT_FALSE(refused) << "one that may not be entered is not";
  EXPECT_EQ(refused.error().operation, "open directory");
  EXPECT_THAT(refused.error().advice, HasSubstr("permissions"));
}

TEST_F(SingleFaultTest, AFailedSyncIsNeverRepeatedOnTheSameFile) {
  testing::OperationTrace trace;
  const FaultyFiles faulty({{.kind = Kind::kSyncData, .system_errno = EIO}});
  const testing::RecordingFiles files(trace, faulty);
  ASSERT_TRUE(Save(new_, path_, {.retries = 3}, files));
  std::vector<int> synced;
  for (const Operation& operation : trace.operations()) {
    if (operation.kind == Kind::kSyncData) synced.push_back(operation.file);
  }
  ASSERT_THAT(synced, SizeIs(2));
  EXPECT_NE(synced[0], synced[1]);
}

TEST_F(SingleFaultTest, InPlaceAFailedSyncIsFinal) {
  const FaultyFiles files({{.kind = Kind::kSyncData, .system_errno = EIO}});
  const auto saved = Save(new_, path_, {.atomic = false, .retries = 3}, files);
  ASSERT_FALSE(saved) << "there is no other file to write to";
  EXPECT_EQ(saved.error().operation, "fdatasync");
  EXPECT_EQ(files.calls(Kind::kSyncData), 1U);
}

TEST_F(SingleFaultTest, AsManyAttemptsAreMadeAsAllowed) {
  for (const std::uint32_t retries : {0U, 1U, 4U}) {
    const FaultyFiles files(
        {{.kind = Kind::kPreallocate, .system_errno = ENOSPC, .from_then_on = true}});
    EXPECT_FALSE(Save(new_, path_, {.retries = retries}, files));
    EXPECT_EQ(files.calls(Kind::kPreallocate), retries + 1);
    ExpectUntouched();
  }
}

TEST_F(SingleFaultTest, ATemporaryThatCannotBeRemovedDoesNotHideTheError) {
  const FaultyFiles files({{.kind = Kind::kPreallocate, .system_errno = ENOSPC},
                           {.kind = Kind::kUnlink, .system_errno = EIO}});
  const auto saved = Save(new_, path_, {.retries = 0}, files);
  ASSERT_FALSE(saved);
  EXPECT_EQ(saved.error().operation, "preallocate");
  EXPECT_THAT(directory_.temporaries(), SizeIs(1));
  ExpectNextSaveWorks();
}

TEST_F(SingleFaultTest, WarningsOfTheFileAndOfTheDirectoryAreBothKept) {
  const FaultyFiles files(
      {{.kind = Kind::kSetDirect, .system_errno = EINVAL, .from_then_on = true},
       {.kind = Kind::kSyncDirectory, .system_errno = EINVAL, .from_then_on = true}});
  const auto saved = Save(new_, path_, {}, files);
  ASSERT_TRUE(saved);
  EXPECT_THAT(saved->warning, HasSubstr("no direct I/O"));
  EXPECT_THAT(saved->warning, HasSubstr("cannot be synced"));
}

}  // namespace
}  // namespace fastpersist::checkpoint
