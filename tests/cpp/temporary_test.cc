// SPDX-License-Identifier: Apache-2.0
#include "commit/temporary.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "testing/child_process.h"
#include "testing/faulty_files.h"
#include "testing/process_state.h"
#include "testing/temporary_directory.h"

namespace fastpersist::commit {
namespace {

using ::testing::ElementsAre;
using testing::FaultyFiles;
using ::testing::HasSubstr;
using testing::ModeOf;
using ::testing::Not;
using testing::Operation;
using ::testing::SizeIs;
using testing::TemporaryDirectory;
using testing::WriteFile;

Target Resolved(const std::string& path) {
  auto target = ResolveTarget(path, file::RealFileOps());
  EXPECT_TRUE(target);
  return *std::move(target);
}

// A leftover of a killed save to model.pt.
std::string LeftoverName(char digit = '0') {
  return TemporaryPrefix("model.pt") + std::string(16, digit) + ".tmp";
}

TEST(TemporaryTest, TheNameHasItsDocumentedForm) {
  const TemporaryDirectory directory;
  const auto made = MakeTemporary(Resolved(directory / "model.pt"), file::RealFileOps());
  ASSERT_TRUE(made);
  EXPECT_TRUE(std::regex_match(made->name, std::regex("\\.fp-[0-9a-f]{16}-[0-9a-f]{16}\\.tmp")));
  EXPECT_TRUE(made->name.starts_with(TemporaryPrefix("model.pt")));
  EXPECT_THAT(directory.names(), ElementsAre(made->name));
}

TEST(TemporaryTest, ThePrefixIsStableAndDependsOnTheName) {
  // FNV-1a of "a", from its definition: leftovers of other versions must be recognised.
  EXPECT_EQ(TemporaryPrefix("a"), ".fp-af63dc4c8601ec8c-");
  EXPECT_NE(TemporaryPrefix("a"), TemporaryPrefix("b"));
  EXPECT_THAT(TemporaryPrefix(std::string(255, 'n')), SizeIs(21));
}

TEST(TemporaryTest, TwoTemporariesOfOneTargetDiffer) {
  const TemporaryDirectory directory;
  const Target target = Resolved(directory / "model.pt");
  const auto one = MakeTemporary(target, file::RealFileOps());
  const auto two = MakeTemporary(target, file::RealFileOps());
  ASSERT_TRUE(one);
  ASSERT_TRUE(two);
  EXPECT_NE(one->name, two->name);
  EXPECT_THAT(directory.names(), SizeIs(2));
}

TEST(TemporaryTest, ANewFileGetsTheModeThatTheUmaskLeaves) {
  const TemporaryDirectory directory;
  for (const mode_t mask : {0022U, 0027U, 0077U, 0000U}) {
    const testing::ScopedUmask umask(mask);
    const auto made = MakeTemporary(Resolved(directory / "model.pt"), file::RealFileOps());
    ASSERT_TRUE(made);
    EXPECT_EQ(ModeOf(directory / made->name), 0666U & ~mask);
  }
}

TEST(TemporaryTest, AReplacedFileGivesItsModeWhateverTheUmask) {
  const TemporaryDirectory directory;
  for (const mode_t mode : {0640U, 0600U, 0755U, 0666U, 0444U, 02664U}) {
    for (const mode_t mask : {0022U, 0077U}) {
      WriteFile(directory / "model.pt", "old", mode);
      const Target target = Resolved(directory / "model.pt");
      const testing::ScopedUmask umask(mask);
      const auto made = MakeTemporary(target, file::RealFileOps());
      ASSERT_TRUE(made);
      EXPECT_EQ(ModeOf(directory / made->name), mode);
    }
  }
}

// Looks at the mode of the temporary at the moment when its group changes, before its mode does.
class LooksAtTheModeBetween final : public testing::ObservedFiles {
 public:
  mutable mode_t mode = 07777;

 protected:
  int Before(const Operation& operation) const override {
    if (operation.kind == Operation::Kind::kChangeGroup) {
      struct stat info{};
      EXPECT_EQ(::fstat(operation.fd, &info), 0);
      mode = info.st_mode & 0777;
    }
    return 0;
  }
};

TEST(TemporaryTest, APrivateFileIsNeverReadableByOthersOnTheWay) {
  const TemporaryDirectory directory;
  WriteFile(directory / "model.pt", "old", 0600);
  const LooksAtTheModeBetween files;
  const testing::ScopedUmask umask(0);
  ASSERT_TRUE(MakeTemporary(Resolved(directory / "model.pt"), files));
  EXPECT_EQ(files.mode & 0077U, 0U);
}

TEST(TemporaryTest, TheGroupIsTakenOverWhereAllowedAndNoReasonToFailWhereNot) {
  const TemporaryDirectory directory;
  WriteFile(directory / "model.pt", "old", 0660);
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown((directory / "model.pt").c_str(), static_cast<uid_t>(-1), 65534), 0);
    const auto made = MakeTemporary(Resolved(directory / "model.pt"), file::RealFileOps());
    ASSERT_TRUE(made);
    struct stat info{};
    ASSERT_EQ(::fstat(made->fd.get(), &info), 0);
    EXPECT_EQ(info.st_gid, 65534U);
  }
  const FaultyFiles files({{.kind = Operation::Kind::kChangeGroup, .system_errno = EPERM}});
  EXPECT_TRUE(MakeTemporary(Resolved(directory / "model.pt"), files));
}

TEST(TemporaryTest, AModeThatCannotBeTakenOverFailsAndLeavesNothing) {
  const TemporaryDirectory directory;
  WriteFile(directory / "model.pt", "old", 0640);
  const FaultyFiles files({{.kind = Operation::Kind::kChangeMode, .system_errno = EPERM}});
  const auto made = MakeTemporary(Resolved(directory / "model.pt"), files);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().operation, "change the mode");
  EXPECT_EQ(made.error().system_errno, EPERM);
  EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
}

TEST(TemporaryTest, ATemporaryIsLockedAgainstOtherSaves) {
  const TemporaryDirectory directory;
  const Target target = Resolved(directory / "model.pt");
  auto made = MakeTemporary(target, file::RealFileOps());
  ASSERT_TRUE(made);
  RemoveLeftovers(target, file::RealFileOps());
  EXPECT_THAT(directory.names(), ElementsAre(made->name));
  made->fd.Reset();
  RemoveLeftovers(target, file::RealFileOps());
  EXPECT_THAT(directory.names(), ElementsAre());
}

TEST(TemporaryTest, UnlockedLeftoversOfTheSameTargetAreRemovedAndNothingElse) {
  const TemporaryDirectory directory;
  const std::vector<std::string> foreign{
      TemporaryPrefix("other.pt") + std::string(16, '0') + ".tmp",  // another target's
      TemporaryPrefix("model.pt") + std::string(16, '0') + ".bak",  // no temporary
      "model.pt.tmp", ".model.pt.tmp", "model.pt"};
  for (const std::string& name : foreign) WriteFile(directory / name, "keep");
  WriteFile(directory / LeftoverName('0'), "left");
  WriteFile(directory / LeftoverName('1'), "left", 0600);
  RemoveLeftovers(Resolved(directory / "model.pt"), file::RealFileOps());
  EXPECT_THAT(directory.names(), ::testing::UnorderedElementsAreArray(foreign));
}

TEST(TemporaryTest, ALinkOrAFifoOrADirectoryWithALeftoversNameDoesNotBlockOrLead) {
  const TemporaryDirectory directory;
  WriteFile(directory / "precious", "keep");
  std::filesystem::create_symlink("precious", directory / LeftoverName('0'));
  ASSERT_EQ(::mkfifo((directory / LeftoverName('1')).c_str(), 0600), 0);
  std::filesystem::create_directory(directory / LeftoverName('2'));
  RemoveLeftovers(Resolved(directory / "model.pt"), file::RealFileOps());
  EXPECT_EQ(testing::ReadFile(directory / "precious"), "keep");
  EXPECT_THAT(directory.names(), SizeIs(4)) << "only files of ours are removed";
}

const testing::RegisterRole kHoldTemporary("makes a temporary and waits",
                                           [](const testing::Arguments& arguments) {
                                             const auto made = MakeTemporary(
                                                 Resolved(arguments.at(0)), file::RealFileOps());
                                             testing::Report(made ? made->name : "failed");
                                             for (;;) ::pause();
                                             return 0;
                                           });

TEST(TemporaryTest, AnotherProcessKeepsItsTemporaryUntilItDies) {
  const TemporaryDirectory directory;
  const Target target = Resolved(directory / "model.pt");
  testing::ChildProcess child("makes a temporary and waits", {directory / "model.pt"});
  child.WaitForReport();
  ASSERT_THAT(directory.names(), SizeIs(1));
  RemoveLeftovers(target, file::RealFileOps());
  EXPECT_THAT(directory.names(), SizeIs(1)) << "its owner is alive";
  child.Kill();
  (void)child.Wait();
  EXPECT_THAT(directory.names(), SizeIs(1)) << "a killed process leaves it behind";
  RemoveLeftovers(target, file::RealFileOps());
  EXPECT_THAT(directory.names(), SizeIs(0));
}

// Another save, in the moment between making a temporary and locking it.
class IntrudesBeforeTheLock final : public testing::ObservedFiles {
 public:
  explicit IntrudesBeforeTheLock(const Target& target) : target_(target) {}
  mutable std::vector<std::string> created;

 protected:
  int Before(const Operation& operation) const override {
    if (operation.kind == Operation::Kind::kCreateTemporary) created.push_back(operation.name);
    if (operation.kind == Operation::Kind::kTryLock && created.size() <= 3) {
      RemoveLeftovers(target_, file::RealFileOps());
    }
    return 0;
  }

 private:
  const Target& target_;
};

TEST(TemporaryTest, ATemporaryThatIsTakenForALeftoverIsMadeAgain) {
  const TemporaryDirectory directory;
  const Target target = Resolved(directory / "model.pt");
  const IntrudesBeforeTheLock files(target);
  const auto made = MakeTemporary(target, files);
  ASSERT_TRUE(made);
  EXPECT_THAT(files.created, SizeIs(4)) << "the first three were removed by the other save";
  EXPECT_THAT(directory.names(), ElementsAre(made->name));
  struct stat info{};
  ASSERT_EQ(::fstat(made->fd.get(), &info), 0);
  EXPECT_EQ(info.st_nlink, 1U);
}

TEST(TemporaryTest, ATemporaryThatAnotherSaveHasLockedIsMadeAgain) {
  const TemporaryDirectory directory;
  const FaultyFiles files({{.kind = Operation::Kind::kTryLock, .system_errno = EAGAIN}});
  const Target target = Resolved(directory / "model.pt");
  const auto made = MakeTemporary(target, files);
  ASSERT_TRUE(made);
  EXPECT_EQ(files.calls(Operation::Kind::kCreateTemporary), 2U);
}

TEST(TemporaryTest, AFileSystemWithoutLocksIsGoodEnough) {
  const TemporaryDirectory directory;
  WriteFile(directory / LeftoverName(), "left");
  for (const int error : {ENOLCK, EOPNOTSUPP, ENOSYS, EINVAL}) {
    const FaultyFiles files(
        {{.kind = Operation::Kind::kTryLock, .system_errno = error, .from_then_on = true}});
    const Target target = Resolved(directory / "model.pt");
    EXPECT_TRUE(MakeTemporary(target, files)) << error;
    RemoveLeftovers(target, files);
    EXPECT_THAT(directory.names(), ::testing::Contains(LeftoverName()))
        << "whether its owner lives cannot be known";
  }
}

TEST(TemporaryTest, ANameThatIsTakenIsTriedAgain) {
  const TemporaryDirectory directory;
  const FaultyFiles files({{.kind = Operation::Kind::kCreateTemporary, .system_errno = EEXIST}});
  EXPECT_TRUE(MakeTemporary(Resolved(directory / "model.pt"), files));
  const FaultyFiles always(
      {{.kind = Operation::Kind::kCreateTemporary, .system_errno = EEXIST, .from_then_on = true}});
  const auto made = MakeTemporary(Resolved(directory / "model.pt"), always);
  ASSERT_FALSE(made) << "and not for ever";
  EXPECT_EQ(made.error().system_errno, EEXIST);
}

TEST(TemporaryTest, ADirectoryThatTakesNoTemporaryNamesTheWayInPlace) {
  const TemporaryDirectory directory;
  for (const int error : {EACCES, EPERM, EROFS}) {
    const FaultyFiles files({{.kind = Operation::Kind::kCreateTemporary, .system_errno = error}});
    const auto no_file = MakeTemporary(Resolved(directory / "new.pt"), files);
    ASSERT_FALSE(no_file);
    EXPECT_THAT(no_file.error().advice, Not(HasSubstr("atomic"))) << "there is nothing to write to";

    WriteFile(directory / "model.pt", "old");
    const FaultyFiles again({{.kind = Operation::Kind::kCreateTemporary, .system_errno = error}});
    const auto made = MakeTemporary(Resolved(directory / "model.pt"), again);
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().system_errno, error);
    EXPECT_EQ(made.error().operation, "create a temporary file");
    EXPECT_THAT(made.error().advice, HasSubstr("atomic=False"));
  }
}

TEST(TemporaryTest, LeftoversThatCannotBeRemovedDoNoHarm) {
  const TemporaryDirectory directory;
  WriteFile(directory / LeftoverName(), "left");
  for (const auto kind : {Operation::Kind::kOpenLeftover, Operation::Kind::kUnlink}) {
    const FaultyFiles files({{.kind = kind, .system_errno = EACCES, .from_then_on = true}});
    RemoveLeftovers(Resolved(directory / "model.pt"), files);
    EXPECT_THAT(directory.names(), ElementsAre(LeftoverName()));
  }
}

}  // namespace
}  // namespace fastpersist::commit
