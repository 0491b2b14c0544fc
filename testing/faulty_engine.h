// SPDX-License-Identifier: Apache-2.0
// FaultyEngine stands between a caller and any engine and turns answers into faults, by a script:
// short counts, 0 bytes, errnos, kBusy, and failures of the engine itself. It notes every request
// and its answer in a IoTrace, which outlives it.
//
// A short count is honest: exactly so many bytes are in the file. They are written through a
// second, buffered descriptor, because no alignment allows them on a direct one.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/io_engine.h"
#include "plan/write_plan.h"
#include "testing/seed.h"

namespace fastpersist::testing {

/// What happens to one submission.
struct Fault {
  enum class Kind : std::uint8_t {
    kNone,
    kShort,        ///< value bytes are moved and reported (all of them if the request is shorter).
    kResult,       ///< Nothing is moved; value is reported: 0 or -errno.
    kBusy,         ///< Submit answers kBusy.
    kEngineError,  ///< Submit fails with the errno value: the engine is unusable.
  };
  Kind kind = Kind::kNone;
  std::int64_t value = 0;

  static Fault Short(std::uint64_t bytes) {
    return {.kind = Kind::kShort, .value = static_cast<std::int64_t>(bytes)};
  }
  static Fault Reports(std::int64_t result) { return {.kind = Kind::kResult, .value = result}; }
  static Fault Busy() { return {.kind = Kind::kBusy}; }
  static Fault EngineError(int system_errno) {
    return {.kind = Kind::kEngineError, .value = system_errno};
  }
};

enum class ReapFault : std::uint8_t { kNone, kNothing, kEngineError };

struct FaultScript {
  /// nth: number of earlier submissions, those that were really refused for depth not counted.
  std::function<Fault(std::uint64_t nth, const engine::IoRequest& request)> on_submit;
  /// nth: number of earlier calls of Reap. Null: none.
  std::function<ReapFault(std::uint64_t nth)> on_reap;
  /// Faulty results are returned by Submit (kCompleted) instead of by Reap.
  bool at_once = false;
  /// Decides when faulty results are reaped among the others.
  std::uint64_t seed = 0;
};

/// The fault on submission number `position`, nothing on any other.
[[nodiscard]] FaultScript FaultAt(std::uint64_t position, Fault fault);
/// The fault on every submission.
[[nodiscard]] FaultScript FaultAlways(Fault fault);
/// A mix of everything that a save survives on one engine: short counts of 1, 511, 512, 4095, half
/// and all but one byte, EINTR, EAGAIN, kBusy, and Reap that returns nothing; about one in three.
[[nodiscard]] FaultScript RecoverableFaults(std::uint64_t seed);

struct IoEvent {
  enum class Kind : std::uint8_t { kSubmitted, kFinished };
  Kind kind = Kind::kSubmitted;
  engine::IoRequest request;
  std::int64_t result = 0;  ///< kFinished only.
};

/// Everything that was submitted and finished, in order.
using IoTrace = std::vector<IoEvent>;

[[nodiscard]] std::size_t SubmittedCount(const IoTrace& trace);
/// Operations that were submitted and are not finished.
[[nodiscard]] std::size_t InFlightCount(const IoTrace& trace);
/// Every request satisfies the limits.
[[nodiscard]] ::testing::AssertionResult EveryRequestIsAligned(const IoTrace& trace,
                                                               const plan::DeviceLimits& limits);
/// No request touches a byte that is being written, or that was reported written before, except
/// that a write which ended within a block of that size may repeat this block.
[[nodiscard]] ::testing::AssertionResult NoByteIsSubmittedTwice(const IoTrace& trace,
                                                                std::uint64_t block);

class FaultyEngine final : public engine::IoEngine {
 public:
  FaultyEngine(std::unique_ptr<engine::IoEngine> inner, FaultScript script,
               std::shared_ptr<IoTrace> trace = std::make_shared<IoTrace>());

  [[nodiscard]] Engine kind() const override { return inner_->kind(); }
  [[nodiscard]] unsigned depth() const override { return inner_->depth(); }
  bool RegisterMemory(std::span<std::byte> memory) override {
    return inner_->RegisterMemory(memory);
  }
  [[nodiscard]] Result<engine::Submitted> Submit(const engine::IoRequest& request,
                                                 engine::IoCompletion* completed) override;
  [[nodiscard]] Result<std::size_t> Reap(std::span<engine::IoCompletion> out) override;

 private:
  Result<engine::Submitted> Forward(const engine::IoRequest& request,
                                    engine::IoCompletion* completed);
  engine::Submitted Answer(const engine::IoRequest& request, std::int64_t result,
                           engine::IoCompletion* completed);
  std::size_t ReapOwn(std::span<engine::IoCompletion> out);
  void NoteSubmitted(const engine::IoRequest& request);
  void NoteFinished(const engine::IoCompletion& completion);

  std::unique_ptr<engine::IoEngine> inner_;
  FaultScript script_;
  std::shared_ptr<IoTrace> trace_;
  Random random_;
  std::uint64_t submissions_ = 0;
  std::uint64_t reaps_ = 0;
  std::size_t inner_in_flight_ = 0;
  std::vector<engine::IoCompletion> own_;  // answered by a fault, not yet reaped
  std::unordered_map<std::uint64_t, engine::IoRequest> requests_;  // in flight, by tag
};

}  // namespace fastpersist::testing
