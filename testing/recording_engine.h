// SPDX-License-Identifier: Apache-2.0
// An engine that writes down every write of the engine inside: its bytes when it is submitted, its
// result when it completes.
#pragma once

#include <map>
#include <memory>

#include "engine/choose.h"
#include "engine/io_engine.h"
#include "testing/recording_files.h"

namespace fastpersist::testing {

/// Used by one thread at a time, as every engine. The trace must outlive it.
class RecordingEngine final : public engine::IoEngine {
 public:
  RecordingEngine(std::unique_ptr<engine::IoEngine> inner, OperationTrace& trace)
      : inner_(std::move(inner)), trace_(trace) {}

  [[nodiscard]] Engine kind() const override { return inner_->kind(); }
  [[nodiscard]] unsigned depth() const override { return inner_->depth(); }
  bool RegisterMemory(std::span<std::byte> memory) override {
    return inner_->RegisterMemory(memory);
  }
  [[nodiscard]] Result<engine::Submitted> Submit(const engine::IoRequest& request,
                                                 engine::IoCompletion* completed) override;
  [[nodiscard]] Result<std::size_t> Reap(std::span<engine::IoCompletion> out) override;

 private:
  void Complete(const engine::IoCompletion& completion);

  std::unique_ptr<engine::IoEngine> inner_;
  OperationTrace& trace_;
  std::map<std::uint64_t, Operation> in_flight_;  // by tag
};

/// A factory of recording engines around those of inner.
[[nodiscard]] engine::EngineFactory RecordingFactory(
    OperationTrace& trace, engine::EngineFactory inner = engine::MakeEngine);

}  // namespace fastpersist::testing
