// SPDX-License-Identifier: Apache-2.0
// Many saves at once, from one process: every file that anybody ever sees is whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "testing/faulty_files.h"
#include "testing/process_state.h"
#include "testing/save_content.h"
#include "testing/temporary_directory.h"

namespace fastpersist::checkpoint {
namespace {

using ::testing::ElementsAre;
using testing::GenerationFile;
using testing::GenerationOf;
using testing::ReadFile;
using testing::SaveContent;
using ::testing::SizeIs;
using testing::TemporaryDirectory;

constexpr int kThreads = 4;
constexpr int kSavesPerThread = 25;
constexpr std::size_t kSize = 200'000;

// Runs work(thread) in kThreads threads and waits for them.
template <class Work>
void InThreads(Work work) {
  std::vector<std::jthread> threads;
  threads.reserve(kThreads);
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([=] { work(thread); });
  }
}

std::vector<std::string> Contents() {
  std::vector<std::string> contents;
  contents.reserve(kThreads);
  for (std::uint64_t generation = 0; generation < kThreads; ++generation) {
    contents.push_back(GenerationFile(generation, kSize));
  }
  return contents;
}

TEST(ConcurrentSavesTest, ToOnePathEveryReaderSeesAWholeFile) {
  const TemporaryDirectory directory;
  const std::string path = directory / "model.pt";
  const auto contents = Contents();
  ASSERT_TRUE(SaveContent(contents[0], path));
  const auto descriptors = testing::OpenFiles();

  std::atomic<int> failures = 0;
  std::atomic<int> damaged = 0;
  std::atomic<bool> done = false;
  {
    const std::jthread reader([&] {
      do {
        if (!GenerationOf(ReadFile(path))) ++damaged;
      } while (!done);
    });
    InThreads([&](int thread) {
      for (int i = 0; i < kSavesPerThread; ++i) {
        if (!SaveContent(contents[static_cast<std::size_t>(thread)], path)) ++failures;
      }
    });
    done = true;
  }
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(damaged, 0);
  EXPECT_TRUE(GenerationOf(ReadFile(path)));
  EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
  EXPECT_EQ(testing::OpenFiles(), descriptors);
}

TEST(ConcurrentSavesTest, ToDifferentPathsEveryFileIsItsOwn) {
  const TemporaryDirectory directory;
  std::atomic<int> failures = 0;
  const Options options{.staging_bytes = 1 << 20, .sync = false};
  InThreads([&](int thread) {
    for (int i = 0; i < kSavesPerThread; ++i) {
      const auto generation =
          static_cast<std::uint64_t>(thread) * kSavesPerThread + static_cast<std::uint64_t>(i);
      const std::string path = directory / std::to_string(generation);
      if (!SaveContent(GenerationFile(generation, kSize), path, options)) ++failures;
    }
  });
  EXPECT_EQ(failures, 0);
  const auto names = directory.names();
  ASSERT_THAT(names, SizeIs(kThreads * kSavesPerThread));
  for (const std::string& name : names) {
    EXPECT_EQ(GenerationOf(ReadFile(directory / name)), std::stoull(name));
  }
}

TEST(ConcurrentSavesTest, AFailingSaveDoesNotDisturbTheOthers) {
  const TemporaryDirectory directory;
  const std::string path = directory / "model.pt";
  const auto contents = Contents();
  std::atomic<int> wrong = 0;
  InThreads([&](int thread) {
    const testing::FaultyFiles failing(
        {{.kind = testing::Operation::Kind::kSyncData, .system_errno = EIO, .from_then_on = true}});
    const bool fails = thread % 2 == 1;
    const Environment environment{.files = fails ? &failing : &file::RealFileOps()};
    for (int i = 0; i < 5; ++i) {
      const auto saved = SaveContent(contents[static_cast<std::size_t>(thread)], path,
                                     {.retries = 0}, environment);
      if (saved.has_value() == fails) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
  const auto generation = GenerationOf(ReadFile(path));
  EXPECT_TRUE(generation == 0U || generation == 2U);
  EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
}

}  // namespace
}  // namespace fastpersist::checkpoint
