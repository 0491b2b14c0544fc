// SPDX-License-Identifier: Apache-2.0
#include "testing/engine_driver.h"

#include <fmt/format.h>

#include <span>
#include <utility>

namespace fastpersist::testing {
namespace {

using engine::IoCompletion;
using engine::IoRequest;
using engine::Submitted;

// A reap may be interrupted many times, but not for ever.
constexpr unsigned kMostIdleReaps = 100'000;

}  // namespace

EngineDriver::EngineDriver(engine::IoEngine& engine, std::size_t room)
    : engine_(engine), completions_(room) {}

std::optional<Submitted> EngineDriver::TrySubmit(const IoRequest& request) {
  if (Broken()) return std::nullopt;
  IoCompletion completed{.tag = ~request.tag};
  auto submitted = engine_.Submit(request, &completed);
  if (!submitted) {
    Break("Submit: " + submitted.error().Message());
    return std::nullopt;
  }
  if (*submitted != Submitted::kBusy) expected_.insert(request.tag);
  if (*submitted == Submitted::kQueued) ++in_flight_;
  if (*submitted == Submitted::kCompleted) Take(completed);
  if (in_flight_ > engine_.depth()) Break("more is in flight than the depth");
  return *submitted;
}

void EngineDriver::Submit(const IoRequest& request) {
  while (TrySubmit(request) == Submitted::kBusy) {
    if (in_flight_ < engine_.depth()) Break("busy below its depth");
    ReapOnce();
  }
}

void EngineDriver::ReapOnce() {
  if (Broken()) return;
  auto count = engine_.Reap(completions_);
  if (!count) return Break("Reap: " + count.error().Message());
  if (*count > completions_.size()) return Break("Reap returned more than there was room for");
  if (*count > in_flight_) return Break("more came back than was in flight");
  idle_reaps_ = *count == 0 ? idle_reaps_ + 1 : 0;
  if (idle_reaps_ > kMostIdleReaps) return Break("Reap returns nothing, again and again");
  in_flight_ -= *count;
  for (const IoCompletion& completion : std::span(completions_).first(*count)) Take(completion);
}

void EngineDriver::Finish() {
  while (in_flight_ > 0 && !Broken()) ReapOnce();
  if (!expected_.empty()) Break("operations never came back");
}

void EngineDriver::Take(const IoCompletion& completion) {
  if (expected_.erase(completion.tag) == 0) {
    return Break(fmt::format("tag {:#x} came back unasked or twice", completion.tag));
  }
  results_.emplace(completion.tag, completion.result);
}

void EngineDriver::Expect(std::uint64_t tag, std::int64_t result, const char* what) {
  const auto found = results_.find(tag);
  if (found == results_.end()) {
    Break(fmt::format("{}: no answer", what));
  } else if (found->second != result) {
    Break(fmt::format("{}: {} instead of {}", what, found->second, result));
  }
}

void EngineDriver::Break(std::string breach) {
  if (breach_.empty()) breach_ = std::move(breach);
}

::testing::AssertionResult EngineDriver::Verdict() const {
  return Broken() ? ::testing::AssertionFailure() << breach_ : ::testing::AssertionSuccess();
}

}  // namespace fastpersist::testing
