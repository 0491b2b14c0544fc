// SPDX-License-Identifier: Apache-2.0
#include "fastpersist/checkpointer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/found_checkpoint.h"
#include "commit/root.h"
#include "fastpersist/fastpersist.h"
#include "fmt/format.h"
#include "testing/checkpoint_directory.h"
#include "testing/child_process.h"
#include "testing/observed_files.h"
#include "testing/temporary_directory.h"

namespace fastpersist {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::ReadFile;
using testing::TemporaryDirectory;
using testing::WriteFile;

// Memory that a program owns, and the state that describes it.
struct Model {
  std::vector<float> weight = std::vector<float>(300'000);
  std::vector<float> bias = std::vector<float>(100, 0.5F);
  std::int64_t step = 0;

  Model() { std::iota(weight.begin(), weight.end(), 0.0F); }
  void Change() {
    for (float& value : weight) value += 1;
    for (float& value : bias) value -= 1;
    ++step;
  }
  [[nodiscard]] State state() const {
    State state;
    EXPECT_TRUE(state.Add("weight", {.data = weight.data(), .shape = {300, 1000}}));
    EXPECT_TRUE(state.Add("bias", {.data = bias.data(), .shape = {100}}));
    EXPECT_TRUE(state.Add("step", {.data = &step, .dtype = DType::kInt64}));
    return state;
  }
};

template <class T>
std::vector<T> ReadAll(const File& file, std::string_view name) {
  const TensorInfo* const info = file.Find(name);
  if (info == nullptr) return {};
  std::vector<T> values(info->bytes / sizeof(T));
  const auto read = file.Read(name, std::as_writable_bytes(std::span(values)));
  EXPECT_TRUE(read) << read.error().Message();
  return values;
}

void ExpectModel(const File& file, const Model& model) {
  EXPECT_EQ(ReadAll<float>(file, "weight"), model.weight);
  EXPECT_EQ(ReadAll<float>(file, "bias"), model.bias);
  EXPECT_EQ(ReadAll<std::int64_t>(file, "step"), std::vector{model.step});
}

Checkpointer Opened(const std::string& path, const CheckpointerOptions& options = {}) {
  auto opened = Checkpointer::Open(path, options);
  EXPECT_TRUE(opened) << opened.error().Message();
  return *std::move(opened);
}

class CheckpointerTest : public ::testing::Test {
 protected:
  [[nodiscard]] std::string path() const { return directory_ / "run"; }

 private:
  TemporaryDirectory directory_;
};

TEST_F(CheckpointerTest, WhatIsSavedIsLoadedWithItsStepAndMetadata) {
  Checkpointer run = Opened(path());
  EXPECT_EQ(run.warning(), "");
  const Model model;
  auto ticket = run.Save(42, model.state(), {.metadata = R"({"loss": 1.50})"});
  ASSERT_TRUE(ticket) << ticket.error().Message();
  const auto info = ticket->Get();
  ASSERT_TRUE(info) << info.error().Message();
  EXPECT_TRUE(ticket->Done());
  EXPECT_EQ(ticket->step(), 42U);
  EXPECT_EQ(info->path, path() + "/step-00000042");
  EXPECT_EQ(info->bytes, ticket->bytes());
  EXPECT_EQ(ticket->bytes_written(), ticket->bytes());
  EXPECT_EQ(info->warning, "");

  const auto loaded = run.Load();
  ASSERT_TRUE(loaded) << loaded.error().Message();
  EXPECT_EQ(loaded->step, 42U);
  EXPECT_EQ(loaded->metadata, R"({"loss": 1.50})");
  EXPECT_EQ(loaded->path, path() + "/step-00000042");
  EXPECT_THAT(loaded->skipped, IsEmpty());
  ExpectModel(loaded->file, model);
  const auto verified = loaded->file.Verify();
  ASSERT_TRUE(verified);
  EXPECT_THAT(verified->damages, IsEmpty());
}

TEST_F(CheckpointerTest, WhatIsNotLiveMayChangeAtOnceAndTheRestOnceItWasReleased) {
  Checkpointer run = Opened(path());
  Model model;
  const Model before = model;
  for (std::uint64_t step = 0; step < 3; ++step) {
    auto ticket = run.Save(step, model.state(), {.live = {"weight"}});
    ASSERT_TRUE(ticket);
    std::ranges::fill(model.bias, 9.0F);
    model.step = 9;
    ASSERT_TRUE(ticket->WaitReleased());
    std::ranges::fill(model.weight, 9.0F);
    ASSERT_TRUE(ticket->Get());
    ExpectModel(run.Load(step)->file, before);
    model = before;
  }
}

TEST_F(CheckpointerTest, WhatDoesNotFitIntoMemoryIsWrittenBeforeSaveReturns) {
  for (const std::uint64_t memory : {0U, 1U, 500U, 4096U}) {
    Checkpointer run = Opened(path(), {.memory = memory});
    Model model;
    const Model before = model;
    auto ticket = run.Save(memory, model.state());
    ASSERT_TRUE(ticket);
    model.Change();
    const auto info = ticket->Get();
    ASSERT_TRUE(info) << info.error().Message();
    EXPECT_THAT(info->warning, HasSubstr("memory"));
    ExpectModel(run.Load(memory)->file, before);
  }
}

TEST_F(CheckpointerTest, TakesEveryStateThatSaveTakes) {
  Checkpointer run = Opened(path());
  const std::vector<double> shared(6, 1.5);
  State state;
  ASSERT_TRUE(state.Add("", {.data = shared.data(), .dtype = DType::kFloat64, .shape = {2, 3}}));
  ASSERT_TRUE(state.Add("again", {.data = shared.data(), .dtype = DType::kFloat64, .shape = {6}}));
  ASSERT_TRUE(state.Add("bytes", {.data = shared.data(), .dtype = DType::kUint8, .shape = {48}}));
  ASSERT_TRUE(state.Add("part", {.data = shared.data(), .dtype = DType::kFloat64, .shape = {1}}));
  ASSERT_TRUE(state.Add("empty", {.dtype = DType::kBool, .shape = {0, 7}}));
  ASSERT_TRUE(state.Add("näme", {.data = shared.data() + 1, .dtype = DType::kComplex128}));
  const std::vector<std::vector<std::string>> lives{
      {}, {"", "again"}, {"again"}, {"bytes", "empty"}, {"", "again", "bytes", "part", "näme"}};
  for (std::size_t i = 0; i < lives.size(); ++i) {
    auto ticket = run.Save(i, state, {.live = lives[i]});
    ASSERT_TRUE(ticket) << ticket.error().Message();
    ASSERT_TRUE(ticket->Get()) << ticket->Get().error().Message();
    const auto loaded = run.Load(i);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->file.tensors().size(), 6U);
    EXPECT_EQ(ReadAll<double>(loaded->file, ""), shared);
    EXPECT_EQ(ReadAll<double>(loaded->file, "bytes"), shared);
    EXPECT_EQ(loaded->file.Find("")->storage, loaded->file.Find("again")->storage);
    // The very file that Save writes: the same bytes, wherever they came from.
    ASSERT_TRUE(fastpersist::Save(state, path() + "/state.pt"));
    EXPECT_EQ(ReadFile(loaded->path / "state.pt"), ReadFile(path() + "/state.pt"));
    std::filesystem::remove(path() + "/state.pt");
  }
  auto empty = run.Save(9, State{});
  ASSERT_TRUE(empty);
  ASSERT_TRUE(empty->Get());
  EXPECT_THAT(run.Load(9)->file.tensors(), IsEmpty());
}

TEST_F(CheckpointerTest, AMemoryOfWhichOneNameIsNotLiveIsCopied) {
  Checkpointer run = Opened(path());
  std::vector<float> memory(10'000, 1);
  State state;
  ASSERT_TRUE(state.Add("a", {.data = memory.data(), .shape = {10'000}}));
  ASSERT_TRUE(state.Add("b", {.data = memory.data(), .shape = {100, 100}}));
  auto ticket = run.Save(1, state, {.live = {"a"}});
  ASSERT_TRUE(ticket);
  std::ranges::fill(memory, 2.0F);
  ASSERT_TRUE(ticket->Get());
  EXPECT_EQ(ReadAll<float>(run.Load()->file, "a"), std::vector<float>(10'000, 1));
}

TEST_F(CheckpointerTest, ArgumentsThatCannotWorkAreRefusedBeforeAnythingIsWritten) {
  const auto code_of = [](const auto& result) {
    return result ? std::optional<ErrorCode>() : result.error().code;
  };
  EXPECT_EQ(code_of(Checkpointer::Open(path(), {.keep_last = 0})), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(Checkpointer::Open(path(), {.keep_every = 0})), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of(Checkpointer::Open(path(), {.options = {.queue_depth = 0}})),
            ErrorCode::kInvalidArgument);
  Checkpointer run = Opened(path());
  const Model model;
  const auto unknown = run.Save(1, model.state(), {.live = {"wieght"}});
  EXPECT_EQ(code_of(unknown), ErrorCode::kInvalidArgument);
  EXPECT_EQ(unknown.error().entry, "wieght");
  for (const char* const metadata : {"", "3", "[]", "{", R"({"a": })", "{\"a\": \"\xff\"}"}) {
    EXPECT_EQ(code_of(run.Save(1, model.state(), {.metadata = metadata})),
              ErrorCode::kInvalidArgument)
        << metadata;
  }
  EXPECT_EQ(code_of(run.Save(std::uint64_t{1} << 63, model.state())), ErrorCode::kInvalidArgument);
  EXPECT_THAT(testing::Listing(path()), IsEmpty());
  EXPECT_TRUE(run.Save((std::uint64_t{1} << 63) - 1, model.state())->Get());
}

TEST_F(CheckpointerTest, StepsAreListedDeletedAndRetired) {
  Checkpointer run = Opened(path(), {.keep_last = 2, .keep_every = 10});
  EXPECT_EQ(*run.LatestStep(), std::nullopt);
  EXPECT_THAT(*run.AllSteps(), IsEmpty());
  EXPECT_EQ(run.Delete(1).error().code, ErrorCode::kNotFound);
  const Model model;
  for (const std::uint64_t step : {9U, 10U, 13U, 12U, 11U, 11U}) {
    ASSERT_TRUE(run.Save(step, model.state())->Get());
  }
  EXPECT_EQ(*run.LatestStep(), 11U) << "the last that was saved";
  EXPECT_THAT(*run.AllSteps(), ElementsAre(10, 11, 12));
  ASSERT_TRUE(run.Delete(11));
  EXPECT_EQ(*run.LatestStep(), 12U);
  EXPECT_EQ(run.Load(11).error().code, ErrorCode::kNotFound);
  EXPECT_TRUE(run.Load(10));
}

TEST_F(CheckpointerTest, ADamagedCheckpointIsSkippedForTheNextOlderOneWithTheReason) {
  Checkpointer run = Opened(path());
  Model model;
  const Model first = model;
  ASSERT_TRUE(run.Save(1, model.state())->Get());
  model.Change();
  for (const std::uint64_t step : {2U, 3U, 4U}) ASSERT_TRUE(run.Save(step, model.state())->Get());
  // The manifest, the size, and the structure: the last is seen only when the file is opened.
  WriteFile(path() + "/step-00000004/manifest.json", "{}");
  WriteFile(path() + "/step-00000003/state.pt", "short");
  const std::string content = ReadFile(path() + "/step-00000002/state.pt");
  WriteFile(path() + "/step-00000002/state.pt", std::string(content.size(), 'x'));

  const auto loaded = OpenCheckpoint(path());
  ASSERT_TRUE(loaded) << loaded.error().Message();
  EXPECT_EQ(loaded->step, 1U);
  ExpectModel(loaded->file, first);
  EXPECT_THAT(loaded->skipped, ElementsAre(HasSubstr("step-00000004"), HasSubstr("step-00000003"),
                                           HasSubstr("step-00000002")));
  EXPECT_EQ(run.Load(2).error().code, ErrorCode::kCorrupt);
  EXPECT_EQ(run.Load(3).error().code, ErrorCode::kCorrupt);
  EXPECT_EQ(run.Load(5).error().code, ErrorCode::kNotFound);

  ASSERT_TRUE(run.Delete(1));
  const auto none = run.Load();
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::kCorrupt) << "something is there, and none of it is good";
  EXPECT_THAT(none.error().Message(), HasSubstr("step-00000003"));
  EXPECT_TRUE(run.Delete(3)) << "damaged ones too";
}

TEST_F(CheckpointerTest, AnotherStepsFileIsDamageAlthoughItIsWhole) {
  Checkpointer run = Opened(path());
  Model model;
  const Model first = model;
  ASSERT_TRUE(run.Save(1, model.state())->Get());
  model.Change();
  ASSERT_TRUE(run.Save(2, model.state())->Get());
  WriteFile(path() + "/step-00000002/state.pt", ReadFile(path() + "/step-00000001/state.pt"));
  const auto loaded = OpenCheckpoint(path());
  ASSERT_TRUE(loaded) << loaded.error().Message();
  EXPECT_EQ(loaded->step, 1U);
  ExpectModel(loaded->file, first);
  EXPECT_THAT(loaded->skipped, ElementsAre(::testing::AllOf(HasSubstr("step-00000002"),
                                                            HasSubstr("manifest describes"))));
  EXPECT_EQ(run.Load(2).error().code, ErrorCode::kCorrupt);
}

TEST_F(CheckpointerTest, TwoThatClaimToBeTheNewestAreToldApartByStepOnly) {
  const Model model;
  for (const std::uint64_t step : {4U, 7U}) {
    Checkpointer run = Opened(fmt::format("{}-{}", path(), step));
    ASSERT_TRUE(run.Save(step, model.state())->Get());
  }
  std::filesystem::rename(path() + "-7/step-00000007", path() + "-4/step-00000007");
  const std::string merged = path() + "-4";
  EXPECT_EQ(OpenCheckpoint(merged).error().code, ErrorCode::kCorrupt);
  for (const std::uint64_t step : {4U, 7U}) EXPECT_EQ(OpenCheckpoint(merged, step)->step, step);
  std::filesystem::copy(merged + "/step-00000007", merged + "/best",
                        std::filesystem::copy_options::recursive);
  EXPECT_TRUE(OpenCheckpoint(merged, 4));
  const auto twins = OpenCheckpoint(merged, 7);
  ASSERT_FALSE(twins) << "of one step, too";
  EXPECT_EQ(twins.error().code, ErrorCode::kCorrupt);
}

// Does something at the first calls that open a file of this name.
class WhenOpened final : public testing::ObservedFiles {
 public:
  WhenOpened(std::string name, int times, std::function<void()> action)
      : name_(std::move(name)), left_(times), action_(std::move(action)) {}

 protected:
  int Before(const testing::Operation& operation) const override {
    if (operation.name.ends_with(name_) && left_ > 0) {
      --left_;
      action_();
    }
    return 0;
  }

 private:
  std::string name_;
  mutable int left_;
  std::function<void()> action_;
};

TEST_F(CheckpointerTest, WhatIsRetiredBeforeItIsOpenedGivesWayToTheNewerOne) {
  Checkpointer run = Opened(path());
  Model model;
  std::uint64_t step = 1;
  ASSERT_TRUE(run.Save(step, model.state())->Get());
  const auto root = commit::Root::Open(path(), commit::Root::Access::kRead);
  ASSERT_TRUE(root);
  const WhenOpened files("/state.pt", 5, [&] {
    model.Change();
    ASSERT_TRUE(run.Save(step + 1, model.state())->Get());
    ASSERT_TRUE(run.Delete(step));
    ++step;
  });
  const auto found = checkpoint::FindCheckpoint(**root, std::nullopt, files);
  ASSERT_TRUE(found) << found.error().Message();
  EXPECT_EQ(found->step, 6U);
  ExpectModel(found->file, model);
}

TEST_F(CheckpointerTest, WhatReplacedTheOnlyOneWhileItWasLookedForIsFound) {
  Checkpointer run = Opened(path());
  const Model model;
  ASSERT_TRUE(run.Save(1, model.state())->Get());
  const auto root = commit::Root::Open(path(), commit::Root::Access::kRead);
  ASSERT_TRUE(root);
  // The root was listed, and is not listed again before its only checkpoint is looked at.
  const WhenOpened files("step-00000001", 1, [&] {
    ASSERT_TRUE(run.Save(2, model.state())->Get());
    ASSERT_TRUE(run.Delete(1));
  });
  const auto found = checkpoint::FindCheckpoint(**root, std::nullopt, files);
  ASSERT_TRUE(found) << found.error().Message();
  EXPECT_EQ(found->step, 2U);
}

TEST_F(CheckpointerTest, ALeftoverThatCannotBeRemovedIsAWarning) {
  {
    Checkpointer run = Opened(path());
    const Model model;
    ASSERT_TRUE(run.Save(1, model.state())->Get());
    ASSERT_TRUE(run.Save(2, model.state())->Get());
  }
  std::filesystem::remove(path() + "/step-00000002/manifest.json");
  std::filesystem::remove(path() + "/step-00000002/state.pt");
  std::filesystem::create_directories(path() + "/step-00000002/state.pt/inside");
  const Checkpointer run = Opened(path());
  EXPECT_THAT(run.warning(), HasSubstr("step-00000002: "));
  EXPECT_EQ(run.Load()->step, 1U);
}

TEST_F(CheckpointerTest, NothingThereIsAnErrorOfItsOwn) {
  EXPECT_EQ(OpenCheckpoint(path()).error().code, ErrorCode::kNotFound);
  const Checkpointer run = Opened(path());
  EXPECT_EQ(OpenCheckpoint(path()).error().code, ErrorCode::kNotFound);
  EXPECT_EQ(run.Load().error().code, ErrorCode::kNotFound);
}

TEST_F(CheckpointerTest, OneRunWritesAtATimeAndAnyNumberMayRead) {
  Checkpointer run = Opened(path());
  const Model model;
  ASSERT_TRUE(run.Save(1, model.state())->Get());
  const auto second = Checkpointer::Open(path());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().system_errno, EAGAIN);
  EXPECT_TRUE(OpenCheckpoint(path(), 1));
  ASSERT_TRUE(run.Close());
  EXPECT_TRUE(Checkpointer::Open(path()));
}

TEST_F(CheckpointerTest, OnceClosedItAnswersThatItIs) {
  Checkpointer run = Opened(path());
  const Model model;
  auto ticket = run.Save(1, model.state());
  ASSERT_TRUE(ticket);
  ASSERT_TRUE(run.Close());
  EXPECT_TRUE(run.Close());
  EXPECT_TRUE(ticket->Done()) << "Close waits";
  EXPECT_TRUE(ticket->Get());
  EXPECT_EQ(run.Save(2, model.state()).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(run.LatestStep().error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(run.Load().error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(run.Delete(1).error().code, ErrorCode::kInvalidArgument);
}

TEST_F(CheckpointerTest, DestroyingAndAssigningFinishWhatIsInFlight) {
  const Model model;
  {
    Checkpointer run = Opened(path());
    ASSERT_TRUE(run.Save(1, model.state()));
    run = Opened(path() + "-other");
    EXPECT_EQ(testing::NewestStep(path()), 1U);
    ASSERT_TRUE(run.Save(2, model.state()));
  }
  EXPECT_EQ(testing::NewestStep(path() + "-other"), 2U);
}

TEST_F(CheckpointerTest, AnErrorThatNobodyAskedForIsToldByCloseOnce) {
  for (const bool asked : {false, true}) {
    Checkpointer run = Opened(path());
    const Model model;
    ASSERT_TRUE(run.Save(1, model.state())->Get());
    std::filesystem::remove_all(path());
    auto failing = run.Save(2, model.state());
    ASSERT_TRUE(failing) << "it is the ticket that fails";
    ASSERT_TRUE(failing->Wait());
    if (asked) {
      EXPECT_FALSE(failing->Get());
    }
    EXPECT_EQ(run.Close().has_value(), asked);
    EXPECT_TRUE(run.Close());
  }
}

TEST_F(CheckpointerTest, AnAbandonedSaveFailsUnlessItWasFaster) {
  Checkpointer run = Opened(path());
  Model model;
  ASSERT_TRUE(run.Save(1, model.state())->Get());
  auto ticket = run.Save(2, model.state(), {.live = {"weight", "bias"}});
  ASSERT_TRUE(ticket);
  ticket->Abandon("the test wants it so");
  EXPECT_TRUE(ticket->WaitReleased(std::chrono::seconds(0)));
  model.Change();
  const auto result = ticket->Get();
  if (!result) {
    EXPECT_EQ(result.error().code, ErrorCode::kAbandoned);
    EXPECT_THAT(result.error().Message(), HasSubstr("the test wants it so"));
  }
  EXPECT_EQ(*run.LatestStep(), result ? 2U : 1U);
}

TEST_F(CheckpointerTest, WhatAKilledRunLeftIsRemovedAtTheNextStart) {
  const Model model;
  {
    Checkpointer run = Opened(path());
    ASSERT_TRUE(run.Save(1, model.state())->Get());
    ASSERT_TRUE(run.Save(2, model.state())->Get());
  }
  std::filesystem::remove(path() + "/step-00000002/manifest.json");  // as if killed before it
  const Checkpointer run = Opened(path());
  EXPECT_THAT(testing::Listing(path()), ElementsAre(HasSubstr("step-00000001 complete")));
}

TEST_F(CheckpointerTest, ThreadsMaySaveAndLookAtTheSameTime) {
  Checkpointer run = Opened(path(), {.keep_last = 3});
  const Model model;
  std::vector<std::jthread> threads;
  for (std::uint64_t thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::uint64_t i = 0; i < 4; ++i) {
        auto ticket = run.Save(10 * i + thread, model.state(), {.live = {"weight"}});
        ASSERT_TRUE(ticket);
        EXPECT_TRUE(run.AllSteps());
        EXPECT_TRUE(ticket->Get());
        const auto loaded = run.Load();
        ASSERT_TRUE(loaded) << loaded.error().Message();
        EXPECT_EQ(ReadAll<float>(loaded->file, "bias"), model.bias);
      }
    });
  }
  threads.clear();
  EXPECT_EQ(run.AllSteps()->size(), 3U);
}

const testing::RegisterRole kForksWithACheckpointer(
    "forks with a checkpointer open", [](const testing::Arguments& arguments) {
      auto run = std::make_optional(Opened(arguments.at(0)));
      const Model model;
      std::optional<Ticket> ticket = *run->Save(1, model.state(), {.live = {"weight"}});
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(60);  // a hang becomes a signal
        const bool waits = ticket->WaitReleased() || ticket->Wait() || ticket->Done();
        const bool refused = run->Save(2, model.state()).error().code == ErrorCode::kForked &&
                             run->LatestStep().error().code == ErrorCode::kForked &&
                             run->Close().error().code == ErrorCode::kForked &&
                             ticket->Get().error().code == ErrorCode::kForked;
        ticket.reset();
        run.reset();
        ::_exit(refused && !waits ? 0 : 1);
      }
      int status = 0;
      if (::waitpid(child, &status, 0) != child || status != 0) return 1;
      return ticket->Get() && run->Save(3, model.state()) && run->Close() ? 0 : 2;
    });

TEST_F(CheckpointerTest, AForkedChildIsRefusedWithoutWaitingAndItsParentGoesOn) {
  EXPECT_EQ(testing::RunRole("forks with a checkpointer open", {path()}).exit_code, 0);
  EXPECT_EQ(testing::NewestStep(path()), 3U);
}

}  // namespace
}  // namespace fastpersist
