// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/buffered_engine.h"
#include "engine/choose.h"
#include "testing/memory_engine.h"

namespace fastpersist::engine {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// An engine that says it is of any kind.
class NamedEngine final : public IoEngine {
 public:
  NamedEngine(Engine kind, unsigned depth) : kind_(kind), depth_(depth) {}
  [[nodiscard]] Engine kind() const override { return kind_; }
  [[nodiscard]] unsigned depth() const override { return depth_; }
  Result<Submitted> Submit(const IoRequest& /*request*/, IoCompletion* /*completed*/) override {
    return Submitted::kBusy;
  }
  Result<std::size_t> Reap(std::span<IoCompletion> /*out*/) override { return 0; }

 private:
  Engine kind_;
  unsigned depth_;
};

class ChooseEngineTest : public ::testing::Test {
 protected:
  // Makes every engine but the refused ones, and notes what was tried.
  EngineChoice Choose(Engine wanted, bool direct, std::vector<Engine> refused,
                      const std::vector<std::pair<Engine, std::string>>& failed_before = {}) {
    tried_.clear();
    const EngineFactory factory = [this, refused = std::move(refused)](
                                      Engine kind,
                                      unsigned depth) -> Result<std::unique_ptr<IoEngine>> {
      tried_.push_back(kind);
      if (std::ranges::find(refused, kind) != refused.end()) {
        return std::unexpected(Error{.operation = "io_setup", .system_errno = EPERM});
      }
      return std::make_unique<NamedEngine>(kind, depth);
    };
    return ChooseEngine(wanted, direct, 7, factory, failed_before);
  }

  std::vector<Engine> tried_;
};

TEST_F(ChooseEngineTest, TakesTheFirstOneThatWorks) {
  const auto choice = Choose(Engine::kAuto, true, {});
  EXPECT_EQ(choice.engine->kind(), Engine::kUring);
  EXPECT_EQ(choice.engine->depth(), 7U);
  EXPECT_FALSE(choice.fell_back);
  EXPECT_EQ(tried_, std::vector{Engine::kUring});
}

TEST_F(ChooseEngineTest, FallsBackInOrderAndSaysWhy) {
  const auto libaio = Choose(Engine::kAuto, true, {Engine::kUring});
  EXPECT_EQ(libaio.engine->kind(), Engine::kLibaio);
  EXPECT_TRUE(libaio.fell_back);
  EXPECT_THAT(libaio.reason, HasSubstr("uring: io_setup failed: Operation not permitted"));

  const auto threads = Choose(Engine::kAuto, true, {Engine::kUring, Engine::kLibaio});
  EXPECT_EQ(threads.engine->kind(), Engine::kThreads);
  EXPECT_THAT(threads.reason, HasSubstr("uring: "));
  EXPECT_THAT(threads.reason, HasSubstr("libaio: "));

  const auto buffered =
      Choose(Engine::kAuto, true, {Engine::kUring, Engine::kLibaio, Engine::kThreads});
  EXPECT_EQ(buffered.engine->kind(), Engine::kBuffered);
  EXPECT_TRUE(buffered.fell_back);
  EXPECT_THAT(buffered.reason, HasSubstr("threads: "));
  EXPECT_EQ(tried_, (std::vector{Engine::kUring, Engine::kLibaio, Engine::kThreads}));
}

TEST_F(ChooseEngineTest, TheWantedEngineIsWhereTheFallBackBegins) {
  const auto asked = Choose(Engine::kLibaio, true, {});
  EXPECT_EQ(asked.engine->kind(), Engine::kLibaio);
  EXPECT_FALSE(asked.fell_back);
  EXPECT_THAT(asked.reason, HasSubstr("asked for"));

  const auto next = Choose(Engine::kLibaio, true, {Engine::kLibaio});
  EXPECT_EQ(next.engine->kind(), Engine::kThreads);
  EXPECT_TRUE(next.fell_back);
  EXPECT_EQ(tried_, (std::vector{Engine::kLibaio, Engine::kThreads}));
}

TEST_F(ChooseEngineTest, AFileWithoutDirectIoIsServedBuffered) {
  for (const Engine wanted : {Engine::kAuto, Engine::kUring, Engine::kThreads}) {
    const auto choice = Choose(wanted, false, {});
    EXPECT_EQ(choice.engine->kind(), Engine::kBuffered);
    EXPECT_THAT(choice.reason, HasSubstr("no direct I/O"));
    EXPECT_TRUE(tried_.empty());
  }
}

TEST_F(ChooseEngineTest, BufferedIsNoFallBackWhenItWasAskedFor) {
  const auto choice = Choose(Engine::kBuffered, true, {});
  EXPECT_EQ(choice.engine->kind(), Engine::kBuffered);
  EXPECT_FALSE(choice.fell_back);
  EXPECT_THAT(choice.reason, HasSubstr("asked for"));
}

TEST_F(ChooseEngineTest, AnEngineThatFailedOnThisFileIsNotTriedAgain) {
  const auto choice = Choose(Engine::kAuto, true, {}, {{Engine::kUring, "refused late"}});
  EXPECT_EQ(choice.engine->kind(), Engine::kLibaio);
  EXPECT_TRUE(choice.fell_back);
  EXPECT_THAT(choice.reason, HasSubstr("uring: refused late"));
  EXPECT_THAT(tried_, Not(::testing::Contains(Engine::kUring)));
}

TEST(MakeEngine, MakesTheKindThatWasNamed) {
  for (const Engine kind : {Engine::kUring, Engine::kLibaio, Engine::kThreads, Engine::kBuffered}) {
    const auto made = MakeEngine(kind, 2);
    if (!made) continue;  // refused here; the contract suite reports it
    EXPECT_EQ((*made)->kind(), kind);
  }
  EXPECT_EQ((*MakeEngine(Engine::kThreads, 5))->depth(), 5U);
}

}  // namespace
}  // namespace fastpersist::engine
