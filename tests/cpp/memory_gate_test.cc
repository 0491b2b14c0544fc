// SPDX-License-Identifier: Apache-2.0
// The gate, driven step by step: a writer that reads block by block, and owners in threads of their
// own, which change the memory as soon as they may.
#include "pipeline/memory_gate.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pipeline/filler.h"
#include "testing/held_memory.h"
#include "testing/seed.h"
#include "testing/streams.h"

namespace fastpersist::pipeline {
namespace {

using fastpersist::testing::Between;
using fastpersist::testing::OnceIn;
using fastpersist::testing::Random;
using fastpersist::testing::RenderPlainly;
using fastpersist::testing::Seed;
using fastpersist::testing::TestStream;
using fastpersist::testing::TestStreamBuilder;
using layout::Extent;
using ::testing::HasSubstr;

const auto kLongEnough = std::chrono::hours(1);
MemoryGate::Clock::time_point Later() { return MemoryGate::Clock::now() + kLongEnough; }
MemoryGate::Clock::time_point Now() { return MemoryGate::Clock::now(); }

Error Given(ErrorCode code = ErrorCode::kAbandoned) {
  return {.code = code, .operation = "save", .detail = "given up"};
}

// Where an owner keeps address and size of a storage.
struct Cells {
  std::uintptr_t address = 0;
  std::uint64_t size = 0;
};

// live: which memory of the stream (index into TestStream::memory) its owner will
// change; the rest is constant. watched: cells of memory 2.
class Guarded {
 public:
  Guarded(TestStream stream, const std::vector<std::size_t>& live, MemoryGate::Setting setting = {},
          std::size_t spare = 0, Cells* watched = nullptr)
      : made(std::move(stream)), old(RenderPlainly(made.stream).bytes), spare_(spare) {
    std::size_t index = 0;
    for (std::size_t i = 0; i < made.stream.extents().size(); ++i) {
      if (made.stream.extents()[i].kind != Extent::Kind::kMemory) continue;
      const std::size_t memory = index++;
      if (std::ranges::find(live, memory) == live.end()) continue;
      auto& added = setting.live.emplace_back(
          LiveExtent{.extent = i, .name = fmt::format("tensor {}", memory)});
      changed_.push_back(memory);
      if (memory != 2 || watched == nullptr) continue;
      *watched = {.address = reinterpret_cast<std::uintptr_t>(made.stream.extents()[i].bytes),
                  .size = made.stream.extents()[i].length};
      added.address = &watched->address;
      added.size = &watched->size;
    }
    if (setting.spare.empty()) setting.spare = spare_;
    gate = std::make_unique<MemoryGate>(made.stream, std::move(setting));
  }

  // All live memory gets other bytes, each of them.
  void Change() const {
    for (const std::size_t i : changed_) ChangeOne(i);
  }
  void ChangeOne(std::size_t memory) const {
    for (std::byte& byte : made.memory[memory].bytes()) byte = ~byte;
  }
  [[nodiscard]] std::uint64_t LiveBytesFrom(std::uint64_t offset) const {
    std::uint64_t bytes = 0;
    std::size_t index = 0;
    for (const Extent& extent : made.stream.extents()) {
      if (extent.kind != Extent::Kind::kMemory) continue;
      const bool live = std::ranges::find(changed_, index++) != changed_.end();
      if (live && extent.end() > offset) bytes += extent.end() - std::max(offset, extent.offset);
    }
    return bytes;
  }
  [[nodiscard]] std::uint64_t LiveEnd() const {
    std::uint64_t end = 0;
    for (std::uint64_t at = 0; at < made.stream.size(); ++at) {
      if (LiveBytesFrom(at) > 0) end = at + 1;
    }
    return end;
  }

  TestStream made;
  std::vector<std::byte> old;
  std::unique_ptr<MemoryGate> gate;

 private:
  std::vector<std::byte> spare_;
  std::vector<std::size_t> changed_;
};

// Headers, live and constant memory, late bytes: 71 bytes.
TestStream SmallStream() {
  TestStreamBuilder builder(7);
  builder.Generated(5).Memory(11).Late(3).Memory(4).Generated(2).Memory(17).Memory(1).Late(9);
  builder.Memory(12).Generated(7);
  return std::move(builder).Finish();
}
// Of its memory: 11, 17 and 12 bytes are live, 4 and 1 are not.
const std::vector<std::size_t> kLive{0, 2, 4};

// What WriteStream does to a gate, one block a call.
class Writer {
 public:
  explicit Writer(Guarded& setup)
      : setup_(setup), filler_(setup.made.stream, setup.gate.get(), true), out_(setup.old.size()) {}

  [[nodiscard]] bool Begin() const { return setup_.gate->Begin(); }
  [[nodiscard]] bool AtEnd() const { return filler_.offset() == out_.size(); }
  [[nodiscard]] std::uint64_t offset() const { return filler_.offset(); }

  Result<void> Claim(std::uint64_t length) {
    block_ = std::min<std::uint64_t>(length, out_.size() - filler_.offset());
    return setup_.gate->Claim(filler_.offset() + block_);
  }
  void Fill() {
    filler_.Fill(std::span(out_).subspan(filler_.offset(), block_));
    setup_.gate->Filled(filler_.digests(), /*in_place=*/false);
  }
  Result<void> Block(std::uint64_t length) {
    if (auto claimed = Claim(length); !claimed) return claimed;
    Fill();
    return {};
  }
  // All that is left.
  Result<void> Finish(std::uint64_t length) {
    while (!AtEnd()) {
      if (auto done = Block(length); !done) return done;
    }
    setup_.gate->End();
    return {};
  }

  [[nodiscard]] const std::vector<std::byte>& out() const { return out_; }
  [[nodiscard]] std::uint32_t crc() const { return filler_.crc(); }

 private:
  Guarded& setup_;
  Filler filler_;
  std::vector<std::byte> out_;
  std::uint64_t block_ = 0;
};

// Waits for the memory and changes it the moment that it may.
class Owner {
 public:
  Owner(const Guarded& setup, bool capture)
      : setup_(setup), thread_([&setup, capture, this] {
          released_ = setup.gate->WaitReleased(Later(), capture);
          if (!setup.gate->error()) setup.Change();
        }) {}
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  Owner(Owner&&) = delete;
  Owner& operator=(Owner&&) = delete;
  ~Owner() {
    if (thread_.joinable()) setup_.gate->Close();  // the test has failed
    if (thread_.joinable()) thread_.join();
  }
  void Join() { thread_.join(); }
  [[nodiscard]] bool released() const { return released_; }

 private:
  const Guarded& setup_;
  std::atomic<bool> released_ = false;
  std::thread thread_;
};

void AwaitCaptured(const MemoryGate& gate, std::uint64_t bytes) {
  while (gate.captured_bytes() < bytes) std::this_thread::yield();
}

TEST(MemoryGate, WithoutLiveMemoryNobodyWaits) {
  Guarded setup(SmallStream(), {});
  EXPECT_TRUE(setup.gate->released());
  EXPECT_TRUE(setup.gate->WaitReleased(Now(), true));
  Writer writer(setup);
  ASSERT_TRUE(writer.Begin());
  ASSERT_TRUE(writer.Finish(10));
  EXPECT_EQ(writer.out(), setup.old);
}

TEST(MemoryGate, IsReleasedExactlyWhenTheLastLiveByteWasRead) {
  for (std::uint64_t block = 1; block <= 80; ++block) {
    Guarded setup(SmallStream(), kLive);
    Writer writer(setup);
    ASSERT_TRUE(writer.Begin());
    while (!writer.AtEnd()) {
      ASSERT_TRUE(writer.Claim(block));
      ASSERT_EQ(setup.gate->released(), writer.offset() >= setup.LiveEnd());
      writer.Fill();
      ASSERT_EQ(setup.gate->released(), writer.offset() >= setup.LiveEnd())
          << "blocks of " << block << " at " << writer.offset();
      ASSERT_EQ(setup.gate->WaitReleased(Now(), true), setup.gate->released());
      if (setup.gate->released()) setup.Change();
    }
    EXPECT_EQ(writer.out(), setup.old);
    EXPECT_FALSE(setup.gate->error());
  }
}

TEST(MemoryGate, IsNotReleasedWhileADeviceReadsTheMemory) {
  Guarded setup(SmallStream(), kLive);
  MemoryGate& gate = *setup.gate;
  Filler filler(setup.made.stream, &gate, true);
  const auto pass = [&](std::uint64_t end, bool in_place) {
    ASSERT_TRUE(gate.Claim(end));
    EXPECT_TRUE(gate.InPlace());
    std::vector<std::byte> out(end - filler.offset());
    filler.Fill(out);
    gate.Filled(filler.digests(), in_place);
  };
  ASSERT_TRUE(gate.Begin());
  pass(5, false);
  pass(10, true);
  EXPECT_FALSE(gate.InPlaceOnly()) << "more is to be read";
  pass(64, false);
  EXPECT_FALSE(gate.released());
  EXPECT_TRUE(gate.InPlaceOnly());
  gate.InPlaceDone();
  EXPECT_TRUE(gate.released());
  EXPECT_FALSE(gate.InPlaceOnly());
}

TEST(MemoryGate, ConstantMemoryThatADeviceReadsKeepsNobodyWaiting) {
  Guarded setup(SmallStream(), kLive, {.verify = VerifySource::kOff});
  MemoryGate& gate = *setup.gate;
  Writer writer(setup);
  ASSERT_TRUE(writer.Begin());
  ASSERT_TRUE(writer.Block(19));
  ASSERT_TRUE(gate.Claim(23));
  const std::vector<layout::RecordDigest> digests(setup.made.stream.record_count());
  gate.Filled(digests, /*in_place=*/true);  // the four bytes that are not live
  ASSERT_TRUE(gate.Claim(71));
  gate.Filled(digests, false);
  EXPECT_TRUE(gate.released());
}

// The writer is held at every place, with spare memory of every size; the owner copies what it can.
TEST(MemoryGate, WhatTheOwnerCopiedIsWrittenWhereverTheTwoMeet) {
  const std::uint64_t size = SmallStream().stream.size();
  for (std::uint64_t claimed = 0; claimed <= size; claimed += 5) {
    for (std::size_t spare = 0; spare <= 42; spare += 1 + spare / 10) {
      Guarded setup(SmallStream(), kLive, {.verify = VerifySource::kFull}, spare);
      Writer writer(setup);
      ASSERT_TRUE(writer.Begin());
      if (claimed > 0) {
        ASSERT_TRUE(writer.Block(claimed));
      }
      const std::uint64_t copied = std::min<std::uint64_t>(spare, setup.LiveBytesFrom(claimed));
      Owner owner(setup, /*capture=*/true);
      AwaitCaptured(*setup.gate, copied);
      if (copied == setup.LiveBytesFrom(claimed)) owner.Join();  // without the writer
      ASSERT_TRUE(writer.Finish(7));
      if (copied != setup.LiveBytesFrom(claimed)) owner.Join();
      EXPECT_TRUE(owner.released());
      ASSERT_FALSE(setup.gate->error()) << setup.gate->error()->Message();
      ASSERT_EQ(setup.gate->captured_bytes(), copied);
      ASSERT_EQ(writer.out(), setup.old) << "claimed " << claimed << ", spare " << spare;
      ASSERT_EQ(writer.crc(), fastpersist::testing::PlainCrc32(setup.old));
    }
  }
}

TEST(MemoryGate, RacesOfOwnersWithTheWriterLeaveTheOldBytes) {
  const Seed seed;
  Random random(seed.value());
  for (int round = 0; round < 200; ++round) {
    TestStreamBuilder builder(random());
    std::vector<std::size_t> live;
    const std::uint64_t count = Between(random, 1, 12);
    for (std::size_t i = 0; i < count; ++i) {
      builder.Generated(Between(random, 1, 50)).Memory(Between(random, 1, 3000));
      if (OnceIn(random, 3)) builder.Late(Between(random, 1, 20));
      if (!OnceIn(random, 4)) live.push_back(i);
    }
    builder.Generated(Between(random, 1, 300));
    Guarded setup(std::move(builder).Finish(), live,
                  {.verify = OnceIn(random, 2) ? VerifySource::kFull : VerifySource::kSample,
                   .turn = random()},
                  Between(random, 0, 20'000));
    Writer writer(setup);
    ASSERT_TRUE(writer.Begin());
    const std::uint64_t block = Between(random, 1, 2000);
    std::vector<std::unique_ptr<Owner>> owners;
    // One changes the memory; another only waits and copies.
    const std::uint64_t start = Between(random, 0, setup.old.size());
    std::thread helper;
    while (!writer.AtEnd()) {
      if (owners.empty() && writer.offset() >= start) {
        owners.push_back(std::make_unique<Owner>(setup, !OnceIn(random, 4)));
        helper = std::thread([&] { (void)setup.gate->WaitReleased(Later(), true); });
      }
      ASSERT_TRUE(writer.Block(block));
      if (OnceIn(random, 4)) std::this_thread::yield();
    }
    setup.gate->End();
    for (const auto& owner : owners) owner->Join();
    if (helper.joinable()) helper.join();
    ASSERT_TRUE(setup.gate->released());
    ASSERT_FALSE(setup.gate->error()) << setup.gate->error()->Message();
    ASSERT_EQ(writer.out(), setup.old) << "round " << round;
  }
}

TEST(MemoryGate, MemoryThatWasCopiedWholeIsGivenBackBeforeAnythingIsWritten) {
  Guarded setup(SmallStream(), kLive, {}, 40);
  EXPECT_TRUE(setup.gate->WaitReleased(Later(), true)) << "no writer is needed";
  setup.Change();
  for (int attempt = 0; attempt < 2; ++attempt) {  // and it may be repeated
    Writer writer(setup);
    ASSERT_TRUE(writer.Begin());
    ASSERT_TRUE(writer.Block(30));
    EXPECT_FALSE(setup.gate->InPlace());
    if (attempt == 0) {
      setup.gate->End();
      continue;
    }
    ASSERT_TRUE(writer.Finish(30));
    EXPECT_EQ(writer.out(), setup.old);
  }
}

TEST(MemoryGate, AChangeBetweenTheFirstReadAndTheReleaseIsSeen) {
  for (std::size_t changed : kLive) {
    Guarded setup(SmallStream(), kLive, {.verify = VerifySource::kFull});
    Writer writer(setup);
    ASSERT_TRUE(writer.Begin());
    ASSERT_TRUE(writer.Block(60));  // some of the last one is left
    setup.ChangeOne(changed);
    EXPECT_FALSE(setup.gate->error());
    ASSERT_TRUE(writer.Block(10));
    ASSERT_TRUE(setup.gate->error());
    EXPECT_TRUE(setup.gate->released());
    EXPECT_EQ(setup.gate->error()->code, ErrorCode::kStateChanged);
    EXPECT_EQ(setup.gate->error()->entry, fmt::format("tensor {}", changed));
    EXPECT_THAT(setup.gate->error()->Message(), HasSubstr("bytes changed"));
    EXPECT_FALSE(writer.Claim(1)) << "the rest need not be written";
  }
}

TEST(MemoryGate, AChangeAfterTheReleaseIsTheOwnersRight) {
  Guarded setup(SmallStream(), kLive, {.verify = VerifySource::kFull});
  Writer writer(setup);
  ASSERT_TRUE(writer.Begin());
  ASSERT_TRUE(writer.Block(66));
  ASSERT_TRUE(setup.gate->released());
  setup.Change();
  ASSERT_TRUE(writer.Finish(1));
  setup.gate->Close();
  EXPECT_FALSE(setup.gate->error());
}

// Which of n live extents a save of this turn looks at again.
std::vector<bool> LookedAt(std::size_t count, std::uint64_t turn) {
  std::vector<bool> looked_at;
  for (std::size_t changed = 0; changed < count; ++changed) {
    TestStreamBuilder builder(1);
    std::vector<std::size_t> live;
    for (std::size_t i = 0; i < count; ++i) {
      builder.Memory(8);
      live.push_back(i);
    }
    Guarded setup(std::move(builder).Finish(), live,
                  {.verify = VerifySource::kSample, .turn = turn});
    Writer writer(setup);
    EXPECT_TRUE(writer.Begin());
    EXPECT_TRUE(writer.Claim(setup.old.size()));
    setup.ChangeOne(changed);
    auto digests = RenderPlainly(setup.made.stream).digests;
    digests[changed].crc ^= 1;  // as it was when it was read
    setup.gate->Filled(digests, false);
    looked_at.push_back(setup.gate->error().has_value());
  }
  return looked_at;
}

TEST(MemoryGate, ASampleIsASixteenthAndReachesEverythingWithinSixteenSaves) {
  for (const std::size_t count : {1U, 2U, 3U, 15U, 16U, 17U, 33U}) {
    for (const std::uint64_t first : {std::uint64_t{0}, std::uint64_t{5}, UINT64_MAX - 7}) {
      std::vector<bool> seen(count);
      for (std::uint64_t turn = 0; turn < 16; ++turn) {
        const auto looked_at = LookedAt(count, first + turn);
        EXPECT_GE(16 * static_cast<std::size_t>(std::ranges::count(looked_at, true)), count);
        for (std::size_t i = 0; i < count; ++i) seen[i] = seen[i] || looked_at[i];
      }
      EXPECT_EQ(std::ranges::count(seen, false), 0) << count << " extents from turn " << first;
    }
  }
}

TEST(MemoryGate, WithoutVerificationNothingIsReadTwice) {
  Guarded setup(SmallStream(), kLive, {.verify = VerifySource::kOff});
  Writer writer(setup);
  ASSERT_TRUE(writer.Begin());
  ASSERT_TRUE(writer.Block(60));
  setup.ChangeOne(0);
  ASSERT_TRUE(writer.Finish(60));
  EXPECT_FALSE(setup.gate->error());
}

TEST(MemoryGate, AStorageThatMovedOrShrankStopsTheWriterBeforeItReads) {
  for (const bool moved : {true, false}) {
    Cells cells;
    Guarded setup(SmallStream(), kLive, {}, 0, &cells);
    Writer writer(setup);
    ASSERT_TRUE(writer.Begin());
    ASSERT_TRUE(writer.Block(25));  // the next byte is its first
    (moved ? cells.address : cells.size) -= 1;
    ASSERT_TRUE(writer.Claim(0));
    const auto claimed = writer.Claim(1);
    ASSERT_FALSE(claimed);
    EXPECT_EQ(claimed.error().code, ErrorCode::kStateChanged);
    EXPECT_EQ(claimed.error().entry, "tensor 2");
    EXPECT_THAT(claimed.error().Message(), HasSubstr("moved or resized"));
    EXPECT_FALSE(writer.Claim(1)) << "nothing more is read";
    EXPECT_TRUE(setup.gate->WaitReleased(Now(), false)) << "nobody reads any more";
  }
}

TEST(MemoryGate, AStorageThatMovedIsNotedByWhoeverCopiesAndAtTheRelease) {
  Cells cells;
  Guarded copied(SmallStream(), kLive, {}, 40, &cells);
  cells.size = 16;
  EXPECT_TRUE(copied.gate->WaitReleased(Later(), true));
  ASSERT_TRUE(copied.gate->error());
  EXPECT_EQ(copied.gate->error()->code, ErrorCode::kStateChanged);

  Guarded read(SmallStream(), kLive, {.verify = VerifySource::kFull}, 0, &cells);
  Writer writer(read);
  ASSERT_TRUE(writer.Begin());
  ASSERT_TRUE(writer.Block(60));
  cells.address += 64;
  ASSERT_TRUE(writer.Block(10));
  EXPECT_TRUE(read.gate->error());
}

TEST(MemoryGate, AfterTheReleaseStoragesMayMove) {
  Cells cells;
  // The owner copies the end of the watched extent and what follows.
  Guarded setup(SmallStream(), kLive, {.verify = VerifySource::kFull}, 20, &cells);
  Writer writer(setup);
  ASSERT_TRUE(writer.Begin());
  Owner owner(setup, /*capture=*/true);
  AwaitCaptured(*setup.gate, 20);
  ASSERT_TRUE(writer.Block(35));  // the last byte before the copy is the 34th
  owner.Join();
  cells = {};
  ASSERT_TRUE(writer.Finish(3));
  EXPECT_EQ(writer.out(), setup.old);
  EXPECT_FALSE(setup.gate->error());
}

TEST(MemoryGate, WhatIsAbandonedIsReadNoMore) {
  for (std::uint64_t at = 0; at <= 71; ++at) {
    Guarded setup(SmallStream(), kLive);
    Writer writer(setup);
    ASSERT_TRUE(writer.Begin());
    if (at > 0) {
      ASSERT_TRUE(writer.Block(at));
    }
    setup.gate->Abandon(Given());
    EXPECT_TRUE(setup.gate->released());
    EXPECT_TRUE(setup.gate->WaitReleased(Now(), true));
    setup.Change();
    const auto claimed = writer.Claim(1);
    ASSERT_FALSE(claimed);
    EXPECT_EQ(claimed.error().code, ErrorCode::kAbandoned);
    setup.gate->End();
    EXPECT_EQ(setup.gate->Begin(), false);
    EXPECT_EQ(setup.gate->error()->code, ErrorCode::kAbandoned);
  }
}

TEST(MemoryGate, TheFirstErrorStaysAndNoneComesAfterTheEnd) {
  Guarded setup(SmallStream(), kLive);
  setup.gate->Abandon(Given());
  setup.gate->Abandon(Given(ErrorCode::kStorage));
  EXPECT_EQ(setup.gate->error()->code, ErrorCode::kAbandoned);

  Guarded ended(SmallStream(), kLive);
  Writer writer(ended);
  ASSERT_TRUE(writer.Begin());
  ASSERT_TRUE(writer.Finish(71));
  ended.gate->Close();
  ended.gate->Abandon(Given());
  EXPECT_FALSE(ended.gate->error());
}

TEST(MemoryGate, AbandonWaitsForTheBlockThatIsBeingCopied) {
  Guarded setup(SmallStream(), kLive);
  Writer writer(setup);
  ASSERT_TRUE(writer.Begin());
  ASSERT_TRUE(writer.Claim(20));
  std::atomic<bool> filled = false;
  std::atomic<bool> too_early = false;
  std::thread owner([&] {
    setup.gate->Abandon(Given());
    too_early = !filled;
    setup.Change();
  });
  while (!setup.gate->error()) std::this_thread::yield();
  EXPECT_FALSE(setup.gate->released());
  EXPECT_FALSE(setup.gate->WaitReleased(Now(), true));
  filled = true;
  writer.Fill();
  owner.join();
  EXPECT_FALSE(too_early);
}

// An owner is held in the middle of a copy, of the last 12 of the 40 live bytes.
class MemoryGateHeldCopyTest : public ::testing::Test {
 protected:
  MemoryGateHeldCopyTest() : setup_(SmallStream(), kLive, {.spare = held_.bytes().first(12)}) {}
  void StartOwner() {
    owner_ = std::thread([this] {
      EXPECT_TRUE(setup_.gate->WaitReleased(Later(), true));
      setup_.Change();
    });
    held_.AwaitToucher();
  }
  void LetOwnerGo() {
    held_.LetGo();
    owner_.join();
  }

  fastpersist::testing::HeldMemory held_{4096};
  Guarded setup_;

 private:
  std::thread owner_;
};

TEST_F(MemoryGateHeldCopyTest, NobodyIsLetGoWhileACopyIsMade) {
  Writer writer(setup_);
  ASSERT_TRUE(writer.Begin());
  StartOwner();
  while (!writer.AtEnd()) ASSERT_TRUE(writer.Block(10));  // all of it, from where it lay
  EXPECT_FALSE(setup_.gate->released());
  EXPECT_FALSE(setup_.gate->WaitReleased(Now(), true));
  LetOwnerGo();
  EXPECT_EQ(writer.out(), setup_.old);
  EXPECT_FALSE(setup_.gate->error());
}

TEST_F(MemoryGateHeldCopyTest, AnAttemptThatEndsMeanwhileWaitsAndTheNextUsesTheCopy) {
  Writer first(setup_);
  ASSERT_TRUE(first.Begin());
  ASSERT_TRUE(first.Block(30));
  StartOwner();
  ASSERT_TRUE(first.Block(5));
  std::atomic<bool> let_go = false;
  std::thread ending([&] {
    setup_.gate->End();
    EXPECT_TRUE(let_go);
  });
  let_go = true;
  held_.LetGo();
  ending.join();
  Writer second(setup_);
  ASSERT_TRUE(second.Begin());
  ASSERT_TRUE(second.Finish(10));
  LetOwnerGo();
  EXPECT_EQ(second.out(), setup_.old);
  EXPECT_FALSE(setup_.gate->error());
}

TEST_F(MemoryGateHeldCopyTest, WhoeverAbandonsWaitsForTheCopy) {
  StartOwner();
  std::atomic<bool> let_go = false;
  std::thread abandoning([&] {
    setup_.gate->Abandon(Given());
    EXPECT_TRUE(let_go);
  });
  while (!setup_.gate->error()) std::this_thread::yield();
  EXPECT_FALSE(setup_.gate->released());
  let_go = true;
  LetOwnerGo();
  abandoning.join();
  EXPECT_TRUE(setup_.gate->released());
}

TEST(MemoryGate, AnAttemptMayBeRepeatedUntilTheMemoryIsGivenBack) {
  for (std::uint64_t at = 1; at <= 71; ++at) {
    Guarded setup(SmallStream(), kLive, {.verify = VerifySource::kFull});
    Writer first(setup);
    ASSERT_TRUE(first.Begin());
    ASSERT_TRUE(first.Block(at));
    setup.gate->End();
    Writer second(setup);
    ASSERT_EQ(second.Begin(), at < setup.LiveEnd());
    if (at >= setup.LiveEnd()) continue;
    EXPECT_FALSE(setup.gate->released());
    ASSERT_TRUE(second.Finish(9));
    EXPECT_EQ(second.out(), setup.old);
    EXPECT_FALSE(setup.gate->error());
  }
}

TEST(MemoryGate, AnAttemptThatFailsWhileADeviceReadsIsRepeated) {
  Guarded setup(SmallStream(), kLive);
  ASSERT_TRUE(setup.gate->Begin());
  ASSERT_TRUE(setup.gate->Claim(71));
  setup.gate->Filled(RenderPlainly(setup.made.stream).digests, /*in_place=*/true);
  setup.gate->End();
  EXPECT_FALSE(setup.gate->WaitReleased(Now(), true));
  Writer again(setup);
  ASSERT_TRUE(again.Begin());
  ASSERT_TRUE(again.Finish(71));
  EXPECT_EQ(again.out(), setup.old);
}

TEST(MemoryGate, AChangeBetweenTwoAttemptsIsSeen) {
  Guarded setup(SmallStream(), kLive, {.verify = VerifySource::kOff});
  Writer first(setup);
  ASSERT_TRUE(first.Begin());
  ASSERT_TRUE(first.Block(45));  // two of three are read whole
  setup.gate->End();
  setup.ChangeOne(2);
  Writer second(setup);
  ASSERT_TRUE(second.Begin());
  EXPECT_FALSE(second.Finish(5));
  ASSERT_TRUE(setup.gate->error());
  EXPECT_EQ(setup.gate->error()->entry, "tensor 2");
}

TEST(MemoryGate, WhatWasCopiedInAFailedAttemptIsUsedByTheNext) {
  Guarded setup(SmallStream(), kLive, {.verify = VerifySource::kFull}, 15);
  Writer first(setup);
  ASSERT_TRUE(first.Begin());
  ASSERT_TRUE(first.Block(10));
  Owner owner(setup, /*capture=*/true);
  AwaitCaptured(*setup.gate, 15);
  ASSERT_TRUE(first.Block(5));
  setup.gate->End();
  Writer second(setup);
  ASSERT_TRUE(second.Begin());
  ASSERT_TRUE(second.Finish(4));
  owner.Join();
  EXPECT_EQ(second.out(), setup.old);
  EXPECT_FALSE(setup.gate->error());
}

TEST(MemoryGate, SingleExtentsCanBeComparedAfterTheRelease) {
  // The owner copies the last extent, and the last three bytes of the one before it.
  Guarded setup(SmallStream(), kLive, {.verify = VerifySource::kOff}, 15);
  Writer writer(setup);
  ASSERT_TRUE(writer.Begin());
  std::thread owner([&] { EXPECT_TRUE(setup.gate->WaitReleased(Later(), true)); });
  AwaitCaptured(*setup.gate, 15);
  ASSERT_TRUE(writer.Block(50));
  owner.join();
  const std::vector<std::size_t> all{0, 1, 2};
  EXPECT_TRUE(setup.gate->StillTheSame(all));
  ASSERT_TRUE(writer.Finish(5));
  setup.gate->Close();
  EXPECT_TRUE(setup.gate->StillTheSame(all));
  setup.ChangeOne(4);
  EXPECT_TRUE(setup.gate->StillTheSame(all)) << "it was copied";
  setup.made.memory[2].bytes()[16] ^= std::byte{1};
  EXPECT_TRUE(setup.gate->StillTheSame(all)) << "that part was copied";
  setup.made.memory[2].bytes()[13] ^= std::byte{1};
  EXPECT_FALSE(setup.gate->StillTheSame(all));
  EXPECT_TRUE(setup.gate->StillTheSame(std::vector<std::size_t>{0, 2}));
}

TEST(MemoryGate, AWaitEndsAtItsDeadlineAndWithTheLastAttempt) {
  Guarded setup(SmallStream(), kLive);
  EXPECT_FALSE(setup.gate->WaitReleased(Now(), true));
  EXPECT_FALSE(setup.gate->WaitReleased(Now() + std::chrono::milliseconds(1), false));
  Writer writer(setup);
  ASSERT_TRUE(writer.Begin());
  ASSERT_TRUE(writer.Block(30));
  std::thread owner([&] { EXPECT_TRUE(setup.gate->WaitReleased(Later(), true)); });
  setup.gate->End();
  setup.gate->Close();
  setup.gate->Close();
  owner.join();
  EXPECT_TRUE(setup.gate->released());
}

}  // namespace
}  // namespace fastpersist::pipeline
