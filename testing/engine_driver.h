// SPDX-License-Identifier: Apache-2.0
// Feeds an engine, collects what comes back, and remembers the first breach of the engine contract.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/io_engine.h"

namespace fastpersist::testing {

/// After a breach every call does nothing, so that a check need not look at each answer.
class EngineDriver {
 public:
  /// room: the most completions that one Reap is asked for.
  explicit EngineDriver(engine::IoEngine& engine, std::size_t room = 16);

  /// Nullopt after a breach.
  std::optional<engine::Submitted> TrySubmit(const engine::IoRequest& request);
  /// Reaps for as long as the engine is busy.
  void Submit(const engine::IoRequest& request);
  void ReapOnce();
  /// Reaps until everything came back.
  void Finish();

  /// The operation with this tag must have answered this.
  void Expect(std::uint64_t tag, std::int64_t result, const char* what);
  void Break(std::string breach);

  [[nodiscard]] bool Broken() const { return !breach_.empty(); }
  [[nodiscard]] std::uint64_t in_flight() const { return in_flight_; }
  [[nodiscard]] const std::map<std::uint64_t, std::int64_t>& results() const { return results_; }
  [[nodiscard]] ::testing::AssertionResult Verdict() const;

 private:
  void Take(const engine::IoCompletion& completion);

  engine::IoEngine& engine_;
  std::vector<engine::IoCompletion> completions_;
  std::uint64_t in_flight_ = 0;
  unsigned idle_reaps_ = 0;
  std::set<std::uint64_t> expected_;
  std::map<std::uint64_t, std::int64_t> results_;
  std::string breach_;
};

}  // namespace fastpersist::testing
