// SPDX-License-Identifier: Apache-2.0
// Streams written through a gate, by the real pipeline: whatever the device does and whenever the
// owner comes, the file has the bytes of before, and the owner changes nothing that is still read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "engine/choose.h"
#include "pipeline/memory_gate.h"
#include "pipeline/write_stream.h"
#include "testing/aligned_memory.h"
#include "testing/faulty_engine.h"
#include "testing/memory_engine.h"
#include "testing/seed.h"
#include "testing/streams.h"

namespace fastpersist::pipeline {
namespace {

using engine::IoEngine;
using fastpersist::testing::AlignedMemory;
using fastpersist::testing::Between;
using fastpersist::testing::Fault;
using fastpersist::testing::FaultAlways;
using fastpersist::testing::FaultAt;
using fastpersist::testing::FaultScript;
using fastpersist::testing::FaultyEngine;
using fastpersist::testing::InFlightCount;
using fastpersist::testing::IoTrace;
using fastpersist::testing::MemoryEngine;
using fastpersist::testing::MemoryFile;
using fastpersist::testing::OnceIn;
using fastpersist::testing::PlainCrc32;
using fastpersist::testing::Random;
using fastpersist::testing::RandomTestStream;
using fastpersist::testing::RecoverableFaults;
using fastpersist::testing::RenderPlainly;
using fastpersist::testing::Seed;
using fastpersist::testing::TestStream;
using fastpersist::testing::TestStreamBuilder;
using layout::Extent;

constexpr std::uint64_t kBlock = 8192;
constexpr std::byte kPoison{0xAB};

struct Device {
  plan::DeviceLimits limits{.memory_align = 512, .offset_align = 512, .direct = true};
  std::uint64_t block = kBlock;
  std::uint64_t slots = 4;
  unsigned depth = 3;
  std::uint64_t min_in_place = 4096;
  std::uint64_t seed = 1;
};

Device RandomDevice(Random& random) {
  constexpr std::array<std::uint32_t, 3> kAlignments{1, 512, 4096};
  Device device;
  device.limits = {.memory_align = kAlignments.at(Between(random, 0, 2)),
                   .offset_align = kAlignments.at(Between(random, 0, 2)),
                   .direct = !OnceIn(random, 5)};
  device.block = 4096 * Between(random, 1, 3);
  device.slots = Between(random, 1, 6);
  device.depth = static_cast<unsigned>(Between(random, 1, 6));
  device.min_in_place = OnceIn(random, 2) ? 1 : 3 * device.block;
  device.seed = random();
  return device;
}

// A stream, its gate, and an owner who comes when he is called.
class Scene {
 public:
  // is_live: whether an extent in memory is live.
  Scene(TestStream stream, const std::function<bool()>& is_live, VerifySource verify,
        std::size_t spare)
      : made(std::move(stream)), plain(RenderPlainly(made.stream)), spare_(spare) {
    MemoryGate::Setting setting{.verify = verify, .spare = spare_};
    for (std::size_t i = 0; i < made.stream.extents().size(); ++i) {
      const Extent& extent = made.stream.extents()[i];
      if (extent.kind != Extent::Kind::kMemory || !is_live()) continue;
      setting.live.push_back({.extent = i, .name = "tensor"});
      live.push_back(extent);
    }
    gate = std::make_unique<MemoryGate>(made.stream, std::move(setting));
  }
  Scene(const Scene&) = delete;
  Scene& operator=(const Scene&) = delete;
  Scene(Scene&&) = delete;
  Scene& operator=(Scene&&) = delete;
  ~Scene() { JoinOwner(); }

  static std::span<std::byte> Memory(const Extent& extent) {
    return {const_cast<std::byte*>(extent.bytes), extent.length};  // ours
  }
  static void Change(const Extent& extent) {
    for (std::byte& byte : Memory(extent)) byte = ~byte;
  }
  // From now on the owner waits, and changes everything the moment that he may.
  void CallOwner(bool capture) {
    owner_ = std::thread([this, capture] {
      (void)gate->WaitReleased(MemoryGate::Clock::now() + std::chrono::hours(1), capture);
      for (const Extent& extent : live) {
        Change(extent);
        if (becomes) std::ranges::fill(Memory(extent), *becomes);
      }
      changed = true;
    });
  }
  void JoinOwner() {
    gate->Close();
    if (owner_.joinable()) owner_.join();
  }
  // Until he has copied all that the writer did not claim.
  void AwaitCopies(std::uint64_t claimed) const {
    std::uint64_t bytes = 0;
    for (const Extent& extent : live) {
      if (extent.end() > claimed) bytes += extent.end() - std::max(claimed, extent.offset);
    }
    bytes = std::min<std::uint64_t>(bytes, spare_.size());
    while (gate->captured_bytes() < bytes) std::this_thread::yield();
  }

  TestStream made;
  fastpersist::testing::PlainRendering plain;
  std::vector<Extent> live;
  std::unique_ptr<MemoryGate> gate;
  std::atomic<bool> changed = false;
  std::optional<std::byte> becomes;  // of all that the owner may change; else the bits turn round

 private:
  std::vector<std::byte> spare_;
  std::thread owner_;
};

// One attempt to write it.
class Written {
 public:
  Written(const Scene& scene, const Device& device, FaultScript script) {
    std::unique_ptr<IoEngine> engine = std::make_unique<FaultyEngine>(
        std::make_unique<MemoryEngine>(fastpersist::testing::MemoryEngineOptions{
            .depth = device.depth, .limits = device.limits, .seed = device.seed}),
        std::move(script), trace_);
    Write(scene, device, engine);
  }
  Written(const Scene& scene, const Device& device, std::unique_ptr<IoEngine> engine) {
    Write(scene, device, engine);
  }

  void ExpectOldBytes(const Scene& scene) const {
    ASSERT_FALSE(outcome.error) << outcome.error->Message();
    ASSERT_FALSE(scene.gate->error()) << scene.gate->error()->Message();
    EXPECT_TRUE(scene.gate->released());
    ASSERT_EQ(file_.Bytes(), scene.plain.bytes);
    EXPECT_EQ(outcome.crc, PlainCrc32(scene.plain.bytes));
    ASSERT_EQ(outcome.digests.size(), scene.plain.digests.size());
    for (std::size_t i = 0; i < outcome.digests.size(); ++i) {
      EXPECT_EQ(outcome.digests[i].crc, scene.plain.digests[i].crc);
    }
    EXPECT_EQ(InFlightCount(*trace_), 0U);
  }

  [[nodiscard]] std::size_t InFlight() const { return InFlightCount(*trace_); }

  WriteOutcome outcome;

 private:
  void Write(const Scene& scene, const Device& device, std::unique_ptr<IoEngine>& engine) {
    const layout::Stream& stream = scene.made.stream;
    const AlignedMemory staging(device.slots * device.block);
    std::ranges::fill(staging.bytes(), kPoison);  // what nobody filled shows in the file
    const auto plan = plan::PlanWrites(stream, {.begin = 0, .end = stream.size()},
                                       {.limits = device.limits,
                                        .block_bytes = device.block,
                                        .min_in_place_bytes = device.min_in_place});
    outcome = WriteStream(stream, plan, device.block,
                          {.fd = file_.fd(),
                           .path = "state.pt",
                           .limits = device.limits,
                           .leave_direct = [] { return 0; }},
                          engine, staging.bytes(), scene.gate.get());
    if (!outcome.error) file_.Truncate(stream.size());
  }

  MemoryFile file_;
  std::shared_ptr<IoTrace> trace_ = std::make_shared<IoTrace>();
};

// Calls the function at that submission, in the writer's thread, before anything of it is done.
FaultScript At(std::uint64_t position, FaultScript script,
               const std::function<void(const engine::IoRequest&)>& function) {
  auto called = std::make_shared<bool>(false);
  script.on_submit = [=, other = script.on_submit](std::uint64_t nth, const auto& request) {
    if (nth >= position && !std::exchange(*called, true)) function(request);
    return other(nth, request);
  };
  return script;
}

TEST(GatedWrite, GivesTheOldBytesWhateverTheDeviceDoesAndWheneverTheOwnerComes) {
  const Seed seed;
  Random random(seed.value());
  for (int round = 0; round < 120; ++round) {
    const Device device = RandomDevice(random);
    const std::uint64_t size = Between(random, 1, 12 * device.block);
    Scene scene(
        RandomTestStream(random, size), [&] { return !OnceIn(random, 4); },
        OnceIn(random, 2) ? VerifySource::kFull : VerifySource::kSample,
        OnceIn(random, 3) ? 0 : Between(random, 0, size));
    FaultScript script = OnceIn(random, 2) ? RecoverableFaults(random()) : FaultAlways(Fault{});
    script = At(Between(random, 0, 14), script,
                [&](const auto&) { scene.CallOwner(!OnceIn(random, 4)); });
    ASSERT_TRUE(scene.gate->Begin());
    const Written written(scene, device, script);
    scene.JoinOwner();
    written.ExpectOldBytes(scene);
    if (HasFatalFailure()) FAIL() << "round " << round;
  }
}

// Twelve blocks; 5 in place, with a header and a tail that are not live, and one straddling block.
TestStream TwelveBlocks() {
  TestStreamBuilder builder(1);
  builder.Generated(2 * kBlock).Memory(5 * kBlock).Late(100).Memory(2 * kBlock, 512);
  builder.GeneratedBody(2 * kBlock - 23);
  return std::move(builder).Finish();
}

bool Yes() { return true; }

// NVIDIA/Megatron-LM#833: buffers that went to the device before they were whole. Here the device
// takes the bytes late and in any order, and whoever may reuse memory poisons it at once.
TEST(GatedWrite, FiftyStepsInTheSameMemoryEachReachTheFileWithoutPoisonOrTheNextStep) {
  const Seed seed;
  Random random(seed.value());
  for (int step = 1; step <= 50; ++step) {
    TestStream stream = TwelveBlocks();
    for (const AlignedMemory& memory : stream.memory) {
      std::ranges::fill(memory.bytes(), static_cast<std::byte>(step));
    }
    Scene scene(std::move(stream), Yes, VerifySource::kFull, OnceIn(random, 2) ? 0 : kBlock);
    scene.becomes = kPoison;
    ASSERT_TRUE(scene.gate->Begin());
    scene.CallOwner(/*capture=*/true);
    const Written written(scene, {.seed = random()}, FaultAlways(Fault{}));
    scene.JoinOwner();
    written.ExpectOldBytes(scene);
    if (HasFatalFailure()) FAIL() << "step " << step;
  }
}

class GatedWritePositionTest : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(GatedWritePositionTest, TheOwnerCopiesWhatTheHeldWriterDidNotReach) {
  for (const std::size_t spare : {std::size_t{100}, 3 * kBlock, 12 * kBlock}) {
    Scene scene(TwelveBlocks(), Yes, VerifySource::kFull, spare);
    const auto owner = [&](const engine::IoRequest& request) {
      scene.CallOwner(/*capture=*/true);
      scene.AwaitCopies(request.offset + request.length);
    };
    ASSERT_TRUE(scene.gate->Begin());
    const Written written(scene, {}, At(GetParam(), FaultAlways(Fault{}), owner));
    scene.JoinOwner();
    written.ExpectOldBytes(scene);
  }
}

TEST_P(GatedWritePositionTest, AnEngineThatIsExchangedOnTheWayReadsTheOldBytes) {
  for (const bool at_once : {false, true}) {
    Scene scene(TwelveBlocks(), Yes, VerifySource::kFull, 0);
    FaultScript script = FaultAt(GetParam(), Fault::Reports(-EINVAL));
    script.at_once = at_once;
    scene.CallOwner(/*capture=*/false);
    ASSERT_TRUE(scene.gate->Begin());
    const Written written(scene, {}, script);
    scene.JoinOwner();
    written.ExpectOldBytes(scene);
    EXPECT_NE(written.outcome.left_direct, "");
  }
}

TEST_P(GatedWritePositionTest, AFailedAttemptIsRepeatedWithTheOldBytesOrNotAtAll) {
  for (const auto& fault : {Fault::Reports(-EIO), Fault::EngineError(EPERM)}) {
    for (const std::size_t spare : {std::size_t{0}, kBlock, 12 * kBlock}) {
      Scene scene(TwelveBlocks(), Yes, VerifySource::kFull, spare);
      ASSERT_TRUE(scene.gate->Begin());
      const auto owner = [&](const engine::IoRequest&) { scene.CallOwner(/*capture=*/true); };
      const Written first(scene, {}, At(GetParam() / 2, FaultAt(GetParam(), fault), owner));
      ASSERT_TRUE(first.outcome.error);
      EXPECT_EQ(first.InFlight(), 0U);
      if (scene.gate->Begin()) {
        const Written second(scene, {}, FaultAlways(Fault{}));
        scene.JoinOwner();
        second.ExpectOldBytes(scene);
      } else {
        EXPECT_TRUE(scene.gate->released());
      }
      scene.JoinOwner();
      EXPECT_TRUE(scene.changed);
    }
  }
}

TEST_P(GatedWritePositionTest, AnAbandonedSaveIsReadNoMoreAndLeavesNothingInFlight) {
  Scene scene(TwelveBlocks(), Yes, VerifySource::kFull, 0);
  const auto abandon = [&](const engine::IoRequest&) {
    scene.gate->Abandon({.code = ErrorCode::kAbandoned, .operation = "save"});
    for (const Extent& extent : scene.live) Scene::Change(extent);
  };
  ASSERT_TRUE(scene.gate->Begin());
  const Written written(scene, {}, At(GetParam(), FaultAlways(Fault{}), abandon));
  EXPECT_EQ(written.InFlight(), 0U);
  ASSERT_TRUE(scene.gate->error());
  EXPECT_EQ(scene.gate->error()->code, ErrorCode::kAbandoned);
  // Only of the last write of all there is nothing to stop any more.
  EXPECT_EQ(written.outcome.error.has_value(), GetParam() < 11);
  EXPECT_EQ(written.outcome.pull_failed, GetParam() < 11) << "no engine is to blame";
  EXPECT_FALSE(written.outcome.engine_failed);
}

TEST_P(GatedWritePositionTest, AChangeOfWhatWasReadIsFound) {
  Scene scene(TwelveBlocks(), Yes, VerifySource::kFull, 0);
  bool changed = false;
  const auto change = [&](const engine::IoRequest& request) {
    if (scene.gate->released()) return;
    for (const Extent& extent : scene.live) {
      if (extent.offset < request.offset + request.length) {
        Scene::Change(extent);
        changed = true;
        return;
      }
    }
  };
  ASSERT_TRUE(scene.gate->Begin());
  const Written written(scene, {}, At(GetParam(), FaultAlways(Fault{}), change));
  EXPECT_EQ(scene.gate->error().has_value(), changed);
  EXPECT_EQ(changed, GetParam() >= 2 && GetParam() < 10) << "from the first live block to the last";
}

INSTANTIATE_TEST_SUITE_P(Positions, GatedWritePositionTest, ::testing::Range<std::uint64_t>(0, 12));

TEST(GatedWrite, TheOwnerWaitsForTheDeviceWhereItReadsHisMemoryAndOnlyThere) {
  for (const bool in_place : {true, false}) {
    Scene scene(TwelveBlocks(), Yes, VerifySource::kFull, 0);
    std::uint64_t finished = 0;  // submissions when he was let go
    FaultScript script = FaultAlways(Fault{});
    script.on_submit = [&](std::uint64_t nth, const engine::IoRequest&) {
      if (!scene.gate->released()) finished = nth + 1;
      return Fault{};
    };
    ASSERT_TRUE(scene.gate->Begin());
    const Written written(scene, {.min_in_place = in_place ? 4096 : UINT64_MAX}, script);
    written.ExpectOldBytes(scene);
    // Block 9 holds the last live bytes: it is read before it is submitted.
    EXPECT_EQ(finished, in_place ? 10U : 9U);
  }
}

class GatedWriteEngineTest : public ::testing::TestWithParam<Engine> {};

TEST_P(GatedWriteEngineTest, RealEnginesReadTheOldBytes) {
  const Seed seed;
  Random random(seed.value());
  for (int round = 0; round < 20; ++round) {
    auto engine = engine::MakeEngine(GetParam(), 4);
    if (!engine) GTEST_SKIP() << "skipped: refused here";
    Scene scene(
        RandomTestStream(random, 500'000), [&] { return !OnceIn(random, 4); }, VerifySource::kFull,
        Between(random, 0, 200'000));
    scene.CallOwner(/*capture=*/true);
    ASSERT_TRUE(scene.gate->Begin());
    const Written written(scene, {.block = 16384, .min_in_place = 4096}, *std::move(engine));
    scene.JoinOwner();
    written.ExpectOldBytes(scene);
    EXPECT_TRUE(scene.changed);
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, GatedWriteEngineTest,
                         ::testing::Values(Engine::kUring, Engine::kLibaio, Engine::kThreads,
                                           Engine::kBuffered),
                         [](const ::testing::TestParamInfo<Engine>& engine) {
                           return std::string(EngineName(engine.param));
                         });

}  // namespace
}  // namespace fastpersist::pipeline
