// SPDX-License-Identifier: Apache-2.0
#include "pipeline/write_stream.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/choose.h"
#include "testing/aligned_memory.h"
#include "testing/allocation_count.h"
#include "testing/contract_file.h"
#include "testing/faulty_engine.h"
#include "testing/memory_engine.h"
#include "testing/seed.h"
#include "testing/streams.h"

namespace fastpersist::pipeline {
namespace {

using engine::IoEngine;
using fastpersist::testing::AlignedMemory;
using fastpersist::testing::AllocationCount;
using fastpersist::testing::Between;
using fastpersist::testing::ContractFile;
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
using fastpersist::testing::OnceIn;
using fastpersist::testing::Random;
using fastpersist::testing::RandomTestStream;
using fastpersist::testing::RecoverableFaults;
using fastpersist::testing::RenderPlainly;
using fastpersist::testing::Seed;
using fastpersist::testing::TestStream;
using fastpersist::testing::TestStreamBuilder;
using ::testing::HasSubstr;

// How one stream is written.
struct Setting {
  plan::DeviceLimits limits{.memory_align = 512, .offset_align = 512, .direct = true};
  std::uint64_t block = 8192;
  std::uint64_t slots = 4;
  unsigned depth = 3;
  std::uint64_t min_in_place = 4096;
  std::uint64_t seed = 1;
};

Setting RandomSetting(Random& random) {
  constexpr std::array<std::uint32_t, 5> kAlignments{1, 512, 4096, 16384, 65536};
  Setting setting;
  setting.limits = {.memory_align = kAlignments.at(Between(random, 0, 4)),
                    .offset_align = kAlignments.at(Between(random, 0, 4)),
                    .direct = !OnceIn(random, 5)};
  const std::uint64_t least =
      std::max<std::uint64_t>({setting.limits.memory_align, setting.limits.offset_align, 2048});
  setting.block = least * Between(random, 1, 3);
  setting.slots = Between(random, 1, 6);
  setting.depth = static_cast<unsigned>(Between(random, 1, 6));
  setting.min_in_place = Between(random, 1, 3 * setting.block);
  setting.seed = random();
  return setting;
}

// A write, and all that can be seen of it.
class Written {
 public:
  Written(const layout::Stream& stream, const Setting& setting, FaultScript script)
      : limits_(setting.limits) {
    std::unique_ptr<IoEngine> engine = std::make_unique<FaultyEngine>(
        std::make_unique<MemoryEngine>(fastpersist::testing::MemoryEngineOptions{
            .depth = setting.depth, .limits = setting.limits, .seed = setting.seed}),
        std::move(script), trace_);
    const AlignedMemory staging(setting.slots * setting.block);
    const auto plan = plan::PlanWrites(stream, {.begin = 0, .end = stream.size()},
                                       {.limits = setting.limits,
                                        .block_bytes = setting.block,
                                        .min_in_place_bytes = setting.min_in_place});
    outcome = WriteStream(stream, plan, setting.block,
                          {.fd = file_.fd(),
                           .path = "model.pt",
                           .limits = setting.limits,
                           .leave_direct = [] { return 0; }},
                          engine, staging.bytes());
    kind = engine->kind();
    if (!outcome.error) file_.Truncate(stream.size());
  }

  [[nodiscard]] std::vector<std::byte> Bytes() const { return file_.Bytes(); }
  [[nodiscard]] std::size_t InFlight() const { return InFlightCount(*trace_); }
  [[nodiscard]] const IoTrace& trace() const { return *trace_; }
  void ExpectOrderly() const {
    EXPECT_EQ(InFlight(), 0U);
    const std::uint64_t block = std::max(limits_.offset_align, limits_.memory_align);
    EXPECT_TRUE(NoByteIsSubmittedTwice(trace(), limits_.direct ? block : 1));
    if (limits_.direct) {
      EXPECT_TRUE(EveryRequestIsAligned(trace(), limits_));
    }
  }

  WriteOutcome outcome;
  Engine kind = Engine::kAuto;

 private:
  plan::DeviceLimits limits_;
  MemoryFile file_;
  std::shared_ptr<IoTrace> trace_ = std::make_shared<IoTrace>();
};

TEST(WriteStream, WritesAnyStreamForAnyDevice) {
  const Seed seed;
  Random random(seed.value());
  for (int round = 0; round < 100; ++round) {
    const Setting setting = RandomSetting(random);
    const TestStream made = RandomTestStream(random, Between(random, 1, 12 * setting.block));
    const Written written(made.stream, setting, FaultAlways(Fault{}));
    ASSERT_FALSE(written.outcome.error) << written.outcome.error->Message();
    EXPECT_EQ(written.outcome.left_direct, "");
    ASSERT_EQ(written.Bytes(), RenderPlainly(made.stream).bytes) << "round " << round;
    written.ExpectOrderly();
  }
}

TEST(WriteStream, GivesTheRightFileWhateverMixOfRecoverableFaultsHappens) {
  const Seed seed;
  Random random(seed.value());
  for (int round = 0; round < 150; ++round) {
    const Setting setting = RandomSetting(random);
    const TestStream made = RandomTestStream(random, Between(random, 1, 12 * setting.block));
    const Written written(made.stream, setting, RecoverableFaults(random()));
    ASSERT_FALSE(written.outcome.error) << written.outcome.error->Message();
    ASSERT_EQ(written.Bytes(), RenderPlainly(made.stream).bytes) << "round " << round;
    written.ExpectOrderly();
  }
}

TEST(WriteStream, GivesTheRightFileWhenDirectIoIsRefusedAmongOtherFaults) {
  const Seed seed;
  Random random(seed.value());
  for (int round = 0; round < 60; ++round) {
    Setting setting = RandomSetting(random);
    setting.limits.direct = true;
    const TestStream made = RandomTestStream(random, Between(random, 1, 12 * setting.block));
    FaultScript script = RecoverableFaults(random());
    const std::uint64_t first = Between(random, 0, 8);
    script.on_submit = [=, other = script.on_submit](std::uint64_t nth, const auto& request) {
      return nth >= first && nth < first + 3 ? Fault::Reports(-EINVAL) : other(nth, request);
    };
    const Written written(made.stream, setting, script);
    ASSERT_FALSE(written.outcome.error) << written.outcome.error->Message();
    ASSERT_EQ(written.Bytes(), RenderPlainly(made.stream).bytes) << "round " << round;
    written.ExpectOrderly();
  }
}

constexpr std::uint64_t kBlock = 8192;

// Twelve blocks, five of them in place.
TestStream TwelveBlocks() {
  TestStreamBuilder builder(1);
  builder.Generated(2 * kBlock).Memory(5 * kBlock).Late(100).GeneratedBody(4 * kBlock - 23);
  return std::move(builder).Finish();
}

class WriteStreamPositionTest : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(WriteStreamPositionTest, EinvalAtAnyWriteGoesOnBuffered) {
  const TestStream made = TwelveBlocks();
  FaultScript script = FaultAt(GetParam(), Fault::Reports(-EINVAL));
  for (const bool at_once : {false, true}) {
    script.at_once = at_once;
    const Written written(made.stream, {}, script);
    ASSERT_FALSE(written.outcome.error);
    EXPECT_THAT(written.outcome.left_direct, HasSubstr("EINVAL"));
    EXPECT_EQ(written.kind, Engine::kBuffered);
    EXPECT_EQ(written.Bytes(), RenderPlainly(made.stream).bytes);
    written.ExpectOrderly();
  }
}

TEST_P(WriteStreamPositionTest, AnErrorAtAnyWriteEndsTheSaveWithItsOffset) {
  const TestStream made = TwelveBlocks();
  for (const int system_errno : {EIO, ENOSPC, EDQUOT, EFBIG}) {
    const Written written(made.stream, {}, FaultAt(GetParam(), Fault::Reports(-system_errno)));
    ASSERT_TRUE(written.outcome.error);
    EXPECT_EQ(written.outcome.error->system_errno, system_errno);
    EXPECT_EQ(written.outcome.error->offset, GetParam() * kBlock);
    EXPECT_FALSE(written.outcome.engine_failed);
    written.ExpectOrderly();
  }
}

TEST_P(WriteStreamPositionTest, ARefusedEngineIsToldFromAFailedFile) {
  const TestStream made = TwelveBlocks();
  const Written written(made.stream, {}, FaultAt(GetParam(), Fault::EngineError(EPERM)));
  ASSERT_TRUE(written.outcome.error);
  EXPECT_TRUE(written.outcome.engine_failed);
  EXPECT_EQ(written.InFlight(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Positions, WriteStreamPositionTest,
                         ::testing::Range<std::uint64_t>(0, 12));

TEST(WriteStream, AnErrorOfAPullEndsTheSaveBeforeThatWriteAndIsNotTheEngines) {
  for (std::uint64_t block = 0; block < 4; ++block) {
    TestStreamBuilder builder(1);
    builder.Pulled(4 * kBlock).Memory(4 * kBlock);
    const TestStream made = std::move(builder).Finish();
    made.pulled->fail_id = 0;
    made.pulled->fail_at = block * kBlock + 7;
    const Written written(made.stream, {}, FaultAlways(Fault{}));
    ASSERT_TRUE(written.outcome.error);
    EXPECT_TRUE(written.outcome.pull_failed);
    EXPECT_FALSE(written.outcome.engine_failed);
    EXPECT_EQ(written.outcome.error->path, "source") << "not the file that is written";
    EXPECT_EQ(written.Bytes().size(), block * kBlock) << "nothing of it was written";
    written.ExpectOrderly();
  }
}

TEST(WriteStream, AnEmptyStreamIsWrittenWithoutAWrite) {
  const Written written(layout::Stream{}, {}, FaultAlways(Fault::Reports(-EIO)));
  EXPECT_FALSE(written.outcome.error);
  EXPECT_TRUE(written.trace().empty());
}

TEST(WriteStream, MemoryThatIsWrittenInPlaceIsNotCopied) {
  const TestStream made = TwelveBlocks();
  const Written written(made.stream, {}, FaultAlways(Fault{}));
  const auto body = made.memory[0].bytes();
  const auto is_in_body = [&](const fastpersist::testing::IoEvent& event) {
    return event.kind == fastpersist::testing::IoEvent::Kind::kSubmitted &&
           event.request.data >= body.data() && event.request.data < body.data() + body.size();
  };
  EXPECT_EQ(std::ranges::count_if(written.trace(), is_in_body), 5);
}

class WriteStreamEngineTest : public ::testing::TestWithParam<Engine> {
 protected:
  // Skips the test when the engine cannot be had.
  std::unique_ptr<IoEngine> Make() {
    auto made = engine::MakeEngine(GetParam(), 4);
    return made ? *std::move(made) : nullptr;
  }
};

// Writes a stream of a few megabytes with the engine and compares the file.
void ExpectRightFile(std::unique_ptr<IoEngine> engine, const ContractFile& file, bool direct,
                     Random& random) {
  const plan::DeviceLimits limits{.memory_align = 4096, .offset_align = 4096, .direct = direct};
  const TestStream made = RandomTestStream(random, 2'000'000);
  const AlignedMemory staging(std::size_t{5} * 65536);
  (void)engine->RegisterMemory(staging.bytes());
  const auto plan =
      plan::PlanWrites(made.stream, {.begin = 0, .end = made.stream.size()},
                       {.limits = limits, .block_bytes = 65536, .min_in_place_bytes = 4096});
  const auto leave_direct = [&file] {
    return ::fcntl(file.fd(), F_SETFL, ::fcntl(file.fd(), F_GETFL) & ~O_DIRECT);
  };
  const WriteOutcome outcome = WriteStream(
      made.stream, plan, 65536, {.fd = file.fd(), .limits = limits, .leave_direct = leave_direct},
      engine, staging.bytes());
  ASSERT_FALSE(outcome.error) << outcome.error->Message();
  EXPECT_EQ(outcome.left_direct, "");
  auto bytes = file.Bytes();
  bytes.resize(made.stream.size());
  EXPECT_EQ(bytes, RenderPlainly(made.stream).bytes);
}

TEST_P(WriteStreamEngineTest, WritesAStreamToARealFile) {
  const Seed seed;
  Random random(seed.value());
  for (const bool direct : {true, false}) {
    const auto file = ContractFile::Create(direct);
    auto engine = Make();
    if (engine == nullptr || !file) GTEST_SKIP() << "skipped: refused here";
    ExpectRightFile(std::move(engine), *file, direct, random);
  }
}

TEST_P(WriteStreamEngineTest, GivesTheRightFileDespiteFaultsOnARealFile) {
  const Seed seed;
  Random random(seed.value());
  for (int round = 0; round < 4; ++round) {
    const auto file = ContractFile::Create(/*direct=*/true);
    auto engine = Make();
    if (engine == nullptr || !file) GTEST_SKIP() << "skipped: refused here";
    ExpectRightFile(std::make_unique<FaultyEngine>(std::move(engine), RecoverableFaults(random())),
                    *file,
                    /*direct=*/true, random);
  }
}

TEST_P(WriteStreamEngineTest, AllocatesNothingForABlock) {
  if (!fastpersist::testing::AllocationsAreCounted()) {
    GTEST_SKIP() << "skipped: the sanitizer allocates";
  }
  constexpr std::uint64_t kPage = 4096;
  const auto allocations_for = [this](std::uint64_t blocks) -> std::uint64_t {
    TestStreamBuilder builder(1);
    builder.Generated(100).Memory(blocks * kPage);
    const TestStream made = std::move(builder).Finish();
    const MemoryFile file;
    auto engine = Make();
    if (engine == nullptr) return 0;
    const plan::DeviceLimits limits{.memory_align = 512, .offset_align = 512, .direct = true};
    const AlignedMemory staging(6 * kPage);
    const auto plan = plan::PlanWrites(made.stream, {.begin = 0, .end = made.stream.size()},
                                       {.limits = limits, .block_bytes = kPage});
    QueueFile queue_file{.fd = file.fd(), .limits = limits, .leave_direct = [] { return 0; }};
    const std::uint64_t before = AllocationCount();
    const WriteOutcome outcome =
        WriteStream(made.stream, plan, kPage, std::move(queue_file), engine, staging.bytes());
    const std::uint64_t after = AllocationCount();
    EXPECT_FALSE(outcome.error) << outcome.error->Message();
    return after - before;
  };
  const std::uint64_t for_ten = allocations_for(10);
  EXPECT_GT(for_ten, 0U) << "allocations are not counted";
  EXPECT_EQ(allocations_for(500), for_ten);
}

INSTANTIATE_TEST_SUITE_P(Engines, WriteStreamEngineTest,
                         ::testing::Values(Engine::kUring, Engine::kLibaio, Engine::kThreads,
                                           Engine::kBuffered),
                         [](const ::testing::TestParamInfo<Engine>& engine) {
                           return std::string(EngineName(engine.param));
                         });

}  // namespace
}  // namespace fastpersist::pipeline
