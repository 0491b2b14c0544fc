// SPDX-License-Identifier: Apache-2.0
// The reading side of CheckedQueue: what each answer of an engine makes of a read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/checked_queue.h"
#include "testing/aligned_memory.h"
#include "testing/faulty_engine.h"
#include "testing/memory_engine.h"
#include "testing/seed.h"

namespace fastpersist::pipeline {
namespace {

using engine::IoEngine;
using engine::IoRequest;
using fastpersist::testing::AlignedMemory;
using fastpersist::testing::Between;
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
using fastpersist::testing::Random;
using fastpersist::testing::ReapFault;
using fastpersist::testing::RecoverableFaults;
using fastpersist::testing::Seed;
using fastpersist::testing::SubmittedCount;
using ::testing::HasSubstr;

constexpr std::uint64_t kBlock = 8192;
constexpr std::uint64_t kBlocks = 20;
constexpr std::uint64_t kTail = 5000;
constexpr std::uint64_t kSize = (kBlocks - 1) * kBlock + kTail;
constexpr unsigned kSlots = 5;
constexpr plan::DeviceLimits kDirect{.memory_align = 512, .offset_align = 512, .direct = true};
constexpr plan::DeviceLimits kBuffered{.memory_align = 1, .offset_align = 1, .direct = false};

struct Outcome {
  std::optional<Error> error;
  std::uint64_t blocks = 0;  // that arrived, in order, before the error
  bool engine_failed = false;
  bool lost = false;
  std::string left_direct;
};

// Reads a file of noise through a queue, block by block, over an engine that fails by a script. The
// last block of the file is not whole.
class ReadQueueTest : public ::testing::Test {
 protected:
  ReadQueueTest() {
    content_.FillWithNoise(random_);
    EXPECT_EQ(::pwrite(file_.fd(), content_.data(), kSize, 0), static_cast<ssize_t>(kSize));
  }

  /// Every block is compared at the moment at which the queue says that it is there.
  Outcome Receive(FaultScript script) {
    engine_ = std::make_unique<FaultyEngine>(
        std::make_unique<MemoryEngine>(fastpersist::testing::MemoryEngineOptions{
            .depth = depth_, .limits = limits_, .seed = random_()}),
        std::move(script), trace_);
    Outcome outcome;
    {
      CheckedQueue queue(engine_, File(), kSlots);
      const auto read = [&]() -> Result<void> {
        std::uint64_t started = 0;
        for (std::uint64_t i = 0; i < kBlocks; ++i) {
          for (; started < kBlocks && started < i + kSlots; ++started) {
            if (auto begun = Start(queue, started); !begun) return begun;
          }
          if (auto arrived = queue.Await(static_cast<unsigned>(i % kSlots)); !arrived) {
            return arrived;
          }
          ExpectBlock(i);
          ++outcome.blocks;
        }
        return queue.Drain();
      }();
      if (!read) outcome.error = read.error();
      outcome.engine_failed = queue.engine_failed();
      outcome.lost = queue.writes_lost();
      outcome.left_direct = queue.left_direct();
    }
    return outcome;
  }

  Result<void> Start(CheckedQueue& queue, std::uint64_t block) {
    const auto buffer = BufferOf(block);
    std::ranges::fill(buffer, std::byte{0xEE});
    return queue.StartRead(static_cast<unsigned>(block % kSlots), block * kBlock, buffer,
                           block + 1 == kBlocks ? kTail : kBlock);
  }

  [[nodiscard]] std::span<std::byte> BufferOf(std::uint64_t block) const {
    return buffers_.bytes().subspan(block % kSlots * kBlock, kBlock);
  }

  void ExpectBlock(std::uint64_t block) const {
    const std::uint64_t length = block + 1 == kBlocks ? kTail : kBlock;
    EXPECT_TRUE(std::ranges::equal(BufferOf(block).first(length),
                                   content_.bytes().subspan(block * kBlock, length)))
        << "block " << block;
  }

  QueueFile File() {
    return {.fd = file_.fd(),
            .path = "model.pt",
            .limits = limits_,
            .leave_direct =
                [this] {
                  EXPECT_EQ(InFlightCount(*trace_), 0U) << "direct I/O left before the drain";
                  ++left_direct_calls_;
                  return leave_direct_result_;
                },
            .kind = IoRequest::Kind::kRead};
  }

  void ExpectWhole(const Outcome& outcome) const {
    EXPECT_FALSE(outcome.error) << outcome.error->Message();
    EXPECT_EQ(outcome.blocks, kBlocks);
    EXPECT_EQ(InFlightCount(*trace_), 0U);
    EXPECT_TRUE(EveryRequestIsAligned(*trace_, limits_));
  }

  const Seed seed_;
  Random random_{seed_.value()};
  plan::DeviceLimits limits_ = kDirect;
  unsigned depth_ = 3;
  int leave_direct_result_ = 0;
  int left_direct_calls_ = 0;
  const MemoryFile file_;
  const AlignedMemory content_{kBlocks * kBlock};
  const AlignedMemory buffers_{kSlots * kBlock};
  const std::shared_ptr<IoTrace> trace_ = std::make_shared<IoTrace>();
  std::unique_ptr<IoEngine> engine_;
};

TEST_F(ReadQueueTest, EveryBlockIsReadOnceWhenNothingFails) {
  ExpectWhole(Receive(FaultAlways(Fault{})));
  EXPECT_EQ(SubmittedCount(*trace_), kBlocks);
}

TEST_F(ReadQueueTest, TheEndOfTheFileWithinTheLastBlockIsNoError) {
  ExpectWhole(Receive(FaultAlways(Fault{})));
  EXPECT_EQ(trace_->back().kind, fastpersist::testing::IoEvent::Kind::kFinished);
  limits_ = kBuffered;
  trace_->clear();
  ExpectWhole(Receive(FaultAlways(Fault{})));
}

TEST_F(ReadQueueTest, NothingIsLostForAnyDepth) {
  for (depth_ = 1; depth_ <= 9; ++depth_) {
    trace_->clear();
    ExpectWhole(Receive(FaultAlways(Fault{})));
  }
}

TEST_F(ReadQueueTest, NothingIsLostWhenMemoryNeedsMoreThanTheOffset) {
  for (const auto& limits : {plan::DeviceLimits{.memory_align = 4096, .offset_align = 512},
                             plan::DeviceLimits{.memory_align = 4, .offset_align = 4096},
                             plan::DeviceLimits{.memory_align = 1, .offset_align = 1}}) {
    limits_ = limits;
    limits_.direct = true;
    for (const std::uint64_t bytes : {512U, 4096U, 4608U}) {
      trace_->clear();
      ExpectWhole(Receive(FaultAt(3, Fault::Short(bytes))));
      EXPECT_EQ(left_direct_calls_, 0);
    }
  }
}

class ReadQueueShortTest : public ReadQueueTest,
                           public ::testing::WithParamInterface<std::uint64_t> {};

TEST_P(ReadQueueShortTest, AShortDirectReadGoesOn) {
  for (const std::uint64_t position : {0U, 6U, 19U}) {
    trace_->clear();
    const Outcome outcome = Receive(FaultAt(position, Fault::Short(GetParam())));
    ExpectWhole(outcome);
    EXPECT_EQ(outcome.left_direct, "");
  }
}

TEST_P(ReadQueueShortTest, AShortBufferedReadGoesOnWhereItEnded) {
  limits_ = kBuffered;
  ExpectWhole(Receive(FaultAt(6, Fault::Short(GetParam()))));
  EXPECT_EQ(SubmittedCount(*trace_), kBlocks + 1);
}

TEST_P(ReadQueueShortTest, ADeviceThatIsAlwaysShortIsReadToTheEnd) {
  if (GetParam() < 64) GTEST_SKIP() << "skipped: a hundred thousand reads";
  limits_ = GetParam() < 512 ? kBuffered : kDirect;  // the rest: see the test below
  ExpectWhole(Receive(FaultAlways(Fault::Short(GetParam()))));
}

INSTANTIATE_TEST_SUITE_P(Counts, ReadQueueShortTest,
                         ::testing::Values(1, 2, 511, 512, 513, 4095, 4096, kBlock / 2,
                                           kBlock - 512, kBlock - 1));

TEST_F(ReadQueueTest, EveryLengthOfAShortReadGoesOn) {
  limits_.offset_align = 1;
  limits_.memory_align = 1;
  for (std::uint64_t bytes = 1; bytes < kBlock; bytes += Between(random_, 1, 97)) {
    trace_->clear();
    ExpectWhole(Receive(FaultAt(bytes % kBlocks, Fault::Short(bytes))));
    ASSERT_FALSE(HasFailure()) << bytes;
  }
}

TEST_F(ReadQueueTest, ReadsThatKeepEndingWithinABlockAreFinishedBuffered) {
  const Outcome outcome = Receive(FaultAlways(Fault::Short(511)));
  EXPECT_FALSE(outcome.error);
  EXPECT_EQ(outcome.blocks, kBlocks);
  EXPECT_THAT(outcome.left_direct, HasSubstr("reads"));
  EXPECT_THAT(outcome.left_direct, HasSubstr("within a block"));
  EXPECT_EQ(left_direct_calls_, 1);
}

TEST_F(ReadQueueTest, InterruptionsAndAgainAreRepeated) {
  for (const std::int64_t result : {-EINTR, -EAGAIN}) {
    for (const std::uint64_t position : {0U, 4U, 19U}) {
      trace_->clear();
      ExpectWhole(Receive(FaultAt(position, Fault::Reports(result))));
      EXPECT_EQ(SubmittedCount(*trace_), kBlocks + 1);
    }
  }
}

TEST_F(ReadQueueTest, AMixtureOfEverythingThatPassesLosesNothing) {
  for (int round = 0; round < 20; ++round) {
    trace_->clear();
    const Outcome outcome = Receive(RecoverableFaults(random_()));
    EXPECT_FALSE(outcome.error) << outcome.error->Message();
    EXPECT_EQ(outcome.blocks, kBlocks);
    EXPECT_EQ(InFlightCount(*trace_), 0U);
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
}

TEST_F(ReadQueueTest, ZeroBytesMeanThatTheFileIsShorterThanItWas) {
  const Outcome outcome = Receive(FaultAt(2, Fault::Reports(0)));
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->code, ErrorCode::kCorrupt);
  EXPECT_EQ(outcome.error->operation, "read");
  EXPECT_EQ(outcome.error->path, "model.pt");
  EXPECT_EQ(outcome.error->offset, 2 * kBlock);
  EXPECT_EQ(outcome.error->system_errno, 0);
  EXPECT_THAT(outcome.error->detail, HasSubstr("it was longer"));
  EXPECT_FALSE(outcome.engine_failed);
}

TEST_F(ReadQueueTest, AFileThatEndsEarlyIsToldFromOneThatIsShort) {
  for (const bool direct : {true, false}) {
    limits_ = direct ? kDirect : kBuffered;
    for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{1}, 7 * kBlock,
                                     7 * kBlock + 512, 7 * kBlock + 700, kSize - 1}) {
      file_.Truncate(size);
      trace_->clear();
      const Outcome outcome = Receive(FaultAlways(Fault{}));
      ASSERT_TRUE(outcome.error) << size;
      EXPECT_EQ(outcome.error->code, ErrorCode::kCorrupt);
      EXPECT_THAT(outcome.error->detail, HasSubstr("it was longer"));
      ASSERT_TRUE(outcome.error->offset);
      EXPECT_GE(*outcome.error->offset, size / kBlock * kBlock);
      EXPECT_LE(outcome.blocks, size / kBlock) << "no block that is not there was taken for one";
      file_.Truncate(0);
      ASSERT_EQ(::pwrite(file_.fd(), content_.data(), kSize, 0), static_cast<ssize_t>(kSize));
    }
  }
}

TEST_F(ReadQueueTest, AnErrorOfTheDeviceIsReportedOnceWithItsPlace) {
  for (const std::uint64_t position : {0U, 7U, 19U}) {
    depth_ = 1;
    trace_->clear();
    const Outcome outcome = Receive(FaultAt(position, Fault::Reports(-EIO)));
    ASSERT_TRUE(outcome.error);
    EXPECT_EQ(outcome.error->code, ErrorCode::kStorage);
    EXPECT_EQ(outcome.error->operation, "read");
    EXPECT_EQ(outcome.error->system_errno, EIO);
    EXPECT_EQ(outcome.error->offset, position * kBlock);
    EXPECT_LE(outcome.blocks, position);
    EXPECT_FALSE(outcome.engine_failed);
    EXPECT_FALSE(outcome.lost);
    EXPECT_EQ(InFlightCount(*trace_), 0U) << "what was in flight was drained";
  }
}

TEST_F(ReadQueueTest, TheFirstOfSeveralErrorsIsKept) {
  const Outcome outcome = Receive(
      {.on_submit = [](std::uint64_t nth,
                       const IoRequest&) { return Fault::Reports(nth == 0 ? -EIO : -ENXIO); },
       .at_once = true});
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->system_errno, EIO);
  EXPECT_EQ(outcome.error->offset, 0U);
}

TEST_F(ReadQueueTest, AnAlignedReadThatIsRefusedGoesOnBuffered) {
  for (const std::uint64_t position : {0U, 6U, 19U}) {
    trace_->clear();
    left_direct_calls_ = 0;
    const Outcome outcome = Receive(FaultAt(position, Fault::Reports(-EINVAL)));
    ExpectWhole(outcome);
    EXPECT_EQ(left_direct_calls_, 1);
    EXPECT_THAT(outcome.left_direct, HasSubstr("refused an aligned direct read"));
    EXPECT_EQ(engine_->kind(), Engine::kBuffered);
  }
}

TEST_F(ReadQueueTest, RefusedAndShortAtOnceLosesNothing) {
  const Outcome outcome = Receive({.on_submit = [](std::uint64_t nth, const IoRequest&) {
    if (nth % 3 == 1) return Fault::Short(600);
    return nth == 5 || nth == 6 ? Fault::Reports(-EINVAL) : Fault{};
  }});
  EXPECT_FALSE(outcome.error);
  EXPECT_EQ(outcome.blocks, kBlocks);
  EXPECT_EQ(left_direct_calls_, 1);
}

TEST_F(ReadQueueTest, DirectIoThatCannotBeLeftIsAnErrorWithTheWayOut) {
  leave_direct_result_ = -EIO;
  const Outcome outcome = Receive(FaultAt(1, Fault::Reports(-EINVAL)));
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->operation, "turn direct I/O off");
  EXPECT_EQ(outcome.error->system_errno, EIO);
  EXPECT_THAT(outcome.error->advice, HasSubstr("read with direct=False"));
}

TEST_F(ReadQueueTest, ABufferedReadThatIsRefusedIsAnError) {
  limits_ = kBuffered;
  const Outcome outcome = Receive(FaultAt(1, Fault::Reports(-EINVAL)));
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->system_errno, EINVAL);
  EXPECT_EQ(left_direct_calls_, 0);
}

TEST_F(ReadQueueTest, AnEngineThatRefusesToSubmitIsTheEnginesFailure) {
  const Outcome outcome = Receive(FaultAt(6, Fault::EngineError(EPERM)));
  ASSERT_TRUE(outcome.error);
  EXPECT_TRUE(outcome.engine_failed);
  EXPECT_FALSE(outcome.lost) << "what was in flight could be waited for";
  EXPECT_EQ(InFlightCount(*trace_), 0U);
}

TEST_F(ReadQueueTest, AnEngineThatCannotReapMayStillWriteIntoTheMemory) {
  const Outcome outcome = Receive(
      {.on_submit = [](std::uint64_t, const IoRequest&) { return Fault{}; },
       .on_reap =
           [](std::uint64_t nth) { return nth < 2 ? ReapFault::kNone : ReapFault::kEngineError; }});
  ASSERT_TRUE(outcome.error);
  EXPECT_TRUE(outcome.engine_failed);
  EXPECT_TRUE(outcome.lost);
  EXPECT_GT(InFlightCount(*trace_), 0U);
}

TEST_F(ReadQueueTest, AwaitOfOneReadDoesNotWaitForLaterOnes) {
  // The second read never ends while the first is asked for.
  engine_ = std::make_unique<FaultyEngine>(
      std::make_unique<MemoryEngine>(
          fastpersist::testing::MemoryEngineOptions{.depth = 1, .limits = limits_}),
      FaultAlways(Fault{}), trace_);
  CheckedQueue queue(engine_, File(), kSlots);
  ASSERT_TRUE(Start(queue, 0));
  ASSERT_TRUE(Start(queue, 1));
  ASSERT_TRUE(queue.Await(0));
  ExpectBlock(0);
  EXPECT_LE(SubmittedCount(*trace_), 2U);
  ASSERT_TRUE(queue.Await(1));
  ExpectBlock(1);
  ASSERT_TRUE(queue.Await(0)) << "asked again, it is still there";
}

}  // namespace
}  // namespace fastpersist::pipeline
