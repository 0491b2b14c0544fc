// SPDX-License-Identifier: Apache-2.0
#include "testing/recording_engine.h"

#include <atomic>
#include <utility>

namespace fastpersist::testing {
namespace {

std::uint64_t NextWrite() {
  static std::atomic<std::uint64_t> next{1};
  return next++;
}

}  // namespace

Result<engine::Submitted> RecordingEngine::Submit(const engine::IoRequest& request,
                                                  engine::IoCompletion* completed) {
  const auto submitted = inner_->Submit(request, completed);
  if (!submitted || *submitted == engine::Submitted::kBusy) return submitted;
  Operation operation{.kind = Operation::Kind::kSubmitWrite,
                      .fd = request.fd,
                      .offset = request.offset,
                      .size = request.length,
                      .bytes = {reinterpret_cast<const char*>(request.data), request.length},
                      .write = NextWrite()};
  trace_.Add(operation);
  operation.bytes.clear();
  in_flight_[request.tag] = std::move(operation);
  if (*submitted == engine::Submitted::kCompleted) Complete(*completed);
  return submitted;
}

Result<std::size_t> RecordingEngine::Reap(std::span<engine::IoCompletion> out) {
  const auto reaped = inner_->Reap(out);
  if (reaped) {
    for (const auto& completion : out.first(*reaped)) Complete(completion);
  }
  return reaped;
}

void RecordingEngine::Complete(const engine::IoCompletion& completion) {
  Operation operation = std::move(in_flight_.extract(completion.tag).mapped());
  operation.kind = Operation::Kind::kCompleteWrite;
  operation.result = completion.result;
  trace_.Add(std::move(operation));
}

engine::EngineFactory RecordingFactory(OperationTrace& trace, engine::EngineFactory inner) {
  return [&trace, inner = std::move(inner)](
             Engine kind, unsigned depth) -> Result<std::unique_ptr<engine::IoEngine>> {
    auto made = inner(kind, depth);
    if (!made) return made;
    return std::make_unique<RecordingEngine>(*std::move(made), trace);
  };
}

}  // namespace fastpersist::testing
