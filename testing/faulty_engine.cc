// SPDX-License-Identifier: Apache-2.0
#include "testing/faulty_engine.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/unique_fd.h"
#include "engine/buffered_engine.h"

namespace fastpersist::testing {
namespace {

using engine::IoCompletion;
using engine::IoRequest;
using engine::Submitted;

Fault RandomFault(Random& random, const IoRequest& request) {
  const std::array<std::uint64_t, 6> counts{1,
                                            511,
                                            512,
                                            4095,
                                            std::max<std::uint64_t>(request.length / 2, 1),
                                            std::max<std::uint64_t>(request.length - 1, 1)};
  switch (Between(random, 0, 29)) {
    case 0:
    case 1:
    case 2:
    case 3:
    case 4:
      return Fault::Short(counts.at(Between(random, 0, counts.size() - 1)));
    case 5:
    case 6:
      return Fault::Reports(-EINTR);
    case 7:
    case 8:
      return Fault::Busy();
    case 9:
      // Costs a millisecond each.
      return OnceIn(random, 4) ? Fault::Reports(-EAGAIN) : Fault{};
    default:
      return {};
  }
}

// Moves the first bytes of the request, whatever alignment its descriptor demands.
std::int64_t MoveSome(IoRequest request, std::uint64_t bytes) {
  const base::UniqueFd buffered(
      ::open(fmt::format("/proc/self/fd/{}", request.fd).c_str(), O_RDWR | O_CLOEXEC));
  if (buffered.valid()) request.fd = buffered.get();
  request.length = std::min(request.length, bytes);
  return engine::MoveBytes(request);
}

}  // namespace

FaultScript FaultAt(std::uint64_t position, Fault fault) {
  return {.on_submit = [=](std::uint64_t nth, const IoRequest&) {
    return nth == position ? fault : Fault{};
  }};
}

FaultScript FaultAlways(Fault fault) {
  return {.on_submit = [=](std::uint64_t, const IoRequest&) { return fault; }};
}

FaultScript RecoverableFaults(std::uint64_t seed) {
  auto random = std::make_shared<Random>(seed);
  return {.on_submit = [=](std::uint64_t,
                           const IoRequest& request) { return RandomFault(*random, request); },
          .on_reap =
              [=](std::uint64_t) {
                return OnceIn(*random, 8) ? ReapFault::kNothing : ReapFault::kNone;
              },
          .at_once = OnceIn(*random, 2),
          .seed = seed};
}

std::size_t SubmittedCount(const IoTrace& trace) {
  return static_cast<std::size_t>(
      std::ranges::count(trace, IoEvent::Kind::kSubmitted, &IoEvent::kind));
}

std::size_t InFlightCount(const IoTrace& trace) { return 2 * SubmittedCount(trace) - trace.size(); }

::testing::AssertionResult EveryRequestIsAligned(const IoTrace& trace,
                                                 const plan::DeviceLimits& limits) {
  for (const auto& [kind, request, result] : trace) {
    if (!base::IsAligned(request.offset, limits.offset_align) ||
        !base::IsAligned(request.length, limits.offset_align) ||
        !base::IsAlignedAddress(request.data, limits.memory_align)) {
      return ::testing::AssertionFailure()
             << fmt::format("{} bytes at offset {} from {}", request.length, request.offset,
                            fmt::ptr(request.data));
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult NoByteIsSubmittedTwice(const IoTrace& trace, std::uint64_t block) {
  std::map<std::uint64_t, std::uint64_t> taken;  // begin to end: written for good, or in flight
  for (const auto& [kind, request, result] : trace) {
    if (kind == IoEvent::Kind::kSubmitted) {
      const std::uint64_t end = request.offset + request.length;
      const auto next = taken.lower_bound(end);
      if (next != taken.begin() && std::prev(next)->second > request.offset) {
        const auto& [other_begin, other_end] = *std::prev(next);
        return ::testing::AssertionFailure()
               << fmt::format("[{}, {}) was submitted again by {} bytes at {}", other_begin,
                              other_end, request.length, request.offset);
      }
      taken[request.offset] = end;
    } else if (result < static_cast<std::int64_t>(request.length)) {
      const auto whole =
          base::AlignDown(static_cast<std::uint64_t>(std::max<std::int64_t>(result, 0)), block);
      taken[request.offset] = request.offset + whole;
      if (whole == 0) taken.erase(request.offset);
    }
  }
  return ::testing::AssertionSuccess();
}

FaultyEngine::FaultyEngine(std::unique_ptr<engine::IoEngine> inner, FaultScript script,
                           std::shared_ptr<IoTrace> trace)
    : inner_(std::move(inner)),
      script_(std::move(script)),
      trace_(std::move(trace)),
      random_(script_.seed) {}

Result<Submitted> FaultyEngine::Submit(const IoRequest& request, IoCompletion* completed) {
  if (inner_in_flight_ + own_.size() == depth()) return Submitted::kBusy;
  const Fault fault = script_.on_submit(submissions_, request);
  if (fault.kind == Fault::Kind::kNone) return Forward(request, completed);
  ++submissions_;
  switch (fault.kind) {
    case Fault::Kind::kShort:
      NoteSubmitted(request);
      return Answer(request, MoveSome(request, static_cast<std::uint64_t>(fault.value)), completed);
    case Fault::Kind::kResult:
      NoteSubmitted(request);
      return Answer(request, fault.value, completed);
    case Fault::Kind::kEngineError:
      return std::unexpected(Error{.operation = "submit",
                                   .system_errno = static_cast<int>(fault.value),
                                   .detail = "this engine is refused"});
    case Fault::Kind::kBusy:
    case Fault::Kind::kNone:
      break;
  }
  return Submitted::kBusy;
}

Result<Submitted> FaultyEngine::Forward(const IoRequest& request, IoCompletion* completed) {
  auto submitted = inner_->Submit(request, completed);
  if (!submitted || *submitted == Submitted::kBusy) return submitted;
  ++submissions_;
  NoteSubmitted(request);
  if (*submitted == Submitted::kQueued) {
    ++inner_in_flight_;
  } else {
    NoteFinished(*completed);
  }
  return submitted;
}

Submitted FaultyEngine::Answer(const IoRequest& request, std::int64_t result,
                               IoCompletion* completed) {
  const IoCompletion completion{.tag = request.tag, .result = result};
  if (script_.at_once) {
    NoteFinished(completion);
    *completed = completion;
    return Submitted::kCompleted;
  }
  own_.push_back(completion);
  return Submitted::kQueued;
}

Result<std::size_t> FaultyEngine::Reap(std::span<IoCompletion> out) {
  switch (script_.on_reap ? script_.on_reap(reaps_++) : ReapFault::kNone) {
    case ReapFault::kNothing:
      return 0;
    case ReapFault::kEngineError:
      return std::unexpected(
          Error{.operation = "reap", .system_errno = EPERM, .detail = "this engine is refused"});
    case ReapFault::kNone:
      break;
  }
  if (!own_.empty() && (inner_in_flight_ == 0 || OnceIn(random_, 2))) return ReapOwn(out);
  auto count = inner_->Reap(out);
  if (!count) return count;
  inner_in_flight_ -= *count;
  for (const IoCompletion& completion : out.first(*count)) NoteFinished(completion);
  return count;
}

std::size_t FaultyEngine::ReapOwn(std::span<IoCompletion> out) {
  const std::size_t count = std::min(out.size(), own_.size());
  std::ranges::copy(std::span(own_).first(count), out.begin());
  own_.erase(own_.begin(), own_.begin() + static_cast<std::ptrdiff_t>(count));
  for (const IoCompletion& completion : out.first(count)) NoteFinished(completion);
  return count;
}

void FaultyEngine::NoteSubmitted(const IoRequest& request) {
  requests_.insert_or_assign(request.tag, request);
  trace_->push_back({.kind = IoEvent::Kind::kSubmitted, .request = request});
}

void FaultyEngine::NoteFinished(const IoCompletion& completion) {
  trace_->push_back({.kind = IoEvent::Kind::kFinished,
                     .request = requests_.at(completion.tag),
                     .result = completion.result});
}

}  // namespace fastpersist::testing
