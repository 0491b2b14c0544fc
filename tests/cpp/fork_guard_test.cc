// SPDX-License-Identifier: Apache-2.0
#include "base/fork_guard.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <string>
#include <utility>

#include "commit/publish.h"
#include "commit/temporary.h"
#include "testing/child_process.h"
#include "testing/save_content.h"
#include "testing/temporary_directory.h"

namespace fastpersist::base {
namespace {

using testing::Arguments;
using ::testing::ElementsAre;
using testing::SaveContent;
using ::testing::SizeIs;
using testing::TemporaryDirectory;

// The exit status of a forked child that runs work; the parent waits.
int InForkedChild(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(work());
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ForkGuardTest, AChildThatIsForkedAfterTheFirstUseIsRefused) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(SaveContent("parent", directory / "model.pt"));
  const int status = InForkedChild([&] {
    const auto saved = SaveContent("child", directory / "model.pt");
    if (saved) return 1;
    if (saved.error().code != ErrorCode::kForked) return 2;
    return saved.error().advice.find("spawn") == std::string::npos ? 3 : 0;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(testing::ReadFile(directory / "model.pt"), "parent");
  EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
  EXPECT_TRUE(SaveContent("parent again", directory / "model.pt")) << "the parent goes on";
}

TEST(ForkGuardTest, TheErrorNamesBothProcesses) {
  ASSERT_TRUE(CheckNotForked());
  const std::string parent = std::to_string(::getpid());
  EXPECT_EQ(InForkedChild([&] {
              const auto alive = CheckNotForked();
              if (alive) return 1;
              const std::string message = alive.error().Message();
              return message.find(parent) != std::string::npos &&
                             message.find(std::to_string(::getpid())) != std::string::npos
                         ? 0
                         : 2;
            }),
            0);
}

// A process of its own, because the library was used in this one.
const testing::RegisterRole kForksFirst("forks before it saves", [](const Arguments& arguments) {
  const std::string& path = arguments.at(0);
  const int child = InForkedChild([&] { return SaveContent("child", path) ? 0 : 1; });
  if (child != 0) return 1;
  if (testing::ReadFile(path) != "child") return 2;
  return SaveContent("parent", path) ? 0 : 3;
});

TEST(ForkGuardTest, AChildThatIsForkedBeforeTheFirstUseSavesAndSoDoesItsParent) {
  const TemporaryDirectory directory;
  EXPECT_EQ(testing::RunRole("forks before it saves", {directory / "model.pt"}).exit_code, 0);
  EXPECT_EQ(testing::ReadFile(directory / "model.pt"), "parent");
}

TEST(ForkGuardTest, AChildThatUnwindsDoesNotRemoveTheTemporaryOfItsParent) {
  const TemporaryDirectory directory;
  const auto target = commit::ResolveTarget(directory / "model.pt", file::RealFileOps());
  ASSERT_TRUE(target);
  const Options options;
  auto publication = commit::Publication::Begin(*target, options, file::RealFileOps());
  ASSERT_TRUE(publication);
  EXPECT_EQ(InForkedChild([&] {
              const commit::Publication gone(*std::move(publication));
              return 0;
            }),
            0);
  EXPECT_THAT(directory.temporaries(), SizeIs(1));
}

TEST(ForkGuardTest, AChildHoldsNeitherTheTemporaryNorItsLock) {
  const TemporaryDirectory directory;
  const auto target = commit::ResolveTarget(directory / "model.pt", file::RealFileOps());
  ASSERT_TRUE(target);
  const Options options;
  std::array<int, 2> ready{};
  std::array<int, 2> wait{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  ASSERT_EQ(::pipe(wait.data()), 0);
  const UniqueFd owned[] = {UniqueFd(ready[0]), UniqueFd(ready[1]), UniqueFd(wait[0])};
  UniqueFd end_of_wait(wait[1]);
  pid_t child = -1;
  {
    const auto publication = commit::Publication::Begin(*target, options, file::RealFileOps());
    ASSERT_TRUE(publication);
    child = ::fork();
    if (child == 0) {
      // A loader's worker: lives on, and calls neither exec nor this library.
      char byte = 0;
      (void)!::write(ready[1], &byte, 1);
      ::close(wait[1]);
      (void)!::read(wait[0], &byte, 1);
      ::_exit(0);
    }
    char byte = 0;
    ASSERT_EQ(::read(ready[0], &byte, 1), 1);
    // As if the parent was killed here: the name stays, the descriptor goes.
    ASSERT_EQ(
        ::linkat(
            AT_FDCWD, (directory / directory.temporaries().at(0)).c_str(), AT_FDCWD,
            (directory / (commit::TemporaryPrefix("model.pt") + "ffffffffffffffff.tmp")).c_str(),
            0),
        0);
  }
  EXPECT_THAT(directory.temporaries(), SizeIs(1));
  commit::RemoveLeftovers(*target, file::RealFileOps());
  EXPECT_THAT(directory.temporaries(), SizeIs(0)) << "the child holds the lock";
  end_of_wait.Reset();
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
}

}  // namespace
}  // namespace fastpersist::base
