// SPDX-License-Identifier: Apache-2.0
// Faults while a checkpoint is read: whatever passes is survived with the right bytes, whatever
// does not is told once, and nothing is left behind.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "checkpoint/opened_file.h"
#include "testing/faulty_engine.h"
#include "testing/faulty_files.h"
#include "testing/generation_file.h"
#include "testing/process_state.h"
#include "testing/seed.h"
#include "testing/temporary_directory.h"
#include "testing/torch_states.h"

namespace fastpersist::checkpoint {
namespace {

using engine::IoEngine;
using testing::ArchiveOf;
using testing::Fault;
using testing::FaultAt;
using testing::FaultScript;
using testing::FaultyEngine;
using testing::FaultyFiles;
using testing::GenerationFile;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Operation;
using testing::Random;
using testing::RecordsOfViews;
using testing::Seed;
using testing::TemporaryDirectory;
using testing::WriteFile;

constexpr std::size_t kFirst = 3'000'000;
constexpr std::size_t kSecond = 50'001;
// Not the automatic choice, which would copy from the page cache what was just written.
const Options kOptions{.engine = Engine::kUring, .block_bytes = 65536};

class ReadFaultsTest : public ::testing::Test {
 protected:
  ReadFaultsTest()
      : content_(ArchiveOf(
            RecordsOfViews({GenerationFile(1, kFirst + 600).substr(0, kFirst),
                            GenerationFile(2, kSecond + 600).substr(0, kSecond)},
                           {{.name = "a", .shape = {kFirst}, .strides = {1}},
                            {.name = "b", .storage = 1, .shape = {kSecond}, .strides = {1}}}))) {
    WriteFile(path_, content_);
    const auto warm = OpenedFile::Open(path_);
    EXPECT_TRUE(warm);
    EXPECT_TRUE((*warm)->Verify({}, {}));  // whatever is kept for good is kept now
  }

  // Every engine fails by the script, on a real one that works here.
  static Environment Failing(std::function<FaultScript()> script) {
    return {.make_engine = [script = std::move(script)](
                               Engine kind, unsigned depth) -> Result<std::unique_ptr<IoEngine>> {
      auto made = engine::MakeEngine(kind, depth);
      if (!made) return made;
      return std::make_unique<FaultyEngine>(*std::move(made), script());
    }};
  }

  void ExpectAllThere(OpenedFile& file, const memory::Arena& arena) const {
    for (const auto& storage : file.contents()->storages) {
      const auto bytes = arena.memory().subspan(storage.offset, storage.size);
      EXPECT_TRUE(std::ranges::equal(
          bytes, std::as_bytes(std::span(content_)).subspan(storage.offset, storage.size)))
          << storage.name;
    }
  }

  // In the working directory, which is on a disk: /tmp need not take direct I/O.
  const TemporaryDirectory directory_{std::filesystem::current_path()};
  const std::string path_ = directory_ / "model.pt";
  const std::string content_;
};

TEST_F(ReadFaultsTest, WhateverPassesIsSurvivedWithTheRightBytes) {
  const Seed seed;
  Random random(seed.value());
  for (int round = 0; round < 12; ++round) {
    const auto file =
        OpenedFile::Open(path_, Failing([&] { return testing::RecoverableFaults(random()); }));
    ASSERT_TRUE(file);
    ReadInfo info;
    const auto arena = (*file)->ReadAll(kOptions, info);
    ASSERT_TRUE(arena) << arena.error().Message();
    ExpectAllThere(**file, *arena);
    const auto found = (*file)->Verify(kOptions, {});
    ASSERT_TRUE(found) << found.error().Message();
    EXPECT_THAT(found->damages, IsEmpty());
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
}

TEST_F(ReadFaultsTest, ADeviceThatFailsIsAnErrorOfTheReadAndNotADamage) {
  const auto before = testing::OpenFiles();
  const unsigned threads = testing::ThreadCount();
  for (int i = 0; i < 20; ++i) {
    const auto file =
        OpenedFile::Open(path_, Failing([] { return FaultAt(2, Fault::Reports(-EIO)); }));
    ASSERT_TRUE(file);
    ReadInfo info;
    const auto arena = (*file)->ReadAll(kOptions, info);
    const auto found = (*file)->Verify(kOptions, {});
    if (arena && found && !found->info.direct) GTEST_SKIP() << "skipped: no direct I/O here";
    ASSERT_FALSE(arena);
    EXPECT_EQ(arena.error().code, ErrorCode::kStorage);
    EXPECT_EQ(arena.error().system_errno, EIO);
    EXPECT_EQ(arena.error().path, path_);
    ASSERT_FALSE(found);
    EXPECT_EQ(found.error().code, ErrorCode::kStorage);
  }
  EXPECT_EQ(testing::OpenFiles(), before);
  EXPECT_EQ(testing::ThreadCount(), threads);
}

TEST_F(ReadFaultsTest, ALateFailureOfAnEngineBeginsAnewWithTheRightResult) {
  for (const std::uint64_t position : {0U, 7U, 40U}) {
    unsigned made = 0;
    const auto file = OpenedFile::Open(path_, Failing([&made, position] {
                                         const bool first = made++ == 0;
                                         return first ? FaultAt(position, Fault::EngineError(EPERM))
                                                      : testing::FaultAlways(Fault{});
                                       }));
    ASSERT_TRUE(file);
    ReadInfo info;
    const auto arena = (*file)->ReadAll(kOptions, info);
    ASSERT_TRUE(arena) << arena.error().Message();
    ExpectAllThere(**file, *arena);
    if (!info.direct && made == 0) GTEST_SKIP() << "skipped: no direct I/O here";
    EXPECT_THAT(info.engine_reason, HasSubstr("this engine is refused"));
  }
}

TEST_F(ReadFaultsTest, AFileThatCannotBeOpenedIsAnErrorThatLeavesNothingOpen) {
  const auto before = testing::OpenFiles();
  for (const int system_errno : {EMFILE, EACCES, EIO, ENOENT}) {
    const FaultyFiles files(
        {{.kind = Operation::Kind::kOpenInPlace, .system_errno = system_errno}});
    const auto file = OpenedFile::Open(path_, {.files = &files});
    ASSERT_FALSE(file);
    EXPECT_EQ(file.error().system_errno, system_errno);
    EXPECT_EQ(file.error().path, path_);
  }
  EXPECT_EQ(testing::OpenFiles(), before);
}

TEST_F(ReadFaultsTest, WithoutASecondDescriptorTheFirstServes) {
  const FaultyFiles files({{.kind = Operation::Kind::kOpenInPlace,
                            .system_errno = EMFILE,
                            .nth = 2,
                            .from_then_on = true}});
  const auto file = OpenedFile::Open(path_, {.files = &files});
  ASSERT_TRUE(file);
  ReadInfo info;
  const auto arena = (*file)->ReadAll(kOptions, info);
  ASSERT_TRUE(arena) << arena.error().Message();
  ExpectAllThere(**file, *arena);
  EXPECT_FALSE(info.direct);
  EXPECT_NE(info.warning, "");
}

TEST_F(ReadFaultsTest, AHeaderThatChangesWhileItIsReadIsADamageAndNeverSilence) {
  // The first header sends the reader to look for the bodies; when it reads again, the header of
  // another record has changed.
  const std::string spread = testing::WithGaps(content_, 100, "data/0");
  WriteFile(path_, spread);
  unsigned reads = 0;
  std::uint64_t header = 0;
  const auto file = OpenedFile::Open(
      path_, Failing([&] {
        if (++reads == 2) {
          const base::UniqueFd fd(::open(path_.c_str(), O_WRONLY | O_CLOEXEC));
          const char longer = '\x7F';
          EXPECT_EQ(::pwrite(fd.get(), &longer, 1, static_cast<off_t>(header + 28)), 1);
        }
        return testing::FaultAlways(Fault{});
      }));
  ASSERT_TRUE(file);
  const auto contents = (*file)->contents();
  header = contents->archive.records[contents->storages[1].record].header_offset;
  ReadInfo info;
  const auto arena = (*file)->ReadAll(kOptions, info);
  if (arena && !info.direct) GTEST_SKIP() << "skipped: no direct I/O here";
  ASSERT_FALSE(arena) << "half of it was read";
  EXPECT_EQ(arena.error().code, ErrorCode::kCorrupt);
  EXPECT_EQ(reads, 2U);
}

}  // namespace
}  // namespace fastpersist::checkpoint
