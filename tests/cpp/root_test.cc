// SPDX-License-Identifier: Apache-2.0
// A root: made, opened, moved; one writer at a time, whom a forked child does not keep alive.
#include "commit/root.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <string>

#include "testing/checkpoint_directory.h"
#include "testing/child_process.h"
#include "testing/faulty_files.h"
#include "testing/temporary_directory.h"

namespace fastpersist::commit {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::OpenForWriting;
using testing::Operation;
using testing::ReadFile;
using testing::TemporaryDirectory;
using testing::WriteFile;
using Access = Root::Access;

TEST(RootTest, WritingMakesTheDirectoryWithItsParentsAndAnId) {
  const TemporaryDirectory directory;
  const std::string path = directory / "a/b/c/";
  const auto root = OpenForWriting(path);
  EXPECT_EQ(root->path(), path);
  EXPECT_EQ(root->id().size(), 32U);
  EXPECT_NE(root->job(), root->id());
  EXPECT_TRUE(root->locked());
  EXPECT_THAT(root->lock_warning(), IsEmpty());
  EXPECT_TRUE(std::filesystem::exists(path + kRootName));
}

TEST(RootTest, EveryNameThatIsMadeIsSyncedWhereItLies) {
  const TemporaryDirectory directory;
  const testing::FaultyFiles files({});
  ASSERT_TRUE(Root::Open(directory / "a/b", Access::kWrite, files));
  EXPECT_EQ(files.calls(Operation::Kind::kMakeDirectory), 2U);
  EXPECT_EQ(files.calls(Operation::Kind::kSyncDirectory), 3U) << "two parents and the root itself";
}

TEST(RootTest, TheIdStaysWhenTheDirectoryIsOpenedAgainOrMoved) {
  const TemporaryDirectory directory;
  const std::string id = OpenForWriting(directory / "a")->id();
  std::filesystem::rename(directory / "a", directory / "b");
  EXPECT_EQ(OpenForWriting(directory / "b")->id(), id);
  EXPECT_EQ((*Root::Open(directory / "b", Access::kRead))->id(), id);
  EXPECT_NE(OpenForWriting(directory / "a")->id(), id);
}

TEST(RootTest, ReadingChangesNothing) {
  const TemporaryDirectory directory;
  const auto root = Root::Open(directory.path(), Access::kRead);
  ASSERT_TRUE(root);
  EXPECT_THAT((*root)->id(), IsEmpty());
  EXPECT_FALSE((*root)->locked());
  EXPECT_THAT(directory.names(), IsEmpty());
  const auto missing = Root::Open(directory / "missing", Access::kRead);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(directory.names(), IsEmpty());
}

TEST(RootTest, AFileIsNoDirectory) {
  const TemporaryDirectory directory;
  WriteFile(directory / "file", "x");
  for (const Access access : {Access::kRead, Access::kWrite}) {
    const auto root = Root::Open(directory / "file", access);
    ASSERT_FALSE(root);
    EXPECT_EQ(root.error().code, ErrorCode::kStorage);
    EXPECT_EQ(root.error().system_errno, ENOTDIR);
  }
}

TEST(RootTest, ASecondWriterIsToldWhoIsFirst) {
  const TemporaryDirectory directory;
  const auto first = OpenForWriting(directory.path());
  const auto second = Root::Open(directory.path(), Access::kWrite);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kStorage);
  EXPECT_EQ(second.error().system_errno, EAGAIN);
  EXPECT_THAT(second.error().detail, HasSubstr("this process"));
  EXPECT_TRUE(Root::Open(directory.path(), Access::kRead)) << "reading is always possible";
  // The text is only as true as what the holder wrote.
  for (const char* text : {"", "garbage", "[]", R"({"pid": "x"})", R"({"pid": -1})"}) {
    WriteFile(directory / kLockName, text);
    EXPECT_THAT(Root::Open(directory.path(), Access::kWrite).error().detail,
                HasSubstr("another process"));
  }
}

// arguments: path.
const testing::RegisterRole kWriter("opens a root for writing", [](const auto& arguments) {
  const auto root = Root::Open(arguments.at(0), Access::kWrite);
  testing::Report(root ? "opened" : root.error().Message());
  if (!root) return 1;
  ::pause();
  return 0;
});

TEST(RootTest, AWriterInAnotherProcessIsNamedAndItsDeathGivesTheLockUp) {
  const TemporaryDirectory directory;
  testing::ChildProcess child("opens a root for writing", {directory.path()});
  child.WaitForReport();
  const auto refused = Root::Open(directory.path(), Access::kWrite);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().Message(), ::testing::ContainsRegex("process [0-9]+ on .+ since 20"));
  child.Kill();
  EXPECT_EQ(child.Wait().report, "opened\n");
  EXPECT_TRUE(Root::Open(directory.path(), Access::kWrite));
}

TEST(RootTest, AForkedChildKeepsNoLock) {
  const TemporaryDirectory directory;
  auto root = OpenForWriting(directory.path());
  std::array<int, 2> born{};  // the child says that it runs
  std::array<int, 2> hold{};  // it lives until the parent closes its end
  ASSERT_EQ(::pipe(born.data()), 0);
  ASSERT_EQ(::pipe(hold.data()), 0);
  char byte = 0;
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(hold[1]);
    // Under the number that the lock had; letting go of the root must not close it.
    const int other = ::fcntl(hold[0], F_DUPFD_CLOEXEC, 0);
    (void)!::write(born[1], "x", 1);
    (void)!::read(hold[0], &byte, 1);
    root.reset();
    ::_exit(::fcntl(other, F_GETFD) < 0 ? 1 : 0);
  }
  ASSERT_EQ(::read(born[0], &byte, 1), 1);
  root.reset();
  EXPECT_TRUE(Root::Open(directory.path(), Access::kWrite)) << "the child is alive";
  for (const int fd : {hold[0], hold[1], born[0], born[1]}) ::close(fd);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(RootTest, WhereThereAreNoLocksWritingGoesOnWithAWarning) {
  for (const int system_errno : {ENOLCK, EOPNOTSUPP, ENOSYS, EINVAL}) {
    const TemporaryDirectory directory;
    const testing::FaultyFiles files(
        {{.kind = Operation::Kind::kTryLock, .system_errno = system_errno}});
    const auto root = Root::Open(directory.path(), Access::kWrite, files);
    ASSERT_TRUE(root);
    EXPECT_FALSE((*root)->locked());
    EXPECT_THAT((*root)->lock_warning(), HasSubstr("no locks"));
    EXPECT_EQ((*root)->id().size(), 32U);
  }
  const TemporaryDirectory directory;
  const testing::FaultyFiles files({{.kind = Operation::Kind::kTryLock, .system_errno = EIO}});
  EXPECT_FALSE(Root::Open(directory.path(), Access::kWrite, files)) << "no answer is no permission";
}

TEST(RootTest, ATornIdIsMadeAnewAndAStrangeOneIsNot) {
  const TemporaryDirectory directory;
  for (const std::string& torn : {std::string(), std::string(60, '\0')}) {
    WriteFile(directory / kRootName, torn);
    EXPECT_THAT((*Root::Open(directory.path(), Access::kRead))->id(), IsEmpty());
    EXPECT_EQ(OpenForWriting(directory.path())->id().size(), 32U);
  }
  for (const char* strange : {"hello", "{}", R"({"root": "zz"})", R"({"root": 3})"}) {
    WriteFile(directory / kRootName, strange);
    const auto root = Root::Open(directory.path(), Access::kWrite);
    ASSERT_FALSE(root);
    EXPECT_EQ(root.error().code, ErrorCode::kCorrupt);
    EXPECT_EQ(ReadFile(directory / kRootName), strange);
  }
}

TEST(RootTest, AFailureOfAnyCallIsReportedAndTheNextAttemptWorks) {
  unsigned failures = 0;
  for (unsigned nth = 1;; ++nth) {
    const TemporaryDirectory directory;
    const testing::FailingCall files(nth, EIO, /*from_then_on=*/false, testing::Unsynced());
    const auto root = Root::Open(directory / "a/b", Access::kWrite, files);
    if (!files.failed()) {
      ASSERT_TRUE(root);
      break;
    }
    ASSERT_FALSE(root) << "call " << nth << " failed in silence";
    EXPECT_EQ(root.error().system_errno, EIO);
    EXPECT_EQ(OpenForWriting(directory / "a/b")->id().size(), 32U) << nth;
    ++failures;
  }
  EXPECT_GT(failures, 10U);
}

}  // namespace
}  // namespace fastpersist::commit
