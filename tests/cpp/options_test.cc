// SPDX-License-Identifier: Apache-2.0
#include "fastpersist/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "fastpersist/save.h"
#include "testing/temporary_directory.h"

namespace fastpersist {
namespace {

using ::testing::HasSubstr;

// The refusal's sentence; empty when the options are valid.
std::string RefusalOf(const Options& options) {
  const auto valid = Validate(options);
  if (valid) return "";
  EXPECT_EQ(valid.error().code, ErrorCode::kInvalidArgument);
  return valid.error().Message();
}

TEST(Options, TheDefaultsAreValid) { EXPECT_EQ(RefusalOf({}), ""); }

TEST(Options, BlocksAreWholePagesUpToOneGibibyte) {
  constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
  for (const std::uint64_t good : {std::uint64_t{4096}, std::uint64_t{12288}, kGiB}) {
    EXPECT_EQ(RefusalOf({.block_bytes = good}), "") << good;
  }
  for (const std::uint64_t bad :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{512}, std::uint64_t{4095},
        std::uint64_t{4097}, kGiB + 4096, ~std::uint64_t{0}}) {
    EXPECT_THAT(RefusalOf({.block_bytes = bad}), HasSubstr("block_bytes " + std::to_string(bad)));
  }
}

TEST(Options, TheQueueIsOneToTwoHundredFiftySixDeep) {
  EXPECT_EQ(RefusalOf({.queue_depth = 1}), "");
  EXPECT_EQ(RefusalOf({.queue_depth = 256}), "");
  EXPECT_THAT(RefusalOf({.queue_depth = 0}), HasSubstr("queue_depth 0"));
  EXPECT_THAT(RefusalOf({.queue_depth = 257}), HasSubstr("queue_depth 257"));
}

TEST(Options, StagingIsAtLeastAPage) {
  EXPECT_EQ(RefusalOf({.staging_bytes = 4096}), "");
  EXPECT_THAT(RefusalOf({.staging_bytes = 4095}), HasSubstr("staging_bytes 4095"));
  EXPECT_THAT(RefusalOf({.staging_bytes = 0}), HasSubstr("staging_bytes 0"));
}

// Page counts that are no powers of two: buffers are cut from the staging memory by division.
TEST(Options, EveryValidCombinationOfStagingAndBlockSizeSavesTheSameFile) {
  const testing::TemporaryDirectory directory;
  std::vector<float> values(50'000);
  std::iota(values.begin(), values.end(), 0.0F);
  State state;
  ASSERT_TRUE(state.Add("w", {.data = values.data(), .shape = {50'000}}));
  const std::string path = directory / "state.pt";
  ASSERT_TRUE(Save(state, path, {.sync = false}));
  const std::string expected = testing::ReadFile(path);
  for (const std::uint64_t staging_pages : {1U, 2U, 3U, 5U, 7U, 11U, 49U, 50U, 256U}) {
    for (const std::uint64_t block_pages : {1U, 3U, 4U, 5U, 13U, 64U}) {
      const auto saved = Save(state, path,
                              {.block_bytes = block_pages * 4096,
                               .staging_bytes = staging_pages * 4096,
                               .sync = false});
      ASSERT_TRUE(saved) << saved.error().Message();
      ASSERT_EQ(testing::ReadFile(path), expected) << staging_pages << ' ' << block_pages;
    }
  }
}

TEST(Options, EngineNamesRoundTrip) {
  for (const Engine engine :
       {Engine::kAuto, Engine::kUring, Engine::kLibaio, Engine::kThreads, Engine::kBuffered}) {
    EXPECT_EQ(ParseEngine(EngineName(engine)), engine);
  }
  EXPECT_EQ(EngineName(Engine::kUring), "uring");
  EXPECT_EQ(EngineName(static_cast<Engine>(77)), "unknown");
}

TEST(Options, OtherWordsAreNoEngines) {
  for (const char* word : {"", "Uring", "io_uring", "uring ", "unknown"}) {
    EXPECT_EQ(ParseEngine(word), std::nullopt) << word;
  }
}

}  // namespace
}  // namespace fastpersist
