// SPDX-License-Identifier: Apache-2.0
// The machine that a pickle is a program for: the bytes still to read, a stack with marks, and a
// memo. The opcodes are functions on it, in three groups (pickle_read_scalars.cc, _containers.cc,
// _calls.cc); pickle_reader.cc runs them.
//
// Every member that can fail returns false and leaves the reason in failure(); the caller passes
// the false on. Used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "layout/pickle_builder.h"
#include "layout/pickle_memo.h"
#include "layout/pickle_use.h"

namespace fastpersist::layout {

class PickleMachine {
 public:
  PickleMachine(std::string_view pickle, PickleUse use)
      : builder(pickle.size(), !use.duplicates), pickle_(pickle), use_(std::move(use)) {}

  [[nodiscard]] bool Fail(std::string reason) {
    failure_ = std::move(reason);
    return false;
  }
  [[nodiscard]] const std::string& failure() const { return failure_; }

  // The bytes.
  [[nodiscard]] std::size_t position() const { return position_; }
  [[nodiscard]] std::size_t left() const { return pickle_.size() - position_; }
  [[nodiscard]] bool Take(std::uint64_t length, std::string_view& bytes) {
    if (length > left()) return FailShort(length);
    bytes = pickle_.substr(position_, static_cast<std::size_t>(length));
    position_ += bytes.size();
    return true;
  }
  /// Up to the next line feed, which is not part of the line.
  [[nodiscard]] bool TakeLine(std::string_view& line);
  /// Little-endian, of 1 to 8 bytes.
  [[nodiscard]] bool TakeUnsigned(unsigned width, std::uint64_t& value) {
    std::string_view bytes;
    if (!Take(width, bytes)) return false;
    value = 0;
    for (unsigned i = 0; i < width; ++i) {
      value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
    }
    return true;
  }
  /// A length of that width, and as many bytes.
  [[nodiscard]] bool TakeCounted(unsigned width, std::string_view& bytes) {
    std::uint64_t length = 0;
    return TakeUnsigned(width, length) && Take(length, bytes);
  }

  // The stack. Nothing below the last mark can be reached.
  bool Push(NodeId node) {
    stack_.push_back(node);
    return true;
  }
  [[nodiscard]] bool Top(NodeId& node) {
    if (stack_.size() <= fence_) return FailEmpty();
    node = stack_.back();
    return true;
  }
  [[nodiscard]] bool Pop(NodeId& node) {
    if (!Top(node)) return false;
    stack_.pop_back();
    return true;
  }
  /// The count topmost nodes, lowest first; valid until the next push.
  [[nodiscard]] bool Peek(std::size_t count, std::span<const NodeId>& nodes) {
    if (stack_.size() - fence_ < count) return FailEmpty();
    nodes = std::span<const NodeId>(stack_).last(count);
    return true;
  }
  void Drop(std::size_t count) { stack_.resize(stack_.size() - count); }
  void Mark();
  /// Removes the last mark and tells how many nodes were above it.
  [[nodiscard]] bool Unmark(std::size_t& count);
  [[nodiscard]] bool IsMarkOnTop() const {
    return !marks_.empty() && marks_.back() == stack_.size();
  }

  [[nodiscard]] bool Put(std::uint64_t number);
  [[nodiscard]] bool Get(std::uint64_t number);
  [[nodiscard]] std::uint64_t memo_count() const { return memo_.count(); }

  void Stop() { stopped_ = true; }
  [[nodiscard]] bool stopped() const { return stopped_; }

  PickleBuilder builder;

 private:
  [[nodiscard]] bool FailShort(std::uint64_t length);
  [[nodiscard]] bool FailEmpty();

  std::string_view pickle_;
  PickleUse use_;
  std::size_t position_ = 0;
  std::vector<NodeId> stack_;
  std::vector<std::size_t> marks_;  // Sizes of the stack when they were set.
  std::size_t fence_ = 0;           // The last of marks_, or 0.
  PickleMemo memo_;
  std::string failure_;
  bool stopped_ = false;
};

/// False when the machine has failed.
using PickleOperation = bool (*)(PickleMachine& machine);

/// What follows an opcode: so many bytes, a length of so many bytes and what it counts, or lines.
enum class PickleArgument : std::uint8_t {
  kNone,
  kOne,
  kTwo,
  kFour,
  kEight,
  kCountedByOne,
  kCountedByFour,
  kCountedByEight,
  kLine,
  kTwoLines,
};

struct PickleOpcode {
  unsigned char code = 0;
  std::string_view name;  ///< As in pickletools.
  PickleOperation run = nullptr;
  PickleArgument argument = PickleArgument::kNone;
};

/// None, numbers, text and bytes.
[[nodiscard]] std::span<const PickleOpcode> PickleScalarOpcodes();
/// Lists, tuples, dicts and sets; the stack and the memo.
[[nodiscard]] std::span<const PickleOpcode> PickleContainerOpcodes();
/// What would import, call or look up something; and the frame around it all.
[[nodiscard]] std::span<const PickleOpcode> PickleCallOpcodes();

}  // namespace fastpersist::layout
