// SPDX-License-Identifier: Apache-2.0
// Read plans of all shapes, carried out by every engine on a real file and by one in memory that
// demands odd alignments: the sink sees the bytes that are wanted, once, and in order.
#include "pipeline/read_stream.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/choose.h"
#include "file/device_limits.h"
#include "testing/aligned_memory.h"
#include "testing/contract_file.h"
#include "testing/faulty_engine.h"
#include "testing/memory_engine.h"
#include "testing/seed.h"

namespace fastpersist::pipeline {
namespace {

using engine::IoEngine;
using engine::IoRequest;
using fastpersist::testing::AlignedMemory;
using fastpersist::testing::Between;
using fastpersist::testing::ContractFile;
using fastpersist::testing::Fault;
using fastpersist::testing::FaultAlways;
using fastpersist::testing::FaultAt;
using fastpersist::testing::FaultyEngine;
using fastpersist::testing::FillWithNoise;
using fastpersist::testing::InFlightCount;
using fastpersist::testing::IoTrace;
using fastpersist::testing::kLargestAlignment;
using fastpersist::testing::MemoryEngine;
using fastpersist::testing::MemoryFile;
using fastpersist::testing::OnceIn;
using fastpersist::testing::Random;
using fastpersist::testing::RecoverableFaults;
using fastpersist::testing::Seed;
using fastpersist::testing::SubmittedCount;

constexpr std::uint64_t kSize = 600'000;

// Compares whatever comes with the file, and notes where it came from.
class NotingSink final : public ByteSink {
 public:
  explicit NotingSink(std::span<const std::byte> file) : file_(file), seen_(file.size(), false) {}

  void Restart() override { ADD_FAILURE() << "nothing was begun anew"; }
  bool Accept(std::uint64_t offset, std::span<const std::byte> bytes) override {
    EXPECT_GE(offset, end_) << "out of order, or twice";
    end_ = offset + bytes.size();
    EXPECT_TRUE(end_ <= file_.size() &&
                std::ranges::equal(bytes, file_.subspan(offset, bytes.size())))
        << bytes.size() << " bytes at " << offset;
    std::fill_n(seen_.begin() + static_cast<std::ptrdiff_t>(offset), bytes.size(), true);
    ++calls_;
    return calls_ < enough;
  }

  [[nodiscard]] bool Saw(plan::Range range) const {
    return std::all_of(seen_.begin() + static_cast<std::ptrdiff_t>(range.begin),
                       seen_.begin() + static_cast<std::ptrdiff_t>(range.end),
                       [](bool seen) { return seen; });
  }
  [[nodiscard]] std::size_t calls() const { return calls_; }

  std::size_t enough = SIZE_MAX;  ///< Calls after which no more is needed.

 private:
  std::span<const std::byte> file_;
  std::vector<bool> seen_;
  std::uint64_t end_ = 0;
  std::size_t calls_ = 0;
};

// What is wanted of the file, and where it should go.
struct Wishes {
  std::vector<plan::Range> wanted;
  std::vector<plan::Delivery> deliveries;
  std::vector<AlignedMemory> memory;
};

Wishes RandomWishes(Random& random) {
  Wishes wishes;
  std::uint64_t at = OnceIn(random, 2) ? 0 : Between(random, 1, 20'000);
  while (at < kSize && wishes.wanted.size() < 12) {
    const plan::Range range{.begin = at, .end = std::min(kSize, at + Between(random, 1, 150'000))};
    wishes.wanted.push_back(range);
    if (OnceIn(random, 2)) {
      // Mostly at the file's own residue, so that whole blocks land where they belong.
      const std::uint64_t residue =
          OnceIn(random, 3) ? Between(random, 0, 4095) : range.begin % kLargestAlignment;
      wishes.memory.emplace_back(range.end - range.begin, residue);
      wishes.deliveries.push_back({.range = range, .memory = wishes.memory.back().data()});
    }
    at = range.end + (OnceIn(random, 2) ? 0 : Between(random, 1, 200'000));
  }
  return wishes;
}

class ReadStreamTest : public ::testing::Test {
 protected:
  ReadStreamTest() { FillWithNoise(content_, random_); }

  ReadOutcome Read(const plan::ReadPlan& plan, std::unique_ptr<IoEngine>& engine, int fd,
                   ByteSink& sink) {
    return ReadStream(plan, options_.block_bytes, slots_,
                      {.fd = fd,
                       .path = "model.pt",
                       .limits = options_.limits,
                       .leave_direct =
                           [fd] {
                             const int flags = ::fcntl(fd, F_GETFL);
                             return ::fcntl(fd, F_SETFL, flags & ~O_DIRECT) == 0 ? 0 : -errno;
                           },
                       .kind = IoRequest::Kind::kRead},
                      engine,
                      plan.staged_bytes == 0
                          ? std::span<std::byte>()
                          : staging_.bytes().first(slots_ * options_.block_bytes),
                      sink);
  }

  void RandomOptions(const plan::DeviceLimits& limits) {
    const std::uint64_t unit =
        std::max<std::uint64_t>({limits.memory_align, limits.offset_align, 4096});
    slots_ = static_cast<unsigned>(Between(random_, 1, 9));
    options_ = {.limits = limits,
                .block_bytes = unit * Between(random_, 1, 4),
                .min_in_place_bytes = Between(random_, 1, 50'000),
                .coalesce_bytes = std::max<std::uint64_t>(unit, Between(random_, 0, 100'000))};
  }

  // Reads what somebody wishes; what landed in place must be right too.
  void ReadWishes(std::unique_ptr<IoEngine> engine, int fd) {
    const Wishes wishes = RandomWishes(random_);
    const auto plan = plan::PlanReads(wishes.wanted, wishes.deliveries, options_);
    NotingSink sink(content_);
    const ReadOutcome outcome = Read(plan, engine, fd, sink);
    EXPECT_FALSE(outcome.error) << outcome.error->Message();
    EXPECT_FALSE(outcome.engine_failed);
    EXPECT_FALSE(outcome.reads_lost);
    for (const plan::Range& range : wishes.wanted) EXPECT_TRUE(sink.Saw(range));
    for (const plan::PlannedRead& read : plan.reads) {
      if (read.in_place == nullptr) continue;
      EXPECT_EQ(std::memcmp(read.in_place, content_.data() + read.offset, read.length), 0);
    }
  }

  const Seed seed_;
  Random random_{seed_.value()};
  std::vector<std::byte> content_ = std::vector<std::byte>(kSize);
  plan::ReadPlanOptions options_;
  unsigned slots_ = 4;
  const AlignedMemory staging_{std::size_t{9} * 4 * 65536};
};

class ReadStreamEngineTest : public ReadStreamTest, public ::testing::WithParamInterface<Engine> {};

TEST_P(ReadStreamEngineTest, EveryByteThatIsWantedArrivesOnceAndInOrder) {
  if (const auto made = engine::MakeEngine(GetParam(), 1); !made) {
    GTEST_SKIP() << "skipped: " << made.error().Message();
  }
  auto file = ContractFile::Create(GetParam() != Engine::kBuffered);
  if (!file) file = ContractFile::Create(false);
  file->SetBytes(content_);
  const plan::DeviceLimits limits =
      (::fcntl(file->fd(), F_GETFL) & O_DIRECT) != 0
          ? file::ProbeReadLimits(file->fd())
          : plan::DeviceLimits{.memory_align = 1, .offset_align = 1, .direct = false};
  for (int round = 0; round < 30; ++round) {
    RandomOptions(limits);
    auto engine = engine::MakeEngine(GetParam(), static_cast<unsigned>(Between(random_, 1, 8)));
    ASSERT_TRUE(engine);
    ReadWishes(*std::move(engine), file->fd());
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, ReadStreamEngineTest,
                         ::testing::Values(Engine::kUring, Engine::kLibaio, Engine::kThreads,
                                           Engine::kBuffered),
                         [](const auto& engine) { return std::string(EngineName(engine.param)); });

// The same over the engine that finishes late and out of order.
class ReadStreamMemoryTest : public ReadStreamTest {
 protected:
  ReadStreamMemoryTest() {
    EXPECT_EQ(::pwrite(file_.fd(), content_.data(), kSize, 0), static_cast<ssize_t>(kSize));
  }

  std::unique_ptr<IoEngine> MakeInner(unsigned depth = 3) {
    return std::make_unique<MemoryEngine>(fastpersist::testing::MemoryEngineOptions{
        .depth = depth, .limits = options_.limits, .seed = random_()});
  }
  std::unique_ptr<IoEngine> Make(fastpersist::testing::FaultScript script, unsigned depth = 3) {
    return std::make_unique<FaultyEngine>(MakeInner(depth), std::move(script), trace_);
  }
  plan::ReadPlan WholeFile() {
    RandomOptions({.memory_align = 512, .offset_align = 512, .direct = true});
    options_.block_bytes = 4096;
    return plan::PlanReads(std::vector<plan::Range>{{.begin = 0, .end = kSize}}, {}, options_);
  }

  const MemoryFile file_;
  const std::shared_ptr<IoTrace> trace_ = std::make_shared<IoTrace>();
};

TEST_F(ReadStreamMemoryTest, OddAlignmentsLoseNothing) {
  for (const std::uint32_t offset : {1U, 512U, 4096U, 16384U, 65536U}) {
    for (const std::uint32_t memory : {1U, 4U, 512U, 16384U, 65536U}) {
      for (const unsigned depth : {1U, 2U, 7U}) {
        RandomOptions({.memory_align = memory, .offset_align = offset, .direct = true});
        ReadWishes(MakeInner(depth), file_.fd());
        ASSERT_FALSE(HasFailure()) << "offset " << offset << ", memory " << memory;
      }
    }
  }
}

TEST_F(ReadStreamMemoryTest, FaultsThatPassLoseNothing) {
  for (int round = 0; round < 20; ++round) {
    RandomOptions({.memory_align = 512, .offset_align = 512, .direct = true});
    ReadWishes(Make(RecoverableFaults(random_())), file_.fd());
    EXPECT_EQ(InFlightCount(*trace_), 0U);
    trace_->clear();
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
}

TEST_F(ReadStreamMemoryTest, AFileThatRefusesDirectIoOnTheWayIsReadToTheEnd) {
  for (const std::uint64_t position : {0U, 3U}) {
    const plan::ReadPlan plan = WholeFile();
    auto engine = Make(FaultAt(position, Fault::Reports(-EINVAL)));
    NotingSink sink(content_);
    const ReadOutcome outcome = Read(plan, engine, file_.fd(), sink);
    EXPECT_FALSE(outcome.error);
    EXPECT_NE(outcome.left_direct, "");
    EXPECT_TRUE(sink.Saw({.begin = 0, .end = kSize}));
  }
}

TEST_F(ReadStreamMemoryTest, ASinkThatHasEnoughEndsTheReadAndWhatIsInFlightIsDrained) {
  for (const std::size_t enough : {std::size_t{1}, std::size_t{5}, std::size_t{100}}) {
    const plan::ReadPlan plan = WholeFile();
    ASSERT_GT(plan.reads.size(), 110U);
    auto engine = Make(FaultAlways(Fault{}));
    NotingSink sink(content_);
    sink.enough = enough;
    trace_->clear();
    const ReadOutcome outcome = Read(plan, engine, file_.fd(), sink);
    EXPECT_FALSE(outcome.error);
    EXPECT_EQ(sink.calls(), enough);
    EXPECT_EQ(InFlightCount(*trace_), 0U);
    EXPECT_LE(SubmittedCount(*trace_), enough + slots_) << "and nothing else was begun";
  }
}

TEST_F(ReadStreamMemoryTest, NoMoreThanTheSlotsAreBegunAheadOfTheSink) {
  const plan::ReadPlan plan = WholeFile();
  slots_ = 3;
  auto engine = Make(FaultAlways(Fault{}), /*depth=*/8);
  NotingSink sink(content_);
  EXPECT_FALSE(Read(plan, engine, file_.fd(), sink).error);
  std::size_t in_flight = 0;
  for (const auto& event : *trace_) {
    if (event.kind == fastpersist::testing::IoEvent::Kind::kSubmitted) {
      EXPECT_LE(++in_flight, 3U);
    } else {
      --in_flight;
    }
  }
}

TEST_F(ReadStreamMemoryTest, AnErrorEndsTheReadAndNothingStaysInFlight) {
  const plan::ReadPlan plan = WholeFile();
  auto engine = Make(FaultAt(9, Fault::Reports(-EIO)));
  NotingSink sink(content_);
  const ReadOutcome outcome = Read(plan, engine, file_.fd(), sink);
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.error->system_errno, EIO);
  EXPECT_FALSE(outcome.engine_failed);
  EXPECT_LE(sink.calls(), 9U);
  EXPECT_EQ(InFlightCount(*trace_), 0U);
}

TEST_F(ReadStreamMemoryTest, AFailingEngineIsToldFromAFailingFile) {
  const plan::ReadPlan plan = WholeFile();
  auto engine = Make(FaultAt(9, Fault::EngineError(EPERM)));
  NotingSink sink(content_);
  const ReadOutcome outcome = Read(plan, engine, file_.fd(), sink);
  ASSERT_TRUE(outcome.error);
  EXPECT_TRUE(outcome.engine_failed);
  EXPECT_FALSE(outcome.reads_lost);
}

TEST_F(ReadStreamMemoryTest, AnEmptyPlanReadsNothing) {
  auto engine = Make(FaultAlways(Fault{}));
  NotingSink sink(content_);
  EXPECT_FALSE(Read({}, engine, file_.fd(), sink).error);
  EXPECT_EQ(sink.calls(), 0U);
}

}  // namespace
}  // namespace fastpersist::pipeline
