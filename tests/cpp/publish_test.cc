// SPDX-License-Identifier: Apache-2.0
#include "commit/publish.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "commit/temporary.h"
#include "testing/faulty_files.h"
#include "testing/process_state.h"
#include "testing/recording_files.h"
#include "testing/temporary_directory.h"

namespace fastpersist::commit {
namespace {

using ::testing::ElementsAre;
using testing::FaultyFiles;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Operation;
using testing::ReadFile;
using ::testing::SizeIs;
using testing::TemporaryDirectory;
using testing::WriteFile;
using Kind = Operation::Kind;

constexpr std::string_view kNew = "the new content";

void WriteThrough(const Publication& publication, std::string_view content) {
  ASSERT_EQ(::pwrite(publication.fd(), content.data(), content.size(), 0),
            static_cast<ssize_t>(content.size()));
}

// All steps of publish.h in order, as a save takes them.
Result<std::string> PublishNew(const std::string& path, const Options& options,
                               const file::FileOps& files) {
  const auto target = ResolveTarget(path, files);
  if (!target) return std::unexpected(target.error());
  auto publication = Publication::Begin(*target, options, files);
  if (!publication) return std::unexpected(publication.error());
  if (auto done = publication->Preallocate(kNew.size(), 4096); !done) {
    return std::unexpected(done.error());
  }
  WriteThrough(*publication, kNew);
  if (auto done = publication->Seal(kNew.size()); !done) return std::unexpected(done.error());
  std::string warning;
  if (auto done = publication->Publish(warning); !done) return std::unexpected(done.error());
  return warning;
}

std::vector<Kind> KindsOf(const testing::OperationTrace& trace) {
  std::vector<Kind> kinds;
  for (const Operation& operation : trace.operations()) kinds.push_back(operation.kind);
  return kinds;
}

TEST(PublishTest, TheStepsAreTakenInTheirDocumentedOrder) {
  const TemporaryDirectory directory;
  WriteFile(directory / "model.pt", "old", 0640);
  WriteFile(directory / (TemporaryPrefix("model.pt") + "0000000000000000.tmp"), "left");
  testing::OperationTrace trace;
  const testing::RecordingFiles files(trace);
  EXPECT_TRUE(PublishNew(directory / "model.pt", {}, files));
  EXPECT_THAT(KindsOf(trace),
              ElementsAre(Kind::kOpenDirectory, Kind::kStatLink,                       // resolve
                          Kind::kOpenLeftover, Kind::kTryLock, Kind::kUnlink,          // 1
                          Kind::kCreateTemporary, Kind::kTryLock, Kind::kChangeGroup,  // 2
                          Kind::kChangeMode,                                           //
                          Kind::kPreallocate,                                          // 3
                          Kind::kTruncate, Kind::kSyncData, Kind::kFlushAsClose,       // 5 to 7
                          Kind::kRename, Kind::kSyncDirectory));                       // 8 and 9
  EXPECT_EQ(ReadFile(directory / "model.pt"), kNew);
  EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
}

TEST(PublishTest, WithoutSyncNothingIsSynced) {
  const TemporaryDirectory directory;
  testing::OperationTrace trace;
  const testing::RecordingFiles files(trace);
  EXPECT_TRUE(PublishNew(directory / "model.pt", {.sync = false}, files));
  for (const Kind kind : KindsOf(trace)) {
    EXPECT_NE(kind, Kind::kSyncData);
    EXPECT_NE(kind, Kind::kSyncDirectory);
  }
  EXPECT_EQ(ReadFile(directory / "model.pt"), kNew);
}

TEST(PublishTest, TheOldFileIsThereUntilTheRename) {
  const TemporaryDirectory directory;
  WriteFile(directory / "model.pt", "old");
  const auto target = ResolveTarget(directory / "model.pt", file::RealFileOps());
  ASSERT_TRUE(target);
  const Options options;
  auto publication = Publication::Begin(*target, options, file::RealFileOps());
  ASSERT_TRUE(publication);
  EXPECT_EQ(ReadFile(directory / "model.pt"), "old");
  ASSERT_TRUE(publication->Preallocate(kNew.size(), 4096));
  WriteThrough(*publication, kNew);
  EXPECT_EQ(ReadFile(directory / "model.pt"), "old");
  ASSERT_TRUE(publication->Seal(kNew.size()));
  EXPECT_EQ(ReadFile(directory / "model.pt"), "old");
  std::string warning;
  ASSERT_TRUE(publication->Publish(warning));
  EXPECT_EQ(ReadFile(directory / "model.pt"), kNew);
  EXPECT_THAT(warning, IsEmpty());
}

TEST(PublishTest, APublicationThatIsGivenUpLeavesNothing) {
  const TemporaryDirectory directory;
  const auto target = ResolveTarget(directory / "model.pt", file::RealFileOps());
  ASSERT_TRUE(target);
  const Options options;
  const auto descriptors = testing::OpenFiles();
  {
    auto publication = Publication::Begin(*target, options, file::RealFileOps());
    ASSERT_TRUE(publication);
    EXPECT_THAT(directory.temporaries(), SizeIs(1));
    const Publication moved(std::move(*publication));
    EXPECT_THAT(directory.temporaries(), SizeIs(1));
    EXPECT_GE(moved.fd(), 0);
  }
  EXPECT_THAT(directory.names(), IsEmpty());
  EXPECT_EQ(testing::OpenFiles(), descriptors);
}

TEST(PublishTest, ThePreallocationHasTheBlocksOfTheWholeFile) {
  const TemporaryDirectory directory;
  const auto target = ResolveTarget(directory / "model.pt", file::RealFileOps());
  ASSERT_TRUE(target);
  const Options options;
  auto publication = Publication::Begin(*target, options, file::RealFileOps());
  ASSERT_TRUE(publication);
  ASSERT_TRUE(publication->Preallocate(1'000'001, 1'003'520));
  struct stat info{};
  ASSERT_EQ(::fstat(publication->fd(), &info), 0);
  EXPECT_EQ(info.st_size, 1'003'520);
  EXPECT_GE(info.st_blocks * 512, 1'003'520);
}

TEST(PublishTest, AFileSystemThatCannotPreallocateGetsAHole) {
  for (const int error : {EOPNOTSUPP, ENOSYS}) {
    const TemporaryDirectory directory;
    testing::OperationTrace trace;
    const FaultyFiles faulty({{.kind = Kind::kPreallocate, .system_errno = error}});
    const testing::RecordingFiles files(trace, faulty);
    EXPECT_TRUE(PublishNew(directory / "model.pt", {}, files));
    EXPECT_EQ(ReadFile(directory / "model.pt"), kNew);
    std::vector<std::uint64_t> sizes;
    for (const Operation& operation : trace.operations()) {
      if (operation.kind == Kind::kTruncate) sizes.push_back(operation.size);
    }
    EXPECT_THAT(sizes, ElementsAre(4096U, kNew.size()));
  }
}

TEST(PublishTest, AFileWithoutBytesIsNotPreallocated) {
  const TemporaryDirectory directory;
  const FaultyFiles files({{.kind = Kind::kPreallocate, .system_errno = EINVAL}});
  const auto target = ResolveTarget(directory / "empty", files);
  ASSERT_TRUE(target);
  const Options options;
  auto publication = Publication::Begin(*target, options, files);
  ASSERT_TRUE(publication);
  EXPECT_TRUE(publication->Preallocate(0, 0));
  EXPECT_EQ(files.calls(Kind::kPreallocate), 0U);
}

TEST(PublishTest, ADirectoryThatCannotBeSyncedIsAWarning) {
  for (const int error : {EINVAL, EOPNOTSUPP}) {
    const TemporaryDirectory directory;
    const FaultyFiles files({{.kind = Kind::kSyncDirectory, .system_errno = error}});
    const auto warning = PublishNew(directory / "model.pt", {}, files);
    ASSERT_TRUE(warning);
    EXPECT_THAT(*warning, HasSubstr("cannot be synced"));
    EXPECT_EQ(ReadFile(directory / "model.pt"), kNew);
  }
}

TEST(PublishTest, ADirectoryWhoseSyncFailsIsReportedAsWhatItIs) {
  const TemporaryDirectory directory;
  WriteFile(directory / "model.pt", "old");
  const FaultyFiles files({{.kind = Kind::kSyncDirectory, .system_errno = EIO}});
  const auto published = PublishNew(directory / "model.pt", {}, files);
  ASSERT_FALSE(published);
  EXPECT_EQ(published.error().operation, "sync the directory");
  EXPECT_EQ(published.error().system_errno, EIO);
  EXPECT_THAT(published.error().Message(), HasSubstr("the new file is in place"));
  EXPECT_THAT(published.error().Message(), HasSubstr("durability is unknown"));
  EXPECT_EQ(ReadFile(directory / "model.pt"), kNew) << "and it is what is said";
  EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
}

TEST(PublishTest, ABusyTargetNamesTheWayInPlace) {
  const TemporaryDirectory directory;
  WriteFile(directory / "model.pt", "old");
  const FaultyFiles files({{.kind = Kind::kRename, .system_errno = EBUSY}});
  const auto published = PublishNew(directory / "model.pt", {}, files);
  ASSERT_FALSE(published);
  EXPECT_EQ(published.error().operation, "rename");
  EXPECT_THAT(published.error().advice, HasSubstr("atomic=False"));
  EXPECT_EQ(ReadFile(directory / "model.pt"), "old");
  EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
}

TEST(PublishTest, InPlaceALongerFileIsCutToTheNewSize) {
  const TemporaryDirectory directory;
  WriteFile(directory / "model.pt", std::string(100'000, 'o'), 0640);
  struct stat before{};
  ASSERT_EQ(::stat((directory / "model.pt").c_str(), &before), 0);
  testing::OperationTrace trace;
  const testing::RecordingFiles files(trace);
  EXPECT_TRUE(PublishNew(directory / "model.pt", {.atomic = false}, files));
  EXPECT_EQ(ReadFile(directory / "model.pt"), kNew);
  struct stat after{};
  ASSERT_EQ(::stat((directory / "model.pt").c_str(), &after), 0);
  EXPECT_EQ(after.st_ino, before.st_ino) << "the same file: hard links and watchers stay";
  EXPECT_EQ(after.st_mode, before.st_mode);
  EXPECT_THAT(KindsOf(trace), ElementsAre(Kind::kOpenDirectory, Kind::kStatLink, Kind::kOpenInPlace,
                                          Kind::kPreallocate, Kind::kTruncate, Kind::kSyncData,
                                          Kind::kFlushAsClose, Kind::kSyncDirectory));
}

TEST(PublishTest, InPlaceANewFileIsMadeWithTheUmask) {
  const TemporaryDirectory directory;
  const testing::ScopedUmask umask(0027);
  EXPECT_TRUE(PublishNew(directory / "model.pt", {.atomic = false}, file::RealFileOps()));
  EXPECT_EQ(ReadFile(directory / "model.pt"), kNew);
  EXPECT_EQ(testing::ModeOf(directory / "model.pt"), 0640U);
}

TEST(PublishTest, InPlaceALinkIsFollowed) {
  const TemporaryDirectory directory;
  WriteFile(directory / "real.pt", "old");
  ASSERT_EQ(::symlink("real.pt", (directory / "link.pt").c_str()), 0);
  EXPECT_TRUE(PublishNew(directory / "link.pt", {.atomic = false}, file::RealFileOps()));
  EXPECT_EQ(ReadFile(directory / "real.pt"), kNew);
  EXPECT_THAT(directory.names(), ElementsAre("link.pt", "real.pt"));
}

TEST(PublishTest, ASpecialFileIsNeitherCutNorPreallocatedNorRenamed) {
  testing::OperationTrace trace;
  const testing::RecordingFiles files(trace);
  EXPECT_TRUE(PublishNew("/dev/null", {}, files));
  EXPECT_THAT(KindsOf(trace), ElementsAre(Kind::kOpenDirectory, Kind::kStatLink, Kind::kOpenInPlace,
                                          Kind::kSyncData, Kind::kFlushAsClose));
}

TEST(PublishTest, ASpecialFileThatCannotBeSyncedIsNoFailureButABrokenOneIs) {
  for (const int error : {EINVAL, EROFS}) {
    const FaultyFiles files({{.kind = Kind::kSyncData, .system_errno = error}});
    EXPECT_TRUE(PublishNew("/dev/null", {}, files)) << error;
  }
  const FaultyFiles files({{.kind = Kind::kSyncData, .system_errno = EIO}});
  EXPECT_FALSE(PublishNew("/dev/null", {}, files));
}

TEST(PublishTest, ARegularFileThatCannotBeSyncedIsAFailure) {
  for (const int error : {EINVAL, EROFS, EIO, ENOSPC}) {
    const TemporaryDirectory directory;
    const FaultyFiles files({{.kind = Kind::kSyncData, .system_errno = error}});
    const auto published = PublishNew(directory / "model.pt", {}, files);
    ASSERT_FALSE(published) << error;
    EXPECT_EQ(published.error().operation, "fdatasync");
    EXPECT_EQ(published.error().system_errno, error);
  }
}

// A target in a directory of one's own.
Target FreshTarget(const TemporaryDirectory& directory) {
  auto target = ResolveTarget(directory / "state.pt", file::RealFileOps());
  target->fresh = true;
  return std::move(*target);
}

// As PublishNew, to a fresh target.
Result<void> PublishFresh(const Target& target, const file::FileOps& files) {
  const Options options;
  auto publication = Publication::Begin(target, options, files);
  if (!publication) return std::unexpected(publication.error());
  if (auto done = publication->Preallocate(kNew.size(), 4096); !done) return done;
  WriteThrough(*publication, kNew);
  if (auto done = publication->Seal(kNew.size()); !done) return done;
  std::string warning;
  return publication->Publish(warning);
}

TEST(PublishTest, AFreshTargetIsMadeUnderItsNameAndItsDirectoryIsTheOwners) {
  const TemporaryDirectory directory;
  const testing::ScopedUmask umask(0027);
  const Target target = FreshTarget(directory);
  testing::OperationTrace trace;
  const testing::RecordingFiles files(trace);
  EXPECT_TRUE(PublishFresh(target, files));
  EXPECT_THAT(KindsOf(trace), ElementsAre(Kind::kCreateTemporary, Kind::kPreallocate,
                                          Kind::kTruncate, Kind::kSyncData, Kind::kFlushAsClose));
  EXPECT_EQ(ReadFile(directory / "state.pt"), kNew);
  EXPECT_EQ(testing::ModeOf(directory / "state.pt"), 0640U);
}

TEST(PublishTest, AFreshTargetNeverReplacesOrFollowsWhatIsThere) {
  const TemporaryDirectory directory;
  const Target target = FreshTarget(directory);
  WriteFile(directory / "state.pt", "old");
  auto published = PublishFresh(target, file::RealFileOps());
  ASSERT_FALSE(published);
  EXPECT_EQ(published.error().system_errno, EEXIST);
  EXPECT_EQ(ReadFile(directory / "state.pt"), "old") << "nor is it removed";

  ASSERT_EQ(::rename((directory / "state.pt").c_str(), (directory / "other").c_str()), 0);
  ASSERT_EQ(::symlink("other", (directory / "state.pt").c_str()), 0);
  published = PublishFresh(target, file::RealFileOps());
  ASSERT_FALSE(published);
  EXPECT_EQ(ReadFile(directory / "other"), "old");
  EXPECT_THAT(directory.names(), ElementsAre("other", "state.pt"));
}

TEST(PublishTest, AFreshTargetThatFailsIsRemoved) {
  for (const Kind kind :
       {Kind::kPreallocate, Kind::kTruncate, Kind::kSyncData, Kind::kFlushAsClose}) {
    const TemporaryDirectory directory;
    const Target target = FreshTarget(directory);
    const FaultyFiles files({{.kind = kind, .system_errno = EIO}});
    EXPECT_FALSE(PublishFresh(target, files));
    EXPECT_THAT(directory.names(), IsEmpty());
    EXPECT_TRUE(PublishFresh(target, files)) << "the name is free for another attempt";
  }
}

}  // namespace
}  // namespace fastpersist::commit
