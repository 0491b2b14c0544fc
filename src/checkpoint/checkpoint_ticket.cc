// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "checkpoint/checkpoint_writer.h"

namespace fastpersist::checkpoint {

CheckpointTicket::CheckpointTicket(CheckpointRequest request) : request_(std::move(request)) {
  for (CheckpointStream& stream : request_.streams) {
    gates_.push_back(
        std::make_unique<pipeline::MemoryGate>(*stream.stream, std::move(stream.memory)));
    bytes_ += stream.stream->size();
  }
}

bool CheckpointTicket::WaitReleased(Clock::time_point deadline, bool capture) {
  return std::ranges::all_of(
      gates_, [&](const auto& gate) { return gate->WaitReleased(deadline, capture); });
}

bool CheckpointTicket::released() const {
  return std::ranges::all_of(gates_, [](const auto& gate) { return gate->released(); });
}

bool CheckpointTicket::WaitWritten(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [&] { return awaiting_ || result_; });
}

void CheckpointTicket::Approve() {
  const std::scoped_lock lock(mutex_);
  if (!rejected_) approved_ = true;
  changed_.notify_all();
}

void CheckpointTicket::Reject(Error error) {
  const std::scoped_lock lock(mutex_);
  if (!approved_ && !rejected_) rejected_ = std::move(error);
  changed_.notify_all();
}

void CheckpointTicket::RejectUndecided(Error error) {
  if (request_.verdict) Reject(std::move(error));
}

void CheckpointTicket::Abandon(Error error) {
  for (const auto& gate : gates_) gate->Abandon(error);
  const std::scoped_lock lock(mutex_);
  if (!rejected_) rejected_ = std::move(error);
  changed_.notify_all();
}

std::optional<Error> CheckpointTicket::rejected() const {
  const std::scoped_lock lock(mutex_);
  return rejected_;
}

bool CheckpointTicket::WaitDone(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [&] { return result_.has_value(); });
}

bool CheckpointTicket::done() const {
  const std::scoped_lock lock(mutex_);
  return result_.has_value();
}

std::uint64_t CheckpointTicket::written() const { return std::min(bytes_, before_ + written_); }

std::optional<Error> CheckpointTicket::Verdict() {
  std::unique_lock lock(mutex_);
  awaiting_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return !request_.verdict || approved_ || rejected_; });
  return rejected_;
}

void CheckpointTicket::Finish(Result<CheckpointInfo> result) {
  // Whoever waits for memory must not wait for ever, whatever went wrong and where.
  for (const auto& gate : gates_) gate->Close();
  const std::scoped_lock lock(mutex_);
  result_ = std::move(result);
  changed_.notify_all();
}

}  // namespace fastpersist::checkpoint
