// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/save_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "testing/aligned_memory.h"
#include "testing/faulty_engine.h"
#include "testing/limited_files.h"
#include "testing/observed_files.h"
#include "testing/process_state.h"
#include "testing/save_content.h"
#include "testing/temporary_directory.h"

namespace fastpersist::checkpoint {
namespace {

using ::testing::ElementsAre;
using testing::GenerationFile;
using ::testing::IsEmpty;
using testing::LimitedFiles;
using testing::ModeOf;
using testing::ReadFile;
using testing::SaveContent;
using testing::TemporaryDirectory;
using testing::WriteFile;

constexpr Engine kEngines[] = {Engine::kAuto, Engine::kUring, Engine::kLibaio, Engine::kThreads,
                               Engine::kBuffered};

TEST(SaveStreamTest, EveryLengthAroundABlockArrivesWholeWithEveryEngine) {
  const TemporaryDirectory directory;
  const std::string source = GenerationFile(1, 1 << 20);
  for (const Engine engine : kEngines) {
    const Options options{.engine = engine, .block_bytes = 16384, .queue_depth = 3, .sync = false};
    for (const std::size_t block : {512U, 4096U, 16384U, 3 * 16384U}) {
      for (const std::size_t size : {block - 1, block, block + 1}) {
        const std::string content = source.substr(0, size);
        const auto saved = SaveContent(content, directory / "file", options);
        ASSERT_TRUE(saved) << saved.error().Message();
        ASSERT_EQ(saved->bytes, size);
        ASSERT_TRUE(ReadFile(directory / "file") == content)
            << EngineName(engine) << ", " << size << " bytes";
      }
    }
  }
  EXPECT_THAT(directory.names(), ElementsAre("file"));
}

TEST(SaveStreamTest, OneByteAndNoByteAreFilesToo) {
  const TemporaryDirectory directory;
  for (const Engine engine : kEngines) {
    for (const std::string& content : {std::string("x"), std::string()}) {
      const auto saved = SaveContent(content, directory / "file", {.engine = engine});
      ASSERT_TRUE(saved) << saved.error().Message();
      EXPECT_EQ(saved->bytes, content.size());
      EXPECT_EQ(ReadFile(directory / "file"), content);
      EXPECT_THAT(directory.names(), ElementsAre("file"));
    }
  }
}

TEST(SaveStreamTest, TheReportAddsUp) {
  const TemporaryDirectory directory;
  const std::string content = GenerationFile(1, 3'000'000);
  for (const Engine engine : kEngines) {
    const auto saved = SaveContent(content, directory / "file", {.engine = engine});
    ASSERT_TRUE(saved) << saved.error().Message();
    EXPECT_EQ(saved->path, directory / "file");
    EXPECT_EQ(saved->bytes, content.size());
    EXPECT_EQ(saved->staged_bytes + saved->in_place_bytes, saved->bytes);
    EXPECT_NE(saved->engine, Engine::kAuto) << "what ran, not what was asked for";
    EXPECT_FALSE(saved->engine_reason.empty());
    EXPECT_FALSE(saved->direct && saved->engine == Engine::kBuffered);
    const SaveSeconds& seconds = saved->seconds;
    for (const double part :
         {seconds.plan, seconds.fill, seconds.write, seconds.sync, seconds.commit}) {
      EXPECT_GE(part, 0);
    }
    EXPECT_GT(seconds.total, 0);
    EXPECT_LE(seconds.plan + seconds.fill + seconds.write + seconds.sync + seconds.commit,
              seconds.total + 1e-6);
  }
}

TEST(SaveStreamTest, WithoutDirectTheBufferedEngineWritesAndSaysSo) {
  const TemporaryDirectory directory;
  const auto saved = SaveContent("content", directory / "file", {.direct = false});
  ASSERT_TRUE(saved);
  EXPECT_FALSE(saved->direct);
  EXPECT_EQ(saved->engine, Engine::kBuffered);
  EXPECT_EQ(ReadFile(directory / "file"), "content");
}

TEST(SaveStreamTest, OptionsThatCannotWorkAreRefusedBeforeTheDiskIsTouched) {
  const TemporaryDirectory directory;
  for (const Options& options :
       {Options{.block_bytes = 1000}, Options{.queue_depth = 0}, Options{.staging_bytes = 1}}) {
    const auto saved = SaveContent("content", directory / "file", options);
    ASSERT_FALSE(saved);
    EXPECT_EQ(saved.error().code, ErrorCode::kInvalidArgument);
  }
  EXPECT_THAT(directory.names(), IsEmpty());
}

TEST(SaveStreamTest, ANewFileGetsTheModeThatTheUmaskLeaves) {
  const TemporaryDirectory directory;
  for (const mode_t mask : {0022U, 0027U, 0077U}) {
    const testing::ScopedUmask umask(mask);
    std::filesystem::remove(directory / "file");
    ASSERT_TRUE(SaveContent("content", directory / "file"));
    EXPECT_EQ(ModeOf(directory / "file"), 0666U & ~mask);
  }
}

TEST(SaveStreamTest, AReplacedFileKeepsItsMode) {
  const TemporaryDirectory directory;
  const testing::ScopedUmask umask(0077);
  for (const mode_t mode : {0640U, 0600U, 0755U}) {
    WriteFile(directory / "file", "old", mode);
    ASSERT_TRUE(SaveContent("content", directory / "file"));
    EXPECT_EQ(ReadFile(directory / "file"), "content");
    EXPECT_EQ(ModeOf(directory / "file"), mode);
  }
}

TEST(SaveStreamTest, ALinkStaysALinkAndItsFileIsReplaced) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "store");
  std::filesystem::create_symlink("store/real.pt", directory / "link.pt");
  for (const char* const content : {"dangling at first", "there already"}) {
    ASSERT_TRUE(SaveContent(content, directory / "link.pt"));
    EXPECT_TRUE(std::filesystem::is_symlink(directory / "link.pt"));
    EXPECT_FALSE(std::filesystem::is_symlink(directory / "store/real.pt"));
    EXPECT_EQ(ReadFile(directory / "store/real.pt"), content);
  }
  EXPECT_THAT(directory.names(), ElementsAre("link.pt", "store"));
}

TEST(SaveStreamTest, AReplacedFileLeavesItsOtherNamesAlone) {
  const TemporaryDirectory directory;
  WriteFile(directory / "file", "old");
  std::filesystem::create_hard_link(directory / "file", directory / "kept");
  ASSERT_TRUE(SaveContent("new", directory / "file"));
  EXPECT_EQ(ReadFile(directory / "kept"), "old");
  EXPECT_EQ(ReadFile(directory / "file"), "new");
}

TEST(SaveStreamTest, TheLongestNameAndForeignBytesWork) {
  const TemporaryDirectory directory;
  for (const std::string& name :
       {std::string(255, 'n'), std::string("mod\xc3\xa8le.pt"), std::string("\xff\xfe \n.pt")}) {
    ASSERT_TRUE(SaveContent("content", directory / name));
    EXPECT_EQ(ReadFile(directory / name), "content");
    std::filesystem::remove(directory.path() / name);
  }
  EXPECT_FALSE(SaveContent("content", directory / std::string(256, 'n')));
  EXPECT_THAT(directory.names(), IsEmpty());
}

TEST(SaveStreamTest, APathThatNamesNoFileIsRefusedAndNothingIsMade) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "sub");
  for (const std::string& path :
       {directory / "sub", directory / "sub/", directory / "missing/file", directory / ".",
        directory / "..", std::string(), std::string(".")}) {
    for (const bool atomic : {true, false}) {
      const auto saved = SaveContent("content", path, {.atomic = atomic});
      ASSERT_FALSE(saved) << path;
      EXPECT_EQ(saved.error().code, ErrorCode::kStorage);
      EXPECT_NE(saved.error().system_errno, 0);
    }
  }
  EXPECT_THAT(directory.names(), ElementsAre("sub"));
}

// Every alignment that devices are known to demand, and some that they may.
class DeviceLimitsOfASaveTest : public ::testing::TestWithParam<plan::DeviceLimits> {};

TEST_P(DeviceLimitsOfASaveTest, EveryRequestObeysThemAndTheFileIsExact) {
  const TemporaryDirectory directory;
  const LimitedFiles files(GetParam());
  for (const std::size_t size : {1U, 511U, 4096U, 65'537U, 1'000'000U}) {
    const std::string content = GenerationFile(size, 1 << 20).substr(0, size);
    const auto trace = std::make_shared<testing::IoTrace>();
    const Environment environment{
        .files = &files,
        .make_engine = [&](Engine kind,
                           unsigned depth) -> Result<std::unique_ptr<engine::IoEngine>> {
          auto made = engine::MakeEngine(kind, depth);
          if (!made) return made;
          return std::make_unique<testing::FaultyEngine>(*std::move(made), testing::FaultAlways({}),
                                                         trace);
        }};
    const Options options{.engine = Engine::kThreads, .block_bytes = 65536, .sync = false};
    const auto saved = SaveContent(content, directory / "file", options, environment);
    ASSERT_TRUE(saved) << saved.error().Message();
    EXPECT_FALSE(trace->empty());
    EXPECT_TRUE(testing::EveryRequestIsAligned(*trace, GetParam()));
    EXPECT_TRUE(ReadFile(directory / "file") == content) << size << " bytes";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Alignments, DeviceLimitsOfASaveTest,
    ::testing::Values(plan::DeviceLimits{.memory_align = 4, .offset_align = 512},
                      plan::DeviceLimits{.memory_align = 512, .offset_align = 512},
                      plan::DeviceLimits{.memory_align = 512, .offset_align = 4096},
                      plan::DeviceLimits{.memory_align = 4096, .offset_align = 4096},
                      plan::DeviceLimits{.memory_align = 4096, .offset_align = 16384},
                      plan::DeviceLimits{.memory_align = 65536, .offset_align = 65536}),
    [](const auto& limits) {
      return "memory_" + std::to_string(limits.param.memory_align) + "_offset_" +
             std::to_string(limits.param.offset_align);
    });

TEST(SaveStreamTest, AlignedMemoryAtAnAlignedOffsetIsWrittenInPlace) {
  const TemporaryDirectory directory;
  const testing::Seed seed;
  testing::Random random(seed.value());
  const LimitedFiles files({.memory_align = 4096, .offset_align = 4096});
  const testing::AlignedMemory body((std::size_t{3} << 20) + 1000);
  body.FillWithNoise(random);
  const std::string header(8192, 'h');
  layout::StreamBuilder builder;
  builder.AddGenerated(std::as_bytes(std::span(header)));
  builder.AddMemory(body.bytes());
  builder.AddGenerated(std::as_bytes(std::span(header).first(100)));
  const layout::Stream stream = std::move(builder).Finish(0, nullptr);

  const std::string expected =
      header + std::string(reinterpret_cast<const char*>(body.data()), body.bytes().size()) +
      header.substr(0, 100);
  for (const Engine engine : {Engine::kThreads, Engine::kUring}) {
    const auto saved =
        SaveStream(stream, directory / "file", {.engine = engine}, {.files = &files});
    ASSERT_TRUE(saved) << saved.error().Message();
    EXPECT_EQ(saved->in_place_bytes, std::uint64_t{3} << 20) << "all whole blocks of the body";
    EXPECT_EQ(saved->staged_bytes, 8192U + 1000 + 100);
    EXPECT_TRUE(ReadFile(directory / "file") == expected);
  }
}

TEST(SaveStreamTest, MemoryThatIsNotAlignedIsStaged) {
  const TemporaryDirectory directory;
  const testing::Seed seed;
  testing::Random random(seed.value());
  const LimitedFiles files({.memory_align = 512, .offset_align = 512});
  const testing::AlignedMemory body(std::size_t{3} << 20, 64);
  body.FillWithNoise(random);
  layout::StreamBuilder builder;
  builder.AddMemory(body.bytes());
  const layout::Stream stream = std::move(builder).Finish(0, nullptr);
  const auto saved = SaveStream(stream, directory / "file", {}, {.files = &files});
  ASSERT_TRUE(saved);
  EXPECT_EQ(saved->in_place_bytes, 0U);
  const std::string written = ReadFile(directory / "file");
  ASSERT_EQ(written.size(), body.bytes().size());
  EXPECT_EQ(std::memcmp(written.data(), body.data(), written.size()), 0);
}

TEST(SaveStreamTest, LeftoversOfAKilledSaveGoWithTheNextSaveToThatPathOnly) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(SaveContent("one", directory / "one.pt"));
  const std::string leftover = ".fp-0123456789abcdef-0123456789abcdef.tmp";
  WriteFile(directory / leftover, "of some other path");
  ASSERT_TRUE(SaveContent("again", directory / "one.pt"));
  EXPECT_THAT(directory.names(), ElementsAre(leftover, "one.pt"));
}

}  // namespace
}  // namespace fastpersist::checkpoint
