// SPDX-License-Identifier: Apache-2.0
#include "layout/pickle_machine.h"

#include <fmt/format.h>

namespace fastpersist::layout {

bool PickleMachine::TakeLine(std::string_view& line) {
  const std::size_t end = pickle_.find('\n', position_);
  if (end == std::string_view::npos) return Fail("its line does not end");
  line = pickle_.substr(position_, end - position_);
  position_ = end + 1;
  return true;
}

void PickleMachine::Mark() {
  fence_ = stack_.size();
  marks_.push_back(fence_);
}

bool PickleMachine::Unmark(std::size_t& count) {
  if (marks_.empty()) return Fail("there is no mark on the stack");
  count = stack_.size() - marks_.back();
  marks_.pop_back();
  fence_ = marks_.empty() ? 0 : marks_.back();
  return true;
}

bool PickleMachine::Put(std::uint64_t number) {
  NodeId node = kNoNode;
  if (!Top(node)) return false;
  memo_.Put(number, node);
  if (use_.IsUsed(number)) builder.Keep(node);
  return true;
}

bool PickleMachine::Get(std::uint64_t number) {
  const NodeId node = memo_.Get(number);
  if (node == kNoNode) return Fail(fmt::format("nothing has the number {} in the memo", number));
  return Push(node);
}

bool PickleMachine::FailShort(std::uint64_t length) {
  return Fail(fmt::format("it needs {} more bytes and {} are left", length, left()));
}

bool PickleMachine::FailEmpty() {
  return Fail(stack_.empty() ? "the stack is empty" : "a mark, or too little, is on the stack");
}

}  // namespace fastpersist::layout
