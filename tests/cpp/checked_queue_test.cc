// SPDX-License-Identifier: Apache-2.0
#include "pipeline/checked_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "testing/aligned_memory.h"
#include "testing/faulty_engine.h"
#include "testing/memory_engine.h"
#include "testing/seed.h"

namespace fastpersist::pipeline {
namespace {

using engine::IoEngine;
using fastpersist::testing::AlignedMemory;
using fastpersist::testing::EveryRequestIsAligned;
using fastpersist::testing::Fault;
using fastpersist::testing::FaultAlways;
using fastpersist::testing::FaultAt;
using fastpersist::testing::FaultScript;
using fastpersist::testing::FaultyEngine;
using fastpersist::testing::InFlightCount;
using fastpersist::testing::IoTrace;
using fastpersist::testing::MemoryEngine;
using fastpersist::testing::MemoryFile;
using fastpersist::testing::NoByteIsSubmittedTwice;
using fastpersist::testing::Random;
using fastpersist::testing::ReapFault;
using fastpersist::testing::Seed;
using fastpersist::testing::SubmittedCount;
using ::testing::HasSubstr;

constexpr std::uint64_t kBlock = 8192;
constexpr plan::DeviceLimits kDirect{.memory_align = 512, .offset_align = 512, .direct = true};
constexpr plan::DeviceLimits kBuffered{.memory_align = 1, .offset_align = 1, .direct = false};

struct Outcome {
  std::optional<Error> error;
  bool engine_failed = false;
  std::string left_direct;
};

// Sends noise through a queue, block by block, over an engine that fails by a script.
class CheckedQueueTest : public ::testing::Test {
 protected:
  CheckedQueueTest() { content_.FillWithNoise(random_); }

  /// Writes that many blocks; the last one has only tail bytes that matter.
  Outcome Send(FaultScript script, std::uint64_t blocks, std::uint64_t tail = kBlock) {
    engine_ = std::make_unique<FaultyEngine>(
        std::make_unique<MemoryEngine>(fastpersist::testing::MemoryEngineOptions{
            .depth = depth_, .limits = limits_, .seed = blocks}),
        std::move(script), trace_);
    Outcome outcome;
    {
      CheckedQueue queue(engine_, File(), /*slots=*/5);
      const auto sent = [&]() -> Result<void> {
        for (std::uint64_t i = 0; i < blocks; ++i) {
          const auto slot = queue.AcquireSlot();
          if (!slot) return std::unexpected(slot.error());
          const auto data = content_.bytes().subspan(i * kBlock, kBlock);
          const std::uint64_t length = i + 1 == blocks ? tail : kBlock;
          if (auto started = queue.Start(*slot, i * kBlock, data, length); !started) return started;
        }
        return queue.Drain();
      }();
      if (!sent) outcome.error = sent.error();
      outcome.engine_failed = queue.engine_failed();
      outcome.left_direct = queue.left_direct();
    }
    size_ = (blocks - 1) * kBlock + tail;
    return outcome;
  }

  QueueFile File() {
    return {.fd = file_.fd(), .path = "model.pt", .limits = limits_, .leave_direct = [this] {
              EXPECT_EQ(InFlightCount(*trace_), 0U) << "direct I/O left before the drain";
              ++left_direct_calls_;
              return leave_direct_result_;
            }};
  }

  void ExpectWhole() {
    file_.Truncate(size_);
    const auto expected = content_.bytes().first(size_);
    EXPECT_TRUE(std::ranges::equal(file_.Bytes(), expected));
    ExpectQuiet();
  }
  void ExpectQuiet() const {
    EXPECT_EQ(InFlightCount(*trace_), 0U);
    EXPECT_TRUE(NoByteIsSubmittedTwice(*trace_, limits_.offset_align));
    EXPECT_TRUE(EveryRequestIsAligned(*trace_, limits_));
  }

  const Seed seed_;
  Random random_{seed_.value()};
  plan::DeviceLimits limits_ = kDirect;
  unsigned depth_ = 3;
  int leave_direct_result_ = 0;
  int left_direct_calls_ = 0;
  std::uint64_t size_ = 0;
  const MemoryFile file_;
  const AlignedMemory content_{40 * kBlock};
  const std::shared_ptr<IoTrace> trace_ = std::make_shared<IoTrace>();
  std::unique_ptr<IoEngine> engine_;
};

TEST_F(CheckedQueueTest, WritesEveryBlockOnceWhenNothingFails) {
  EXPECT_FALSE(Send(FaultAlways(Fault{}), 20).error);
  EXPECT_EQ(SubmittedCount(*trace_), 20U);
  ExpectWhole();
}

TEST_F(CheckedQueueTest, WritesThePaddingOfADirectTailAndNoneOfABufferedOne) {
  EXPECT_FALSE(Send(FaultAlways(Fault{}), 2, 100).error);
  EXPECT_EQ(file_.Bytes().size(), 2 * kBlock);
  ExpectWhole();

  limits_ = kBuffered;
  trace_->clear();
  file_.Truncate(0);
  EXPECT_FALSE(Send(FaultAlways(Fault{}), 2, 100).error);
  EXPECT_EQ(file_.Bytes().size(), kBlock + 100);
  ExpectWhole();
}

class CheckedQueueShortTest : public CheckedQueueTest,
                              public ::testing::WithParamInterface<std::uint64_t> {};

TEST_P(CheckedQueueShortTest, ContinuesShortDirectWrites) {
  for (const std::uint64_t position : {0U, 6U, 19U}) {
    trace_->clear();
    file_.Truncate(0);
    const Outcome outcome = Send(FaultAt(position, Fault::Short(GetParam())), 20, 5000);
    EXPECT_FALSE(outcome.error);
    EXPECT_EQ(outcome.left_direct, "");
    ExpectWhole();
  }
}

TEST_P(CheckedQueueShortTest, ContinuesShortBufferedWrites) {
  limits_ = kBuffered;
  EXPECT_FALSE(Send(FaultAt(6, Fault::Short(GetParam())), 20, 5000).error);
  EXPECT_EQ(SubmittedCount(*trace_), 21U);
  ExpectWhole();
}

TEST_P(CheckedQueueShortTest, SurvivesADeviceThatIsAlwaysShort) {
  limits_ = GetParam() < 512 ? kBuffered : kDirect;  // the rest: see the test below
  EXPECT_FALSE(Send(FaultAlways(Fault::Short(GetParam())), 3, 700).error);
  ExpectWhole();
}

INSTANTIATE_TEST_SUITE_P(Counts, CheckedQueueShortTest,
                         ::testing::Values(1, 511, 512, 4095, kBlock / 2, kBlock - 1));

TEST_F(CheckedQueueTest, AShortTailThatHoldsAllItsBytesIsDone) {
  EXPECT_FALSE(Send(FaultAt(1, Fault::Short(700)), 2, 700).error);
  EXPECT_EQ(SubmittedCount(*trace_), 2U);
  ExpectWhole();
}

TEST_F(CheckedQueueTest, LeavesDirectWhenWritesKeepEndingInsideABlock) {
  const Outcome outcome = Send(FaultAlways(Fault::Short(511)), 4);
  EXPECT_FALSE(outcome.error);
  EXPECT_THAT(outcome.left_direct, HasSubstr("within a block"));
  EXPECT_EQ(left_direct_calls_, 1);
  EXPECT_LT(SubmittedCount(*trace_), 100U);
  ExpectWhole();
}

TEST_F(CheckedQueueTest, KeepsMemoryAlignedWhenItNeedsMoreThanTheOffset) {
  limits_ = {.memory_align = 4096, .offset_align = 512, .direct = true};
  for (const std::uint64_t bytes : {512U, 4096U, 4608U}) {
    trace_->clear();
    file_.Truncate(0);
    EXPECT_FALSE(Send(FaultAt(1, Fault::Short(bytes)), 3).error);
    EXPECT_EQ(left_direct_calls_, 0);
    file_.Truncate(size_);
    EXPECT_TRUE(std::ranges::equal(file_.Bytes(), content_.bytes().first(size_)));
    EXPECT_TRUE(EveryRequestIsAligned(*trace_, limits_));
    EXPECT_TRUE(NoByteIsSubmittedTwice(*trace_, 4096));
  }
}

TEST_F(CheckedQueueTest, ZeroBytesAreAnErrorAndNeverASpin) {
  const Outcome outcome = Send(FaultAt(2, Fault::Reports(0)), 10);
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->operation, "write");
  EXPECT_EQ(outcome.error->offset, 2 * kBlock);
  EXPECT_EQ(outcome.error->system_errno, EIO);
  EXPECT_THAT(outcome.error->Message(), HasSubstr("0 bytes"));
  EXPECT_FALSE(outcome.engine_failed);
  EXPECT_LE(SubmittedCount(*trace_), 10U);
  ExpectQuiet();
}

TEST_F(CheckedQueueTest, InterruptedAndPostponedWritesAreTriedAgain) {
  for (const int result : {-EINTR, -EAGAIN}) {
    trace_->clear();
    file_.Truncate(0);
    FaultScript script = FaultAlways(Fault{});
    script.on_submit = [=](std::uint64_t nth, const engine::IoRequest&) {
      return nth % 2 == 0 && nth < 30 ? Fault::Reports(result) : Fault{};
    };
    EXPECT_FALSE(Send(script, 20).error);
    EXPECT_EQ(SubmittedCount(*trace_), 35U);
    ExpectWhole();
  }
}

TEST_F(CheckedQueueTest, EndlessInterruptionsEndInAnError) {
  depth_ = 1;
  const Outcome outcome = Send(FaultAlways(Fault::Reports(-EINTR)), 1);
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->system_errno, EINTR);
  ExpectQuiet();
}

class CheckedQueueInvalidTest : public CheckedQueueTest,
                                public ::testing::WithParamInterface<std::uint64_t> {};

TEST_P(CheckedQueueInvalidTest, EinvalOnAnAlignedDirectWriteGoesOnBuffered) {
  const Outcome outcome = Send(FaultAt(GetParam(), Fault::Reports(-EINVAL)), 20, 5000);
  EXPECT_FALSE(outcome.error);
  EXPECT_THAT(outcome.left_direct,
              HasSubstr("offset " + std::to_string(GetParam() * kBlock) + " (EINVAL)"));
  EXPECT_EQ(left_direct_calls_, 1);
  EXPECT_EQ(engine_->kind(), Engine::kBuffered);
  ExpectWhole();
}

INSTANTIATE_TEST_SUITE_P(Positions, CheckedQueueInvalidTest, ::testing::Values(0, 1, 6, 18, 19));

TEST_F(CheckedQueueTest, EinvalOnSeveralWritesLeavesDirectOnce) {
  const Outcome outcome = Send(FaultAlways(Fault::Reports(-EINVAL)), 10);
  EXPECT_FALSE(outcome.error);
  EXPECT_EQ(left_direct_calls_, 1);
  ExpectWhole();
}

TEST_F(CheckedQueueTest, EinvalOnABufferedFileIsAnError) {
  limits_ = kBuffered;
  const Outcome outcome = Send(FaultAt(1, Fault::Reports(-EINVAL)), 4);
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->system_errno, EINVAL);
  EXPECT_EQ(left_direct_calls_, 0);
  ExpectQuiet();
}

TEST_F(CheckedQueueTest, DirectThatCannotBeLeftIsAnError) {
  leave_direct_result_ = -EBADF;
  const Outcome outcome = Send(FaultAt(1, Fault::Reports(-EINVAL)), 4);
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->operation, "turn direct I/O off");
  EXPECT_EQ(outcome.error->system_errno, EBADF);
  EXPECT_EQ(outcome.error->path, "model.pt");
  EXPECT_EQ(left_direct_calls_, 1);
  ExpectQuiet();
}

class CheckedQueueErrorTest : public CheckedQueueTest, public ::testing::WithParamInterface<int> {};

TEST_P(CheckedQueueErrorTest, TheFirstErrorEndsTheFileAndNamesItsOffset) {
  FaultScript script = FaultAt(7, Fault::Reports(-GetParam()));
  // What fails later must not replace it.
  script.on_submit = [=, first = script.on_submit](std::uint64_t nth, const auto& request) {
    return nth > 7 ? Fault::Reports(-EDOM) : first(nth, request);
  };
  for (const bool at_once : {false, true}) {
    script.at_once = at_once;
    depth_ = at_once ? 3 : 1;
    trace_->clear();
    const Outcome outcome = Send(script, 20);
    ASSERT_TRUE(outcome.error);
    EXPECT_EQ(outcome.error->code, ErrorCode::kStorage);
    EXPECT_EQ(outcome.error->operation, "write");
    EXPECT_EQ(outcome.error->path, "model.pt");
    EXPECT_EQ(outcome.error->offset, 7 * kBlock);
    EXPECT_EQ(outcome.error->system_errno, GetParam());
    EXPECT_NE(outcome.error->advice, "");
    EXPECT_FALSE(outcome.engine_failed);
    EXPECT_EQ(SubmittedCount(*trace_), 8U) << "something was started after the error";
    ExpectQuiet();
  }
}

INSTANTIATE_TEST_SUITE_P(Errnos, CheckedQueueErrorTest,
                         ::testing::Values(EIO, ENOSPC, EDQUOT, EFBIG, EROFS));

TEST_F(CheckedQueueTest, OfSeveralErrorsThatComeTogetherTheFirstIsKept) {
  depth_ = 5;
  FaultScript script = FaultAlways(Fault{});
  script.on_submit = [](std::uint64_t nth, const auto&) {
    return Fault::Reports(nth == 0 ? -EIO : -EDOM);
  };
  const Outcome outcome = Send(script, 5);
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->system_errno, EIO);
  EXPECT_EQ(outcome.error->offset, 0U);
  EXPECT_EQ(SubmittedCount(*trace_), 5U);
  ExpectQuiet();
}

TEST_F(CheckedQueueTest, DrainFinishesWhatIsPendingWhenNothingIsInFlight) {
  EXPECT_FALSE(Send(FaultAt(0, Fault::Busy()), 1).error);
  ExpectWhole();

  trace_->clear();
  file_.Truncate(0);
  FaultScript script = FaultAt(0, Fault::Reports(-EINVAL));
  script.at_once = true;
  EXPECT_FALSE(Send(script, 1).error);
  EXPECT_EQ(left_direct_calls_, 1);
  ExpectWhole();
}

TEST_F(CheckedQueueTest, EveryCallAfterAnErrorReturnsItAndStartsNothing) {
  engine_ = std::make_unique<FaultyEngine>(
      std::make_unique<MemoryEngine>(fastpersist::testing::MemoryEngineOptions{}),
      FaultAlways(Fault::Reports(-EIO)), trace_);
  CheckedQueue queue(engine_, File(), 4);
  const auto data = content_.bytes().first(kBlock);
  ASSERT_TRUE(queue.Start(*queue.AcquireSlot(), 0, data, kBlock));
  const unsigned second = *queue.AcquireSlot();
  EXPECT_FALSE(queue.Drain());
  EXPECT_FALSE(queue.Drain());
  const auto started = queue.Start(second, kBlock, data, kBlock);
  ASSERT_FALSE(started);
  EXPECT_EQ(started.error().offset, 0U);
  ASSERT_FALSE(queue.AcquireSlot());
  EXPECT_EQ(SubmittedCount(*trace_), 1U);
}

TEST_F(CheckedQueueTest, BusyEnginesAndEmptyReapsOnlyCostTime) {
  FaultScript script = FaultAlways(Fault{});
  script.on_submit = [](std::uint64_t nth, const auto&) {
    return nth % 3 == 0 ? Fault::Busy() : Fault{};
  };
  script.on_reap = [](std::uint64_t nth) {
    return nth % 3 != 0 ? ReapFault::kNothing : ReapFault::kNone;
  };
  EXPECT_FALSE(Send(script, 20).error);
  EXPECT_EQ(SubmittedCount(*trace_), 20U);
  ExpectWhole();
}

TEST_F(CheckedQueueTest, AnEngineRefusedAtSubmissionIsReportedAsSuch) {
  const Outcome outcome = Send(FaultAt(0, Fault::EngineError(EPERM)), 20);
  ASSERT_TRUE(outcome.error);
  EXPECT_TRUE(outcome.engine_failed);
  EXPECT_EQ(outcome.error->system_errno, EPERM);
  EXPECT_EQ(SubmittedCount(*trace_), 0U);
}

TEST_F(CheckedQueueTest, WhatIsInFlightIsDrainedWhenTheEngineRefusesMore) {
  // Else the next attempt would fill memory that the device still reads.
  depth_ = 5;
  const Outcome outcome = Send(FaultAt(4, Fault::EngineError(EPERM)), 20);
  EXPECT_TRUE(outcome.engine_failed);
  EXPECT_EQ(SubmittedCount(*trace_), 4U);
  ExpectQuiet();
}

TEST_F(CheckedQueueTest, AnEngineThatCannotBeReapedIsGivenUp) {
  FaultScript script = FaultAlways(Fault{});
  script.on_reap = [](std::uint64_t nth) {
    return nth >= 2 ? ReapFault::kEngineError : ReapFault::kNone;
  };
  const Outcome outcome = Send(script, 20);
  ASSERT_TRUE(outcome.error);
  EXPECT_TRUE(outcome.engine_failed);
  EXPECT_LT(SubmittedCount(*trace_), 20U);
}

TEST_F(CheckedQueueTest, ASlotComesBackOnlyWhenItsMemoryIsFree) {
  // The memory engine reads late: a slot that came back too early would show in the file.
  engine_ = std::make_unique<MemoryEngine>(fastpersist::testing::MemoryEngineOptions{.depth = 2});
  const AlignedMemory staging(3 * kBlock);
  CheckedQueue queue(engine_, File(), 3);
  for (std::uint64_t i = 0; i < 40; ++i) {
    const unsigned slot = *queue.AcquireSlot();
    const auto buffer = staging.bytes().subspan(slot * kBlock, kBlock);
    std::ranges::copy(content_.bytes().subspan(i * kBlock, kBlock), buffer.begin());
    ASSERT_TRUE(queue.Start(slot, i * kBlock, buffer, kBlock));
  }
  ASSERT_TRUE(queue.Drain());
  EXPECT_TRUE(std::ranges::equal(file_.Bytes(), content_.bytes()));
}

}  // namespace
}  // namespace fastpersist::pipeline
