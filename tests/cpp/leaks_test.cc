// SPDX-License-Identifier: Apache-2.0
// Nothing grows with the number of saves, failed ones included.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <vector>

#include "checkpoint/staging_lease.h"
#include "testing/faulty_files.h"
#include "testing/process_state.h"
#include "testing/save_content.h"
#include "testing/temporary_directory.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FASTPERSIST_INSTRUMENTED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FASTPERSIST_INSTRUMENTED 1
#endif
#endif

namespace fastpersist::checkpoint {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using testing::FaultyFiles;
using testing::GenerationFile;
using ::testing::Not;
using testing::Operation;
using testing::SaveContent;
using testing::TemporaryDirectory;

#ifdef FASTPERSIST_INSTRUMENTED
constexpr bool kMemoryCounts = false;  // sanitizers keep freed memory
#else
constexpr bool kMemoryCounts = true;
#endif

// Fifty saves over one file; every second one fails, each time somewhere else.
void SaveFiftyTimes(const TemporaryDirectory& directory, const std::string& content,
                    Engine engine) {
  const Operation::Kind failing[] = {Operation::Kind::kPreallocate, Operation::Kind::kSyncData,
                                     Operation::Kind::kRename, Operation::Kind::kTruncate,
                                     Operation::Kind::kSyncDirectory};
  for (std::size_t i = 0; i < 50; ++i) {
    const bool fails = i % 2 == 1;
    const FaultyFiles files(
        {{.kind = failing[i / 2 % std::size(failing)], .system_errno = EIO, .from_then_on = true}});
    const Environment environment{.files = fails ? &files : &file::RealFileOps()};
    const auto saved = SaveContent(content, directory / "model.pt",
                                   {.engine = engine, .sync = fails}, environment);
    ASSERT_EQ(saved.has_value(), !fails);
  }
}

TEST(LeaksTest, FiftySavesHalfOfThemFailingLeaveTheProcessAsItWas) {
  for (const Engine engine :
       {Engine::kUring, Engine::kLibaio, Engine::kThreads, Engine::kBuffered}) {
    const TemporaryDirectory directory;
    const std::string content = GenerationFile(1, 1 << 20);
    SaveFiftyTimes(directory, content, engine);  // whatever is kept for good is kept now
    const auto files = testing::OpenFiles();
    const unsigned threads = testing::ThreadCount();
    const std::uint64_t resident = testing::ResidentBytes();

    SaveFiftyTimes(directory, content, engine);
    EXPECT_EQ(testing::OpenFiles(), files) << EngineName(engine);
    EXPECT_THAT(testing::OpenFiles(), Each(Not(EndsWith(" (deleted)"))));
    EXPECT_EQ(testing::ThreadCount(), threads) << EngineName(engine);
    if (kMemoryCounts) {
      EXPECT_LE(testing::ResidentBytes(), resident + (std::uint64_t{1} << 20))
          << EngineName(engine);
    }
    EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
  }
}

TEST(StagingLeaseTest, ThePoolIsKeptBetweenSavesAndOnlyOne) {
  const std::uint64_t bytes = std::uint64_t{8} << 20;
  const std::byte* first = nullptr;
  {
    const auto lease = StagingLease::Take(bytes, 4096);
    ASSERT_TRUE(lease);
    EXPECT_GE(lease->pool().memory().size(), bytes);
    first = lease->pool().memory().data();
    const auto second = StagingLease::Take(bytes, 4096);
    ASSERT_TRUE(second);
    EXPECT_NE(second->pool().memory().data(), first) << "one lease, one pool";
  }
  const auto again = StagingLease::Take(4096, 4096);
  ASSERT_TRUE(again);
  EXPECT_GE(again->pool().memory().size(), bytes) << "the kept one serves smaller saves too";
}

TEST(StagingLeaseTest, MemoryThatCannotBeHadIsAnErrorAndNotAnEnd) {
  const std::uint64_t too_much = std::uint64_t{1} << 60;
  const auto refused = StagingLease::Take(too_much, too_much);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kStorage);
  EXPECT_EQ(refused.error().system_errno, ENOMEM);
  EXPECT_THAT(refused.error().advice, ::testing::HasSubstr("staging_bytes"));
}

}  // namespace
}  // namespace fastpersist::checkpoint
