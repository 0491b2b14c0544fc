// SPDX-License-Identifier: Apache-2.0
// A process that saves is killed: the path leads to one complete generation, and what the process
// leaves behind is bounded and goes with the next save.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/unique_fd.h"
#include "file/file_ops.h"
#include "testing/child_process.h"
#include "testing/observed_files.h"
#include "testing/save_content.h"
#include "testing/seed.h"
#include "testing/temporary_directory.h"

namespace fastpersist::checkpoint {
namespace {

using testing::Arguments;
using ::testing::ElementsAre;
using testing::GenerationFile;
using testing::GenerationOf;
using testing::ReadFile;
using testing::SaveContent;
using testing::TemporaryDirectory;

constexpr std::uint64_t kCycle = 2;  // generations that one child saves over and over
constexpr std::size_t kLargeSize = 2 << 20;

// The kernel ends what a dead process had in flight before it lets go of its files, and with them
// of their locks; with io_uring that is a moment after the process has gone.
void WaitUntilLocksAreReleased(const TemporaryDirectory& directory) {
  for (const std::string& name : directory.temporaries()) {
    const base::UniqueFd fd(::open((directory / name).c_str(), O_WRONLY | O_CLOEXEC));
    int locked = -EAGAIN;
    for (int i = 0; i < 10'000 && locked < 0; ++i) {
      locked = file::RealFileOps().TryLock(fd.get());
      if (locked < 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_EQ(locked, 0) << name << " stays locked";
  }
}

std::uint64_t Generation(std::uint64_t base, std::uint64_t save) { return base + save % kCycle; }

// arguments: path, base. Reports the number of each finished save, from 0.
const testing::RegisterRole kSavesForEver("saves for ever", [](const Arguments& arguments) {
  const std::uint64_t base = std::stoull(arguments.at(1));
  std::array<std::string, kCycle> contents;
  for (std::uint64_t i = 0; i < kCycle; ++i) contents[i] = GenerationFile(base + i, kLargeSize);
  testing::Report("ready");
  for (std::uint64_t save = 0;; ++save) {
    if (!SaveContent(contents[save % kCycle], arguments.at(0))) return 1;
    testing::Report(std::to_string(save));
  }
});

// The last save that the child reported; nullopt when it did not come so far.
std::optional<std::uint64_t> LastReported(const std::string& report) {
  const std::string whole = report.substr(0, report.rfind('\n') + 1);
  if (whole.size() < 2) return std::nullopt;
  const std::string last = whole.substr(whole.rfind('\n', whole.size() - 2) + 1);
  if (last == "ready\n") return std::nullopt;
  return std::stoull(last);
}

TEST(KillTest, AHundredKillsAtRandomMomentsNeverDamageTheFile) {
  const testing::Seed seed;
  testing::Random random(seed.value());
  const TemporaryDirectory directory;
  const std::string path = directory / "model.pt";
  ASSERT_TRUE(SaveContent(GenerationFile(0, kLargeSize), path));
  std::uint64_t before = 0;  // the generation that was there when the child started
  int kills_with_leftover = 0;
  for (std::uint64_t round = 1; round <= 100; ++round) {
    const std::uint64_t base = round * kCycle;
    testing::ChildProcess child("saves for ever", {path, std::to_string(base)});
    child.WaitForReport();
    std::this_thread::sleep_for(std::chrono::microseconds(testing::Between(random, 0, 40'000)));
    child.Kill();
    const auto result = child.Wait();
    ASSERT_EQ(result.signal, SIGKILL);
    WaitUntilLocksAreReleased(directory);

    const auto generation = GenerationOf(ReadFile(path));
    ASSERT_TRUE(generation) << "round " << round << ": the file is damaged";
    const auto last = LastReported(result.report);
    const std::uint64_t older = last ? Generation(base, *last) : before;
    const std::uint64_t newer = last ? Generation(base, *last + 1) : base;
    ASSERT_TRUE(*generation == older || *generation == newer)
        << "round " << round << ": generation " << *generation << ", expected " << older << " or "
        << newer;
    before = *generation;
    // The child's own first save has removed what the one before it left.
    ASSERT_LE(directory.temporaries().size(), last ? 1U : 2U);
    if (!directory.temporaries().empty()) ++kills_with_leftover;
  }
  EXPECT_GT(kills_with_leftover, 0) << "no kill hit a save: the test shows nothing";
  ASSERT_TRUE(SaveContent(GenerationFile(7, kLargeSize), path));
  EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
  EXPECT_EQ(GenerationOf(ReadFile(path)), 7U);
}

constexpr int kEnded = 42;
constexpr std::size_t kSmallSize = 60'000;

// Ends the process at the nth step. A step is the moment before, and the one after, each call.
class Countdown {
 public:
  explicit Countdown(std::uint64_t steps) : left_(steps) {}
  void Step() {
    if (--left_ == 0) ::_exit(kEnded);
  }

 private:
  std::uint64_t left_;
};

class EndingFiles final : public testing::ObservedFiles {
 public:
  explicit EndingFiles(Countdown& countdown) : countdown_(countdown) {}

 protected:
  int Before(const testing::Operation& /*operation*/) const override {
    countdown_.Step();
    return 0;
  }
  void After(const testing::Operation& /*operation*/) const override { countdown_.Step(); }

 private:
  Countdown& countdown_;
};

class EndingEngine final : public engine::IoEngine {
 public:
  EndingEngine(std::unique_ptr<engine::IoEngine> inner, Countdown& countdown)
      : inner_(std::move(inner)), countdown_(countdown) {}
  [[nodiscard]] Engine kind() const override { return inner_->kind(); }
  [[nodiscard]] unsigned depth() const override { return inner_->depth(); }
  [[nodiscard]] Result<engine::Submitted> Submit(const engine::IoRequest& request,
                                                 engine::IoCompletion* completed) override {
    countdown_.Step();
    return inner_->Submit(request, completed);
  }
  [[nodiscard]] Result<std::size_t> Reap(std::span<engine::IoCompletion> out) override {
    countdown_.Step();
    return inner_->Reap(out);
  }

 private:
  std::unique_ptr<engine::IoEngine> inner_;
  Countdown& countdown_;
};

// arguments: path, number of the step.
const testing::RegisterRole kEndsAtAStep(
    "ends at a step of its save", [](const Arguments& arguments) {
      Countdown countdown(std::stoull(arguments.at(1)));
      const EndingFiles files(countdown);
      const Environment environment{
          .files = &files,
          .make_engine = [&](Engine kind,
                             unsigned depth) -> Result<std::unique_ptr<engine::IoEngine>> {
            auto made = engine::MakeEngine(kind, depth);
            if (!made) return made;
            return std::make_unique<EndingEngine>(*std::move(made), countdown);
          }};
      const Options options{.block_bytes = 16384, .queue_depth = 2};
      return SaveContent(GenerationFile(2, kSmallSize), arguments.at(0), options, environment) ? 0
                                                                                               : 1;
    });

TEST(KillTest, AnEndAtEveryStepLeavesTheOldFileOrTheNewOne) {
  const TemporaryDirectory directory;
  const std::string path = directory / "model.pt";
  bool new_before = false;
  std::uint64_t step = 1;
  for (;; ++step) {
    ASSERT_LT(step, 500U) << "the save does not come to its end";
    ASSERT_TRUE(SaveContent(GenerationFile(1, kSmallSize), path));
    ASSERT_THAT(directory.names(), ElementsAre("model.pt")) << "the leftover of step " << step - 1;
    const auto result =
        testing::RunRole("ends at a step of its save", {path, std::to_string(step)});
    if (result.exit_code == 0) break;
    ASSERT_EQ(result.exit_code, kEnded);
    const auto generation = GenerationOf(ReadFile(path));
    ASSERT_TRUE(generation == 1U || generation == 2U) << "step " << step;
    ASSERT_FALSE(new_before && generation == 1U) << "once it is published it stays: step " << step;
    new_before = generation == 2U;
    WaitUntilLocksAreReleased(directory);
    ASSERT_LE(directory.temporaries().size(), 1U) << "step " << step;
    ASSERT_FALSE(new_before && !directory.temporaries().empty()) << "step " << step;
  }
  EXPECT_TRUE(new_before) << "the last steps come after the rename";
  EXPECT_GT(step, 20U);
  EXPECT_EQ(GenerationOf(ReadFile(path)), 2U);
  EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
}

}  // namespace
}  // namespace fastpersist::checkpoint
