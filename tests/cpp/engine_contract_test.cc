// SPDX-License-Identifier: Apache-2.0
// Every engine keeps the contract; broken ones show that each of its rules can fail.
#include "testing/engine_contract.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <ostream>
#include <string>
#include <tuple>

#include "engine/choose.h"
#include "testing/faulty_engine.h"
#include "testing/memory_engine.h"
#include "testing/seed.h"

namespace fastpersist::testing {
namespace {

using engine::IoCompletion;
using engine::IoEngine;
using engine::IoRequest;
using engine::Submitted;

std::vector<EngineUnderTest> Engines() {
  std::vector<EngineUnderTest> engines;
  for (const Engine kind : {Engine::kUring, Engine::kLibaio, Engine::kThreads, Engine::kBuffered}) {
    engines.push_back({.name = std::string(EngineName(kind)),
                       .make = [kind](unsigned depth) { return engine::MakeEngine(kind, depth); }});
  }
  const auto make_memory = [](unsigned depth) -> Result<std::unique_ptr<IoEngine>> {
    return std::make_unique<MemoryEngine>(
        MemoryEngineOptions{.depth = depth, .limits = {.direct = false}, .seed = depth});
  };
  engines.push_back({.name = "memory", .make = make_memory});
  engines.push_back({.name = "faultless", .make = [=](unsigned depth) {
                       return Result<std::unique_ptr<IoEngine>>(std::make_unique<FaultyEngine>(
                           *make_memory(depth), FaultAlways(Fault{})));
                     }});
  return engines;
}

class EngineContractTest
    : public ::testing::TestWithParam<std::tuple<EngineUnderTest, ContractRule, bool>> {};

TEST_P(EngineContractTest, Holds) {
  const auto& [engine, rule, direct] = GetParam();
  if (const auto made = engine.make(1); !made) {
    GTEST_SKIP() << "skipped: " << made.error().Message();
  }
  const auto file = ContractFile::Create(direct);
  if (!file) GTEST_SKIP() << "skipped: this file system takes no direct I/O";
  const Seed seed;
  EXPECT_TRUE(rule.holds(engine, *file, seed.value()));
}

std::string NameOf(const ::testing::TestParamInfo<EngineContractTest::ParamType>& param) {
  const auto& [engine, rule, direct] = param.param;
  return engine.name + rule.name + (direct ? "Direct" : "");
}

INSTANTIATE_TEST_SUITE_P(Each, EngineContractTest,
                         ::testing::Combine(::testing::ValuesIn(Engines()),
                                            ::testing::ValuesIn(EngineContract()),
                                            ::testing::Bool()),
                         NameOf);

// An engine that is right but for one thing, which a derived class overrides.
class AlmostRightEngine : public IoEngine {
 public:
  explicit AlmostRightEngine(unsigned depth)
      : inner_({.depth = depth, .limits = {.direct = false}}) {}
  [[nodiscard]] Engine kind() const override { return inner_.kind(); }
  [[nodiscard]] unsigned depth() const override { return inner_.depth(); }
  Result<Submitted> Submit(const IoRequest& request, IoCompletion* completed) override {
    return inner_.Submit(request, completed);
  }
  Result<std::size_t> Reap(std::span<IoCompletion> out) override { return inner_.Reap(out); }

 private:
  MemoryEngine inner_;
};

class WritesOneBlockTooFar final : public AlmostRightEngine {
 public:
  using AlmostRightEngine::AlmostRightEngine;
  Result<Submitted> Submit(const IoRequest& request, IoCompletion* completed) override {
    IoRequest wrong = request;
    if (request.length > 4096) wrong.offset += 4096;
    return AlmostRightEngine::Submit(wrong, completed);
  }
};

class NeverReads final : public AlmostRightEngine {
 public:
  using AlmostRightEngine::AlmostRightEngine;
  Result<Submitted> Submit(const IoRequest& request, IoCompletion* completed) override {
    if (request.kind == IoRequest::Kind::kWrite) {
      return AlmostRightEngine::Submit(request, completed);
    }
    *completed = {.tag = request.tag, .result = static_cast<std::int64_t>(request.length)};
    return Submitted::kCompleted;
  }
};

class HalvesTags final : public AlmostRightEngine {
 public:
  using AlmostRightEngine::AlmostRightEngine;
  Result<std::size_t> Reap(std::span<IoCompletion> out) override {
    auto count = AlmostRightEngine::Reap(out);
    for (IoCompletion& completion : out.first(*count)) completion.tag &= 0xFFFFFFFF;
    return count;
  }
};

class RepeatsCompletions final : public AlmostRightEngine {
 public:
  using AlmostRightEngine::AlmostRightEngine;
  Result<std::size_t> Reap(std::span<IoCompletion> out) override {
    if (repeat_) {
      repeat_ = false;
      out[0] = last_;
      return 1;
    }
    auto count = AlmostRightEngine::Reap(out);
    last_ = out[0];
    repeat_ = true;
    return count;
  }

 private:
  IoCompletion last_;
  bool repeat_ = false;
};

class TakesOneTooMany final : public AlmostRightEngine {
 public:
  explicit TakesOneTooMany(unsigned depth) : AlmostRightEngine(depth + 1) {}
  [[nodiscard]] unsigned depth() const override { return AlmostRightEngine::depth() - 1; }
};

class WritesWhatItRefuses final : public AlmostRightEngine {
 public:
  using AlmostRightEngine::AlmostRightEngine;
  Result<Submitted> Submit(const IoRequest& request, IoCompletion* completed) override {
    auto submitted = AlmostRightEngine::Submit(request, completed);
    if (*submitted == Submitted::kBusy) {
      (void)::pwrite(request.fd, request.data, request.length, static_cast<off_t>(request.offset));
    }
    return submitted;
  }
};

class ReturnsMinusOne final : public AlmostRightEngine {
 public:
  using AlmostRightEngine::AlmostRightEngine;
  Result<std::size_t> Reap(std::span<IoCompletion> out) override {
    auto count = AlmostRightEngine::Reap(out);
    for (IoCompletion& completion : out.first(*count)) {
      completion.result = std::max<std::int64_t>(completion.result, -1);
    }
    return count;
  }
};

class LosesWhatHasNoRoom final : public AlmostRightEngine {
 public:
  using AlmostRightEngine::AlmostRightEngine;
  Result<std::size_t> Reap(std::span<IoCompletion> out) override {
    std::vector<IoCompletion> all(depth());
    auto count = AlmostRightEngine::Reap(all);
    if (!count) return count;
    const std::size_t kept = std::min(*count, out.size());
    std::copy_n(all.begin(), kept, out.begin());
    return kept;
  }
};

class ForgetsTheStartOfRegisteredMemory final : public AlmostRightEngine {
 public:
  using AlmostRightEngine::AlmostRightEngine;
  bool RegisterMemory(std::span<std::byte> memory) override {
    registered_ = memory;
    return true;
  }
  Result<Submitted> Submit(const IoRequest& request, IoCompletion* completed) override {
    IoRequest wrong = request;
    if (request.data >= registered_.data() && request.data < &registered_.back()) {
      wrong.data = registered_.data();
    }
    return AlmostRightEngine::Submit(wrong, completed);
  }

 private:
  std::span<std::byte> registered_;
};

class GivesUpWhenInterrupted final : public AlmostRightEngine {
 public:
  using AlmostRightEngine::AlmostRightEngine;
  Result<std::size_t> Reap(std::span<IoCompletion> out) override {
    const timespec longer_than_an_interval{.tv_nsec = 5'000'000};
    if (::nanosleep(&longer_than_an_interval, nullptr) != 0) {
      return std::unexpected(Error{.operation = "reap", .system_errno = EINTR});
    }
    return AlmostRightEngine::Reap(out);
  }
};

class KeepsADescriptor final : public AlmostRightEngine {
 public:
  using AlmostRightEngine::AlmostRightEngine;
  Result<Submitted> Submit(const IoRequest& request, IoCompletion* completed) override {
    if (kept_ < 0) kept_ = ::dup(request.fd);
    return AlmostRightEngine::Submit(request, completed);
  }

 private:
  int kept_ = -1;
};

struct BrokenCase {
  EngineUnderTest engine;
  std::string broken_rule;
};

void PrintTo(const BrokenCase& broken, std::ostream* out) { *out << broken.engine.name; }

template <class BrokenEngine>
BrokenCase Breaks(const std::string& name, const std::string& rule) {
  return {.engine = {.name = name,
                     .make = [](unsigned depth) -> Result<std::unique_ptr<IoEngine>> {
                       return std::make_unique<BrokenEngine>(depth);
                     }},
          .broken_rule = rule};
}

std::vector<BrokenCase> BrokenCases() {
  return {
      Breaks<WritesOneBlockTooFar>("WritesOneBlockTooFar", "EveryByteArrivesAtItsOffset"),
      Breaks<NeverReads>("NeverReads", "ReadsReturnWhatTheFileHolds"),
      Breaks<HalvesTags>("HalvesTags", "TagsComeBackExactlyOnce"),
      Breaks<RepeatsCompletions>("RepeatsCompletions", "TagsComeBackExactlyOnce"),
      Breaks<TakesOneTooMany>("TakesOneTooMany", "TheDepthIsTheMostInFlight"),
      Breaks<WritesWhatItRefuses>("WritesWhatItRefuses", "TheDepthIsTheMostInFlight"),
      Breaks<ReturnsMinusOne>("ReturnsMinusOne", "ErrorsAreNegativeErrnos"),
      Breaks<LosesWhatHasNoRoom>("LosesWhatHasNoRoom", "ReapingOneByOneLosesNothing"),
      Breaks<ForgetsTheStartOfRegisteredMemory>("ForgetsTheStartOfRegisteredMemory",
                                                "RegisteredMemoryIsUsedLikeAnyOther"),
      Breaks<GivesUpWhenInterrupted>("GivesUpWhenInterrupted", "SignalsAndExitsLoseNothing"),
      Breaks<KeepsADescriptor>("KeepsADescriptor", "NothingIsLeftBehind"),
  };
}

class EngineContractCanary : public ::testing::TestWithParam<BrokenCase> {};

TEST_P(EngineContractCanary, IsCaught) {
  const auto& [engine, broken_rule] = GetParam();
  const auto rule = std::ranges::find(EngineContract(), broken_rule, &ContractRule::name);
  ASSERT_NE(rule, EngineContract().end()) << broken_rule;
  EXPECT_FALSE(rule->holds(engine, *ContractFile::Create(/*direct=*/false), /*seed=*/1));
}

INSTANTIATE_TEST_SUITE_P(Each, EngineContractCanary, ::testing::ValuesIn(BrokenCases()),
                         [](const ::testing::TestParamInfo<BrokenCase>& param) {
                           return param.param.engine.name;
                         });

TEST(EngineContract, EveryRuleHasACanary) {
  const auto cases = BrokenCases();
  for (const ContractRule& rule : EngineContract()) {
    EXPECT_NE(std::ranges::find(cases, rule.name, &BrokenCase::broken_rule), cases.end())
        << rule.name;
  }
}

}  // namespace
}  // namespace fastpersist::testing
