// SPDX-License-Identifier: Apache-2.0
// The stages of reading wired together: every engine, every way to fall back, and what the info
// says about it.
#include "checkpoint/read_ranges.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/buffer_sizes.h"
#include "testing/aligned_memory.h"
#include "testing/faulty_engine.h"
#include "testing/faulty_files.h"
#include "testing/generation_file.h"
#include "testing/limited_files.h"
#include "testing/memory_engine.h"
#include "testing/process_state.h"
#include "testing/seed.h"
#include "testing/temporary_directory.h"

namespace fastpersist::checkpoint {
namespace {

using engine::IoEngine;
using engine::IoRequest;
using testing::AlignedMemory;
using testing::Between;
using testing::Fault;
using testing::FaultAt;
using testing::FaultScript;
using testing::FaultyEngine;
using testing::FaultyFiles;
using testing::GenerationFile;
using ::testing::HasSubstr;
using testing::kLargestAlignment;
using ::testing::Not;
using testing::OnceIn;
using testing::Operation;
using testing::Random;
using testing::ReapFault;
using testing::Seed;
using testing::TemporaryDirectory;

// Keeps what comes, at its place in a copy of the file.
class CopyingSink final : public pipeline::ByteSink {
 public:
  explicit CopyingSink(std::size_t size) : bytes_(size, '\0') {}
  void Restart() override {
    ++restarts_;
    std::ranges::fill(bytes_, '\0');
    end_ = 0;
  }
  bool Accept(std::uint64_t offset, std::span<const std::byte> bytes) override {
    EXPECT_GE(offset, end_);
    end_ = offset + bytes.size();
    std::memcpy(bytes_.data() + offset, bytes.data(), bytes.size());
    return true;
  }
  [[nodiscard]] const std::string& bytes() const { return bytes_; }
  [[nodiscard]] int restarts() const { return restarts_; }

 private:
  std::string bytes_;
  std::uint64_t end_ = 0;
  int restarts_ = 0;
};

// Real engines of every kind, each wrapped in faults.
Environment FailingEngines(const std::function<FaultScript(Engine)>& script) {
  return {
      .make_engine = [script](Engine kind, unsigned depth) -> Result<std::unique_ptr<IoEngine>> {
        auto made = engine::MakeEngine(kind, depth);
        if (!made) made = engine::MakeEngine(Engine::kThreads, depth);
        return std::make_unique<FaultyEngine>(*std::move(made), script(kind));
      }};
}

class ReadRangesTest : public ::testing::Test {
 protected:
  ReadRangesTest() { testing::WriteFile(directory_ / "model.pt", content_); }

  file::InputFile Open() const {
    auto file = file::InputFile::Open(directory_ / "model.pt", file::RealFileOps());
    EXPECT_TRUE(file);
    return *std::move(file);
  }
  [[nodiscard]] plan::Range All() const { return {.begin = 0, .end = content_.size()}; }

  // Reads the whole file, and says what the read reported.
  Result<ReadInfo> ReadAll(const Options& options, const Environment& environment = {}) {
    const auto before = testing::OpenFiles();
    Result<ReadInfo> info;
    {
      const auto file = Open();
      sink_ = std::make_unique<CopyingSink>(content_.size());
      info = ReadRanges(file, std::vector{All()}, deliveries_, *sink_, options, environment);
    }
    EXPECT_EQ(testing::OpenFiles(), before);
    if (info) {
      EXPECT_TRUE(sink_->bytes() == content_);
      EXPECT_EQ(info->bytes, info->staged_bytes + info->in_place_bytes);
      EXPECT_GE(info->bytes, content_.size());
      EXPECT_NE(info->engine_reason, "");
    }
    return info;
  }

  // Somewhere for the whole file to land, where the device may put it.
  const AlignedMemory& DeliverAll() {
    memory_ = std::make_unique<AlignedMemory>(content_.size());
    deliveries_ = {{.range = All(), .memory = memory_->data()}};
    return *memory_;
  }

  const Seed seed_;
  Random random_{seed_.value()};
  const std::string content_ = GenerationFile(7, (std::size_t{5} << 20) + 777);
  // In the working directory, which is on a disk: /tmp need not take direct I/O.
  const TemporaryDirectory directory_{std::filesystem::current_path()};
  std::unique_ptr<CopyingSink> sink_;
  std::unique_ptr<AlignedMemory> memory_;
  std::vector<plan::Delivery> deliveries_;
};

TEST_F(ReadRangesTest, EveryEngineBlockSizeAndDepthReadsTheSame) {
  for (const Engine engine :
       {Engine::kAuto, Engine::kUring, Engine::kLibaio, Engine::kThreads, Engine::kBuffered}) {
    for (const std::uint64_t block : {4096U, 12288U, 1U << 20}) {
      for (const std::uint32_t depth : {1U, 3U, 32U}) {
        for (const bool direct : {true, false}) {
          const auto info = ReadAll({.engine = engine,
                                     .block_bytes = block,
                                     .queue_depth = depth,
                                     .staging_bytes = std::uint64_t{1} << 20,
                                     .direct = direct});
          ASSERT_TRUE(info) << info.error().Message();
          EXPECT_FALSE(info->direct && (!direct || engine == Engine::kBuffered));
          ASSERT_FALSE(HasFailure()) << EngineName(engine) << " " << block << " " << depth;
        }
      }
    }
  }
}

TEST_F(ReadRangesTest, RandomRangesLandWhereTheyBelong) {
  const auto file = Open();
  for (int round = 0; round < 40; ++round) {
    std::vector<plan::Range> wanted;
    std::vector<plan::Delivery> deliveries;
    std::vector<AlignedMemory> memory;
    std::uint64_t at = Between(random_, 0, 100'000);
    while (at < content_.size()) {
      const std::uint64_t end =
          std::min<std::uint64_t>(content_.size(), at + Between(random_, 1, 2'500'000));
      wanted.push_back({.begin = at, .end = end});
      memory.emplace_back(end - at,
                          OnceIn(random_, 2) ? at % kLargestAlignment : Between(random_, 0, 5000));
      deliveries.push_back({.range = wanted.back(), .memory = memory.back().data()});
      at = end + (OnceIn(random_, 2) ? 0 : Between(random_, 1, 500'000));
    }
    CopyingSink sink(content_.size());
    const auto info = ReadRanges(file, wanted, deliveries, sink,
                                 {.block_bytes = 4096 * Between(random_, 1, 300)});
    ASSERT_TRUE(info) << info.error().Message();
    for (const plan::Range& range : wanted) {
      const std::uint64_t length = range.end - range.begin;
      EXPECT_TRUE(sink.bytes().substr(range.begin, length) == content_.substr(range.begin, length));
    }
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
}

TEST_F(ReadRangesTest, LargeAlignedMemoryIsReadInPlace) {
  const AlignedMemory& memory = DeliverAll();
  for (const bool direct : {true, false}) {
    const auto info = ReadAll({.direct = direct});
    ASSERT_TRUE(info);
    EXPECT_GE(info->in_place_bytes, content_.size() / 65536 * 65536);
    EXPECT_LT(info->staged_bytes, 65536U);
    EXPECT_EQ(std::memcmp(memory.data(), content_.data(), info->in_place_bytes), 0);
  }
}

TEST_F(ReadRangesTest, DevicesWithOddAlignmentsAreObeyed) {
  for (const std::uint32_t offset : {1U, 512U, 8192U, 65536U}) {
    for (const std::uint32_t memory : {1U, 512U, 65536U}) {
      const plan::DeviceLimits limits{
          .memory_align = memory, .offset_align = offset, .direct = true};
      const testing::LimitedFiles files(limits);
      const Environment environment{
          .files = &files,
          .make_engine = [&](Engine, unsigned depth) -> Result<std::unique_ptr<IoEngine>> {
            return std::make_unique<testing::MemoryEngine>(
                testing::MemoryEngineOptions{.depth = depth, .limits = limits, .seed = random_()});
          }};
      DeliverAll();
      const auto info = ReadAll(
          {.engine = Engine::kUring, .block_bytes = 4096 * Between(random_, 1, 64)}, environment);
      ASSERT_TRUE(info) << info.error().Message();
      EXPECT_TRUE(info->direct);
      ASSERT_FALSE(HasFailure()) << "offset " << offset << ", memory " << memory;
    }
  }
}

// Files on a device that is said to be of one kind or the other, and never in the page cache.
class FilesOnDevice final : public file::FileOps {
 public:
  explicit FilesOnDevice(bool processor_copies) : processor_copies_(processor_copies) {}
  bool ProcessorCopies(int /*fd*/) const override { return processor_copies_; }
  double CachedShare(int /*fd*/, std::uint64_t /*size*/) const override { return 0; }

 private:
  bool processor_copies_;
};

TEST_F(ReadRangesTest, FewBlocksAreInFlightOnlyWhereTheProcessorCopies) {
  for (const bool copies : {true, false}) {
    const FilesOnDevice files(copies);
    unsigned asked = 0;
    const Environment environment{
        .files = &files,
        .make_engine = [&](Engine kind, unsigned depth) -> Result<std::unique_ptr<IoEngine>> {
          asked = depth;
          return engine::MakeEngine(kind, depth);
        }};
    const auto info = ReadAll({.engine = Engine::kThreads}, environment);
    ASSERT_TRUE(info) << info.error().Message();
    if (!info->direct) GTEST_SKIP() << "skipped: this directory takes no direct I/O";
    EXPECT_EQ(asked, copies ? kCopiedDepth : kDefaultDepth);
    ASSERT_TRUE(ReadAll({.engine = Engine::kThreads, .queue_depth = 5}, environment));
    EXPECT_EQ(asked, 5U);
  }
}

TEST_F(ReadRangesTest, NothingWantedIsReadAtOnce) {
  const auto file = Open();
  CopyingSink sink(content_.size());
  const auto info = ReadRanges(file, {}, {}, sink, {});
  ASSERT_TRUE(info) << info.error().Message();
  EXPECT_EQ(info->bytes, 0U);
}

TEST_F(ReadRangesTest, OptionsThatCannotWorkAreRefusedBeforeAnythingIsRead) {
  const auto info = ReadAll({.block_bytes = 1000});
  ASSERT_FALSE(info);
  EXPECT_EQ(info.error().code, ErrorCode::kInvalidArgument);
}

TEST_F(ReadRangesTest, AnEngineThatIsRefusedIsFollowedByTheNextWithTheReason) {
  const Environment environment{
      .make_engine = [](Engine kind, unsigned depth) -> Result<std::unique_ptr<IoEngine>> {
        if (kind == Engine::kThreads) return engine::MakeEngine(kind, depth);
        return std::unexpected(Error{.operation = "set up", .detail = "a sandbox forbids it"});
      }};
  const auto info = ReadAll({.engine = Engine::kUring}, environment);
  ASSERT_TRUE(info);
  if (!info->direct) GTEST_SKIP() << "skipped: no direct I/O here";
  EXPECT_EQ(info->engine, Engine::kThreads);
  EXPECT_THAT(info->engine_reason, HasSubstr("uring"));
  EXPECT_THAT(info->engine_reason, HasSubstr("a sandbox forbids it"));
  EXPECT_THAT(info->warning, HasSubstr("reading with threads"));
}

TEST_F(ReadRangesTest, AnEngineThatFailsLateIsFollowedByTheNextFromTheFirstByte) {
  for (const std::uint64_t position : {0U, 5U, 50U}) {
    const auto info =
        ReadAll({.engine = Engine::kUring, .block_bytes = 65536}, FailingEngines([=](Engine kind) {
                  return kind == Engine::kUring ? FaultAt(position, Fault::EngineError(EPERM))
                                                : testing::FaultAlways(Fault{});
                }));
    ASSERT_TRUE(info) << info.error().Message();
    if (!info->direct) GTEST_SKIP() << "skipped: no direct I/O here";
    EXPECT_EQ(sink_->restarts(), 1);
    EXPECT_THAT(info->engine_reason, HasSubstr("this engine is refused"));
    EXPECT_THAT(info->warning, HasSubstr("reading with"));
  }
}

TEST_F(ReadRangesTest, WhenEveryEngineFailsTheBufferedOneReads) {
  const auto info = ReadAll(
      {}, FailingEngines([](Engine) { return testing::FaultAlways(Fault::EngineError(ENOSYS)); }));
  ASSERT_TRUE(info);
  EXPECT_EQ(info->engine, Engine::kBuffered);
}

TEST_F(ReadRangesTest, AReadThatCannotBeWaitedForIsAnErrorAndIsNotRepeated) {
  const auto info =
      ReadAll({.engine = Engine::kUring}, FailingEngines([](Engine) {
                FaultScript script = testing::FaultAlways(Fault{});
                script.on_reap = [](std::uint64_t) { return ReapFault::kEngineError; };
                return script;
              }));
  if (info && !info->direct) GTEST_SKIP() << "skipped: no direct I/O here";
  ASSERT_FALSE(info);
  EXPECT_EQ(info.error().path, directory_ / "model.pt");
  EXPECT_EQ(sink_->restarts(), 0);
}

TEST_F(ReadRangesTest, AnErrorOfTheDeviceNamesTheFileAndThePlace) {
  const auto info =
      ReadAll({.engine = Engine::kUring, .block_bytes = 65536, .queue_depth = 1},
              FailingEngines([](Engine) { return FaultAt(3, Fault::Reports(-EIO)); }));
  if (info && !info->direct) GTEST_SKIP() << "skipped: no direct I/O here";
  ASSERT_FALSE(info);
  EXPECT_EQ(info.error().code, ErrorCode::kStorage);
  EXPECT_EQ(info.error().operation, "read");
  EXPECT_EQ(info.error().path, directory_ / "model.pt");
  EXPECT_EQ(info.error().offset, 3 * 65536U);
  EXPECT_EQ(info.error().system_errno, EIO);
}

TEST_F(ReadRangesTest, MemoryThatADeviceCannotReachIsReachedThroughStaging) {
  const AlignedMemory& memory = DeliverAll();
  const std::byte* const begin = memory.data();
  const std::byte* const end = begin + content_.size();
  const auto info =
      ReadAll({.engine = Engine::kUring}, FailingEngines([=](Engine) {
                return FaultScript{.on_submit = [=](std::uint64_t, const IoRequest& request) {
                  const bool ours = begin <= request.data && request.data < end;
                  return ours ? Fault::Reports(-EFAULT) : Fault{};
                }};
              }));
  ASSERT_TRUE(info) << info.error().Message();
  if (!info->direct) GTEST_SKIP() << "skipped: no direct I/O here";
  EXPECT_EQ(info->in_place_bytes, 0U);
  EXPECT_EQ(sink_->restarts(), 1);
}

TEST_F(ReadRangesTest, DirectIoThatIsRefusedOnTheWayIsReportedAsAWarning) {
  const auto info =
      ReadAll({.engine = Engine::kUring, .block_bytes = 65536},
              FailingEngines([](Engine) { return FaultAt(4, Fault::Reports(-EINVAL)); }));
  ASSERT_TRUE(info) << info.error().Message();
  EXPECT_FALSE(info->direct);
  EXPECT_EQ(info->engine, Engine::kBuffered);
  EXPECT_THAT(info->warning, HasSubstr("reading with buffered"));
}

TEST_F(ReadRangesTest, AFileThatCannotBeOpenedDirectlyIsReadBuffered) {
  const FaultyFiles files({{.kind = Operation::Kind::kOpenInPlace, .system_errno = EINVAL}});
  const auto info = ReadAll({.engine = Engine::kUring}, {.files = &files});
  ASSERT_TRUE(info);
  EXPECT_FALSE(info->direct);
  EXPECT_EQ(info->engine, Engine::kBuffered);
  EXPECT_THAT(info->warning, HasSubstr("no direct I/O"));
}

// A file system that opens files with O_DIRECT and then takes no direct read.
class NoDirectReads final : public file::FileOps {
 public:
  plan::DeviceLimits ReadLimits(int /*fd*/) const override {
    return {.memory_align = 1, .offset_align = 1, .direct = false};
  }
  int SetDirect(int /*fd*/, bool /*direct*/) const override { return -EIO; }
};

TEST_F(ReadRangesTest, AFileThatTakesNoDirectReadsIsReadThroughItsOtherDescriptor) {
  const NoDirectReads files;
  const auto info = ReadAll({.engine = Engine::kUring}, {.files = &files});
  ASSERT_TRUE(info) << info.error().Message();
  EXPECT_FALSE(info->direct);
  EXPECT_THAT(info->warning, HasSubstr("reading with buffered"));
}

// All of a file lies in the page cache.
class CachedFiles final : public file::FileOps {
 public:
  double CachedShare(int /*fd*/, std::uint64_t /*size*/) const override { return 1; }
};

TEST_F(ReadRangesTest, WhatLiesInThePageCacheIsCopiedFromThereUnlessAnEngineIsAskedFor) {
  const CachedFiles files;
  const auto info = ReadAll({}, {.files = &files});
  ASSERT_TRUE(info);
  EXPECT_FALSE(info->direct);
  EXPECT_EQ(info->engine, Engine::kThreads);
  EXPECT_EQ(info->engine_reason, "the file is in the page cache");
  EXPECT_EQ(info->warning, "");

  const auto asked = ReadAll({.engine = Engine::kThreads}, {.files = &files});
  ASSERT_TRUE(asked);
  EXPECT_THAT(asked->engine_reason, Not(HasSubstr("page cache")));
}

TEST_F(ReadRangesTest, WithoutThreadsOneCopiesFromThePageCacheAndTheReasonSaysWhy) {
  const CachedFiles files;
  Environment environment =
      FailingEngines([](Engine) { return FaultAt(5, Fault::EngineError(EAGAIN)); });
  environment.files = &files;
  const auto late = ReadAll({.block_bytes = 65536}, environment);
  ASSERT_TRUE(late) << late.error().Message();
  EXPECT_EQ(sink_->restarts(), 1);
  EXPECT_EQ(late->engine, Engine::kBuffered);
  EXPECT_THAT(late->engine_reason, HasSubstr("page cache"));
  EXPECT_THAT(late->engine_reason, HasSubstr("this engine is refused"));

  environment.make_engine = [](Engine, unsigned) -> Result<std::unique_ptr<IoEngine>> {
    return std::unexpected(Error{.operation = "start a thread", .system_errno = EAGAIN});
  };
  const auto early = ReadAll({}, environment);
  ASSERT_TRUE(early);
  EXPECT_EQ(early->engine, Engine::kBuffered);
  EXPECT_THAT(early->warning, HasSubstr("start a thread"));
}

TEST_F(ReadRangesTest, WithoutDirectIoThereIsNothingToWarnOf) {
  for (const Options& options : {Options{.direct = false}, Options{.engine = Engine::kBuffered}}) {
    const auto info = ReadAll(options);
    ASSERT_TRUE(info);
    EXPECT_EQ(info->warning, "");
    EXPECT_EQ(info->engine, Engine::kBuffered);
  }
}

TEST_F(ReadRangesTest, AFileThatShrinksIsToldAndNotMadeUp) {
  for (const Options& options :
       {Options{}, Options{.engine = Engine::kUring}, Options{.direct = false}}) {
    testing::WriteFile(directory_ / "model.pt", content_);
    const auto file = Open();
    std::filesystem::resize_file(directory_ / "model.pt", 1'234'567);
    CopyingSink sink(content_.size());
    const auto info = ReadRanges(file, std::vector{All()}, {}, sink, options);
    ASSERT_FALSE(info);
    EXPECT_EQ(info.error().code, ErrorCode::kCorrupt);
    EXPECT_THAT(info.error().detail, HasSubstr("it was longer"));
    EXPECT_GE(info.error().offset.value_or(0), 1'234'567U);
  }
}

}  // namespace
}  // namespace fastpersist::checkpoint
