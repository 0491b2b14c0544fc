// SPDX-License-Identifier: Apache-2.0
#include "testing/checkpoint_run.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "engine/buffered_engine.h"

namespace fastpersist::testing {

using checkpoint::CheckpointInfo;
using checkpoint::CheckpointRequest;
using checkpoint::CheckpointStream;
using checkpoint::CheckpointTicket;
using checkpoint::CheckpointWriter;

OwnedState::OwnedState(std::uint64_t seed) {
  TestStreamBuilder builder(seed);
  builder.Generated(700).Memory(4 * kRunBlock + 5).Late(30).Memory(2 * kRunBlock).Generated(90);
  builder.Memory(4 * kRunBlock + 300 + seed % 1000).Late(200);
  made_ = std::make_shared<TestStream>(std::move(builder).Finish());
}

CheckpointStream OwnedState::Stream(const std::string& name, pipeline::VerifySource verify,
                                    std::size_t spare) {
  CheckpointStream stream{
      .name = name, .stream = {made_, &made_->stream}, .memory = {.verify = verify}};
  unsigned memory = 0;
  for (std::size_t i = 0; i < made_->stream.extents().size(); ++i) {
    if (made_->stream.extents()[i].kind != layout::Extent::Kind::kMemory) continue;
    if (memory++ == 1) continue;
    stream.memory.live.push_back({.extent = i, .name = "tensor"});
  }
  const auto copies = std::make_shared<std::vector<std::byte>>(spare);
  stream.memory.spare = *copies;
  stream.keep = copies;
  return stream;
}

void OwnedState::Change() {
  for (const std::size_t i : {0U, 2U}) {
    for (std::byte& byte : made_->memory[i].bytes()) byte = ~byte;
  }
}

std::string OwnedState::Content() const {
  const auto bytes = RenderPlainly(made_->stream).bytes;
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

CheckpointRun::CheckpointRun(const file::FileOps* files, commit::RetentionPolicy retention,
                             std::uint32_t retries)
    : root_(OpenForWriting(directory_ / "run")) {
  const auto make_engine = [this](Engine, unsigned) -> Result<std::unique_ptr<engine::IoEngine>> {
    const auto on_submit = [this](std::uint64_t nth, const engine::IoRequest& request) {
      const std::unique_lock lock(mutex_);
      const auto function = on_write_;
      return function ? function(nth, request) : Fault{};
    };
    return std::make_unique<FaultyEngine>(std::make_unique<engine::BufferedEngine>(),
                                          FaultScript{.on_submit = on_submit});
  };
  writer_ = std::make_unique<CheckpointWriter>(
      root_,
      Options{.engine = Engine::kThreads,
              .block_bytes = kRunBlock,
              .staging_bytes = 4 * kRunBlock,
              .retries = retries},
      retention,
      checkpoint::Environment{.files = files == nullptr ? &files_ : files,
                              .make_engine = make_engine});
}

CheckpointRun::~CheckpointRun() { OnWrite({}); }

void CheckpointRun::OnWrite(
    std::function<Fault(std::uint64_t nth, const engine::IoRequest& request)> function) {
  const std::scoped_lock lock(mutex_);
  on_write_ = std::move(function);
}

std::shared_ptr<CheckpointTicket> CheckpointRun::Submit(CheckpointRequest request) {
  auto ticket = writer_->Submit(std::move(request));
  if (ticket) return *std::move(ticket);
  (void)std::fprintf(stderr, "%s\n", ticket.error().Message().c_str());
  std::abort();
}

std::shared_ptr<CheckpointTicket> CheckpointRun::Submit(std::uint64_t step, OwnedState& state) {
  CheckpointRequest request{.step = step};
  request.streams.push_back(state.Stream());
  return Submit(std::move(request));
}

Result<CheckpointInfo> CheckpointRun::Save(std::uint64_t step, OwnedState& state) {
  return ResultOf(*Submit(step, state));
}

std::string CheckpointRun::File(const std::string& generation, const std::string& name) const {
  return ReadFile(path() + '/' + generation + '/' + name);
}

const Result<CheckpointInfo>& ResultOf(CheckpointTicket& ticket) {
  if (!ticket.WaitDone(Never())) std::abort();
  return ticket.result();
}

checkpoint::Clock::time_point Never() { return checkpoint::Clock::now() + std::chrono::hours(24); }

}  // namespace fastpersist::testing
