// SPDX-License-Identifier: Apache-2.0
#include "testing/faulty_engine.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "testing/aligned_memory.h"
#include "testing/memory_engine.h"

namespace fastpersist::testing {
namespace {

using engine::IoCompletion;
using engine::IoRequest;
using engine::Submitted;

// One engine over one file, and memory full of ones to write.
class FaultyEngineTest : public ::testing::Test {
 protected:
  FaultyEngineTest() {
    for (std::byte& byte : memory_.bytes()) byte = std::byte{1};
  }

  std::unique_ptr<FaultyEngine> Make(FaultScript script) {
    return std::make_unique<FaultyEngine>(
        std::make_unique<MemoryEngine>(MemoryEngineOptions{.depth = 2}), std::move(script), trace_);
  }
  [[nodiscard]] IoRequest Write(std::uint64_t offset, std::uint64_t tag) const {
    return {.fd = file_.fd(), .data = memory_.data(), .length = 4096, .offset = offset, .tag = tag};
  }
  // Submits one write and returns what comes back for it.
  std::int64_t ResultOfOne(FaultScript script) {
    const auto engine = Make(std::move(script));
    IoCompletion completion;
    const auto submitted = engine->Submit(Write(0, 7), &completion);
    EXPECT_EQ(submitted, Submitted::kQueued);
    EXPECT_EQ(engine->Reap({&completion, 1}), 1U);
    EXPECT_EQ(completion.tag, 7U);
    return completion.result;
  }

  const MemoryFile file_;
  const AlignedMemory memory_{4096};
  const std::shared_ptr<IoTrace> trace_ = std::make_shared<IoTrace>();
};

TEST_F(FaultyEngineTest, ShortCountsAreReallyWritten) {
  EXPECT_EQ(ResultOfOne(FaultAt(0, Fault::Short(511))), 511);
  EXPECT_EQ(file_.Bytes(), std::vector<std::byte>(511, std::byte{1}));
}

TEST_F(FaultyEngineTest, FailedWritesLeaveNoBytes) {
  EXPECT_EQ(ResultOfOne(FaultAt(0, Fault::Reports(-EIO))), -EIO);
  EXPECT_EQ(ResultOfOne(FaultAt(0, Fault::Reports(0))), 0);
  EXPECT_TRUE(file_.Bytes().empty());
}

TEST_F(FaultyEngineTest, OnlyTheChosenSubmissionFails) {
  const auto engine = Make(FaultAt(1, Fault::Reports(-ENOSPC)));
  std::vector<std::int64_t> results;
  for (std::uint64_t tag = 0; tag < 3; ++tag) {
    IoCompletion completion;
    ASSERT_EQ(engine->Submit(Write(tag * 4096, tag), &completion), Submitted::kQueued);
    ASSERT_EQ(engine->Reap({&completion, 1}), 1U);
    results.push_back(completion.result);
  }
  EXPECT_EQ(results, (std::vector<std::int64_t>{4096, -ENOSPC, 4096}));
}

TEST_F(FaultyEngineTest, FaultsCanBeAnsweredAtOnce) {
  auto script = FaultAt(0, Fault::Reports(-EAGAIN));
  script.at_once = true;
  const auto engine = Make(script);
  IoCompletion completion;
  EXPECT_EQ(engine->Submit(Write(0, 9), &completion), Submitted::kCompleted);
  EXPECT_EQ(completion.tag, 9U);
  EXPECT_EQ(completion.result, -EAGAIN);
}

TEST_F(FaultyEngineTest, FailedEnginesAndBusyOnesSubmitNothing) {
  IoCompletion completion;
  EXPECT_FALSE(Make(FaultAt(0, Fault::EngineError(EPERM)))->Submit(Write(0, 0), &completion));
  EXPECT_EQ(Make(FaultAt(0, Fault::Busy()))->Submit(Write(0, 0), &completion), Submitted::kBusy);
  EXPECT_TRUE(trace_->empty());
  EXPECT_TRUE(file_.Bytes().empty());
}

TEST_F(FaultyEngineTest, ItsOwnAnswersCountAgainstTheDepth) {
  const auto engine = Make(FaultAlways(Fault::Reports(-EINTR)));
  IoCompletion completion;
  EXPECT_EQ(engine->Submit(Write(0, 0), &completion), Submitted::kQueued);
  EXPECT_EQ(engine->Submit(Write(0, 1), &completion), Submitted::kQueued);
  EXPECT_EQ(engine->Submit(Write(0, 2), &completion), Submitted::kBusy);
  EXPECT_EQ(InFlightCount(*trace_), 2U);
}

TEST_F(FaultyEngineTest, FaultsAndForwardedWritesShareTheDepth) {
  const auto engine = Make(FaultAt(2, Fault::Reports(-EINTR)));
  IoCompletion completion;
  EXPECT_EQ(engine->Submit(Write(0, 0), &completion), Submitted::kQueued);
  EXPECT_EQ(engine->Submit(Write(4096, 1), &completion), Submitted::kQueued);
  EXPECT_EQ(engine->Submit(Write(8192, 2), &completion), Submitted::kBusy);
}

TEST_F(FaultyEngineTest, ReapFaultsHappenWhenTheScriptSaysSo) {
  auto script = FaultAlways(Fault{});
  script.on_reap = [](std::uint64_t nth) {
    if (nth == 0) return ReapFault::kNothing;
    return nth == 1 ? ReapFault::kEngineError : ReapFault::kNone;
  };
  const auto engine = Make(script);
  IoCompletion completion;
  ASSERT_EQ(engine->Submit(Write(0, 0), &completion), Submitted::kQueued);
  EXPECT_EQ(engine->Reap({&completion, 1}), 0U);
  EXPECT_FALSE(engine->Reap({&completion, 1}));
  EXPECT_EQ(engine->Reap({&completion, 1}), 1U);
}

TEST(IoTrace, RequestsForBytesThatAreWrittenAreFound) {
  using enum IoEvent::Kind;
  const auto at = [](std::uint64_t offset, std::uint64_t length) {
    return IoRequest{.length = length, .offset = offset};
  };
  const IoEvent first{kSubmitted, at(0, 4096)};
  EXPECT_TRUE(NoByteIsSubmittedTwice({first, {kSubmitted, at(4096, 512)}}, 512));
  EXPECT_FALSE(NoByteIsSubmittedTwice({first, {kSubmitted, at(3584, 512)}}, 512)) << "in flight";
  EXPECT_FALSE(NoByteIsSubmittedTwice({first, {kFinished, at(0, 4096), 4096}, first}, 512));
  EXPECT_TRUE(NoByteIsSubmittedTwice({first, {kFinished, at(0, 4096), -EINTR}, first}, 512));
  const IoEvent partly{kFinished, at(0, 4096), 1000};
  EXPECT_TRUE(NoByteIsSubmittedTwice({first, partly, {kSubmitted, at(512, 3584)}}, 512));
  EXPECT_FALSE(NoByteIsSubmittedTwice({first, partly, {kSubmitted, at(512, 3584)}}, 1));
  EXPECT_FALSE(NoByteIsSubmittedTwice({first, partly, first}, 512));
}

TEST(IoTrace, MisalignedRequestsAreFound) {
  const AlignedMemory memory(8192);
  const auto trace = [&](std::size_t address, std::uint64_t offset, std::uint64_t length) {
    return IoTrace{
        {.request = {.data = memory.data() + address, .length = length, .offset = offset}}};
  };
  const plan::DeviceLimits limits{.memory_align = 512, .offset_align = 4096};
  EXPECT_TRUE(EveryRequestIsAligned(trace(512, 4096, 8192), limits));
  EXPECT_FALSE(EveryRequestIsAligned(trace(256, 4096, 8192), limits));
  EXPECT_FALSE(EveryRequestIsAligned(trace(512, 512, 8192), limits));
  EXPECT_FALSE(EveryRequestIsAligned(trace(512, 4096, 512), limits));
}

}  // namespace
}  // namespace fastpersist::testing
