// SPDX-License-Identifier: Apache-2.0
// Makes the nodes of a PickleTree, and keeps the account that bounds its memory.
//
// Most of what a node holds lies in the pickle once, so it cannot outgrow it. The exception is what
// is copied out of another node (the name of a callable, the items of the list that a set is made
// of): ten bytes of a hostile pickle could copy a megabyte, again and again. Such copies are
// charged, and the allowance is a multiple of the pickle's size that no honest pickle comes near.
// Used by one thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "layout/pickle_reader.h"

namespace fastpersist::layout {

class PickleBuilder {
 public:
  using Kind = PickleNode::Kind;
  /// Bytes that may be copied for each byte of the pickle, and beyond that in any case.
  static constexpr std::uint64_t kCopiesPerByte = 32;
  static constexpr std::uint64_t kFreeCopies = 65'536;

  /// Without reuse, Recycle() does nothing.
  PickleBuilder(std::uint64_t pickle_size, bool reuse)
      : reuse_(reuse), allowance_(kFreeCopies + kCopiesPerByte * pickle_size) {
    // A tensor of torch.save takes 130 to 200 bytes of the pickle and 9 nodes.
    tree.nodes.reserve(
        static_cast<std::size_t>(std::min<std::uint64_t>(pickle_size / 12, 1U << 20)) + 16);
  }

  [[nodiscard]] PickleNode& at(NodeId id) { return tree.nodes[id]; }
  [[nodiscard]] Kind KindOf(NodeId id) const { return tree.nodes[id].kind; }
  [[nodiscard]] bool Is(NodeId id, Kind kind) const { return tree.nodes[id].kind == kind; }

  /// Moves all nodes when the vector grows: no reference into a node survives it. The items of a
  /// node do (their memory moves along), a view of a short text does not.
  [[nodiscard]] NodeId Add(Kind kind) {
    const auto id = static_cast<NodeId>(tree.nodes.size());
    tree.nodes.emplace_back().kind = kind;
    return id;
  }
  [[nodiscard]] NodeId AddText(Kind kind, std::string text) {
    const NodeId id = Add(kind);
    at(id).text = std::move(text);
    return id;
  }
  [[nodiscard]] NodeId AddItems(Kind kind, std::span<const NodeId> items) {
    NodeId id = kNoNode;
    if (kind == Kind::kTuple && !unused_.empty()) {
      id = unused_.back();
      unused_.pop_back();
    } else {
      id = Add(kind);
    }
    at(id).items.assign(items.begin(), items.end());
    return id;
  }

  /// Most tuples are arguments: needed for one call, and then never again. Recycle() gives such a
  /// one back, which halves the time and memory that a state dict takes. The caller holds the only
  /// reference to it, unless Keep() was called because the memo will be asked for it.
  void Recycle(NodeId tuple) {
    if (MayRecycle(tuple)) unused_.push_back(tuple);
  }
  [[nodiscard]] bool MayRecycle(NodeId id) const {
    return reuse_ && Is(id, Kind::kTuple) && tree.nodes[id].detail != kKept;
  }
  void Keep(NodeId id) {
    if (Is(id, Kind::kTuple)) at(id).detail = kKept;
  }

  /// Equal values that cannot change may share a node; nobody can tell.
  [[nodiscard]] NodeId None() { return Shared(none_, Kind::kNone); }
  [[nodiscard]] NodeId EmptyTuple() {
    const NodeId id = Shared(empty_tuple_, Kind::kTuple);
    Keep(id);
    return id;
  }
  [[nodiscard]] NodeId Bool(bool value) {
    const NodeId id = Shared(bools_[value ? 1 : 0], Kind::kBool);
    at(id).integer = value ? 1 : 0;
    return id;
  }
  [[nodiscard]] NodeId Int(std::int64_t value) {
    // Sizes, strides and offsets are the same few numbers over and over.
    constexpr std::uint64_t kGolden = 0x9E37'79B9'7F4A'7C15;
    KnownInt& known = ints_[(static_cast<std::uint64_t>(value) * kGolden) >> (64 - kIntBits)];
    if (known.id == kNoNode || known.value != value) {
      known = {.value = value, .id = Add(Kind::kInt)};
      at(known.id).integer = value;
    }
    return known.id;
  }

  /// Bytes that are kept of the text of an opaque node.
  static constexpr std::size_t kLongestOpaque = 200;
  /// A copy of items and text is charged; a text that is not a plain name is cut.
  [[nodiscard]] NodeId Opaque(std::string_view text, std::span<const NodeId> items) {
    std::string name(text.substr(0, kLongestOpaque));
    if (text.size() > kLongestOpaque) name += "...";
    tree.opaque = true;
    const bool affordable = Charge(name.size() + items.size_bytes());
    const NodeId id = AddText(Kind::kOpaque, std::move(name));
    if (affordable) at(id).items.assign(items.begin(), items.end());
    return id;
  }

  /// To be called before `bytes` are copied out of a node; false when the allowance is spent.
  [[nodiscard]] bool Charge(std::uint64_t bytes) {
    if (bytes > allowance_) exhausted_ = true;
    if (exhausted_) return false;
    allowance_ -= bytes;
    return true;
  }
  [[nodiscard]] bool exhausted() const { return exhausted_; }

  PickleTree tree;

 private:
  static constexpr std::uint32_t kKept = 1;
  static constexpr int kIntBits = 10;
  struct KnownInt {
    std::int64_t value = 0;
    NodeId id = kNoNode;
  };

  [[nodiscard]] NodeId Shared(NodeId& id, Kind kind) {
    if (id == kNoNode) id = Add(kind);
    return id;
  }

  bool reuse_;
  std::vector<NodeId> unused_;  // Tuples that were given back; their memory is kept.
  std::uint64_t allowance_;
  bool exhausted_ = false;
  NodeId none_ = kNoNode;
  NodeId empty_tuple_ = kNoNode;
  std::array<NodeId, 2> bools_{kNoNode, kNoNode};
  std::array<KnownInt, 1U << kIntBits> ints_{};
};

}  // namespace fastpersist::layout
