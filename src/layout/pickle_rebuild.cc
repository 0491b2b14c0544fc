// SPDX-License-Identifier: Apache-2.0
#include "layout/pickle_rebuild.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "layout/pickle_text.h"

namespace fastpersist::layout {
namespace {

using Builder = PickleBuilder;
using Kind = PickleNode::Kind;
using Nodes = std::span<const NodeId>;

// torch's own limit.
constexpr std::size_t kMaxDimensions = 64;

bool IsSequence(Kind kind) {
  return kind == Kind::kTuple || kind == Kind::kSize || kind == Kind::kList;
}

bool IsText(Kind kind) { return kind == Kind::kText || kind == Kind::kBytes; }

// Integers that are not negative, and no more than there can be dimensions.
bool TakeExtents(Builder& builder, NodeId from, std::vector<std::int64_t>& extents) {
  const PickleNode& node = builder.at(from);
  if (!IsSequence(node.kind) || node.items.size() > kMaxDimensions) return false;
  if (!builder.Charge(node.items.size() * sizeof(std::int64_t))) return false;
  extents.reserve(node.items.size());
  for (const NodeId item : node.items) {
    const PickleNode& extent = builder.at(item);
    if (extent.kind != Kind::kInt || extent.integer < 0) return false;
    extents.push_back(extent.integer);
  }
  return true;
}

NodeId AddTensor(Builder& builder, Kind kind, PickleTensor tensor) {
  const NodeId node = builder.Add(kind);
  builder.at(node).detail = static_cast<std::uint32_t>(builder.tree.tensors.size());
  builder.tree.tensors.push_back(std::move(tensor));
  return node;
}

// The four arguments that all versions begin with.
bool TakeView(Builder& builder, Nodes arguments, PickleTensor& tensor) {
  const PickleNode& offset = builder.at(arguments[1]);
  if (!builder.Is(arguments[0], Kind::kStorage)) return false;
  if (offset.kind != Kind::kInt || offset.integer < 0) return false;
  tensor.storage = arguments[0];
  tensor.offset = offset.integer;
  return TakeExtents(builder, arguments[2], tensor.shape) &&
         TakeExtents(builder, arguments[3], tensor.strides) &&
         tensor.shape.size() == tensor.strides.size();
}

// requires_grad and the hooks.
bool TakeGradient(Builder& builder, Nodes two, PickleTensor& tensor) {
  if (!builder.Is(two[0], Kind::kBool)) return false;
  tensor.requires_grad = builder.at(two[0]).integer != 0;
  tensor.hooks = two[1];
  return true;
}

// None, or a dict of the bits.
bool TakeMetadata(Builder& builder, NodeId from, PickleTensor& tensor) {
  if (builder.Is(from, Kind::kNone)) return true;
  if (!builder.Is(from, Kind::kDict)) return false;
  tensor.metadata = from;
  return true;
}

NodeId Tensor(Builder& builder, Nodes arguments) {
  PickleTensor tensor;
  if (arguments.size() != 4 || !TakeView(builder, arguments, tensor)) return kNoNode;
  return AddTensor(builder, Kind::kTensor, std::move(tensor));
}

NodeId TensorV2(Builder& builder, Nodes arguments) {
  PickleTensor tensor;
  if (arguments.size() != 6 && arguments.size() != 7) return kNoNode;
  if (!TakeView(builder, arguments, tensor)) return kNoNode;
  if (!TakeGradient(builder, arguments.subspan(4), tensor)) return kNoNode;
  if (arguments.size() == 7 && !TakeMetadata(builder, arguments[6], tensor)) return kNoNode;
  return AddTensor(builder, Kind::kTensor, std::move(tensor));
}

NodeId TensorV3(Builder& builder, Nodes arguments) {
  constexpr std::string_view kTorch = "torch ";
  PickleTensor tensor;
  if (arguments.size() != 7 && arguments.size() != 8) return kNoNode;
  if (!TakeView(builder, arguments, tensor)) return kNoNode;
  if (!TakeGradient(builder, arguments.subspan(4), tensor)) return kNoNode;
  const PickleNode& dtype = builder.at(arguments[6]);
  if (dtype.kind != Kind::kGlobal || !dtype.text.starts_with(kTorch)) return kNoNode;
  if (!builder.Charge(dtype.text.size())) return kNoNode;
  tensor.dtype = dtype.text.substr(kTorch.size());
  if (arguments.size() == 8 && !TakeMetadata(builder, arguments[7], tensor)) return kNoNode;
  return AddTensor(builder, Kind::kTensor, std::move(tensor));
}

NodeId Parameter(Builder& builder, Nodes arguments) {
  PickleTensor tensor;
  if (arguments.size() != 3) return kNoNode;
  const Kind data = builder.KindOf(arguments[0]);
  if (data != Kind::kTensor && data != Kind::kParameter && data != Kind::kOpaque) return kNoNode;
  if (!TakeGradient(builder, arguments.subspan(1), tensor)) return kNoNode;
  const NodeId node = AddTensor(builder, Kind::kParameter, std::move(tensor));
  builder.at(node).items.push_back(arguments[0]);
  return node;
}

// The copy of what a sequence holds, as another kind.
NodeId CopyItems(Builder& builder, Kind kind, const std::vector<NodeId>& items) {
  if (!builder.Charge(items.size() * sizeof(NodeId))) return kNoNode;
  return builder.AddItems(kind, items);
}

template <Kind kKind>
NodeId SetOf(Builder& builder, Nodes arguments) {
  if (arguments.empty()) return builder.Add(kKind);
  if (arguments.size() != 1) return kNoNode;
  const Kind from = builder.KindOf(arguments[0]);
  if (!IsSequence(from) && from != Kind::kSet && from != Kind::kFrozenSet) return kNoNode;
  return CopyItems(builder, kKind, builder.at(arguments[0]).items);
}

NodeId OrderedDict(Builder& builder, Nodes arguments) {
  if (arguments.empty()) return builder.Add(Kind::kOrderedDict);
  if (arguments.size() != 1 || !IsSequence(builder.KindOf(arguments[0]))) return kNoNode;
  const std::vector<NodeId>& pairs = builder.at(arguments[0]).items;
  if (!builder.Charge(pairs.size() * 2 * sizeof(NodeId))) return kNoNode;
  std::vector<NodeId> items;
  items.reserve(pairs.size() * 2);
  for (const NodeId pair : pairs) {
    const PickleNode& node = builder.at(pair);
    if (!IsSequence(node.kind) || node.items.size() != 2) return kNoNode;
    items.insert(items.end(), node.items.begin(), node.items.end());
  }
  const NodeId node = builder.Add(Kind::kOrderedDict);
  builder.at(node).items = std::move(items);
  return node;
}

NodeId Size(Builder& builder, Nodes arguments) {
  if (arguments.empty()) return builder.Add(Kind::kSize);
  if (arguments.size() != 1 || !IsSequence(builder.KindOf(arguments[0]))) return kNoNode;
  const std::vector<NodeId>& items = builder.at(arguments[0]).items;
  // Charged before the walk, so that its time is bounded as well.
  if (!builder.Charge(items.size() * sizeof(NodeId))) return kNoNode;
  const bool integers =
      std::ranges::all_of(items, [&](NodeId item) { return builder.Is(item, Kind::kInt); });
  return integers ? builder.AddItems(Kind::kSize, items) : kNoNode;
}

NodeId Complex(Builder& builder, Nodes arguments) {
  if (arguments.size() != 2 || !builder.Is(arguments[0], Kind::kFloat) ||
      !builder.Is(arguments[1], Kind::kFloat)) {
    return kNoNode;
  }
  return builder.AddItems(Kind::kComplex, arguments);
}

// codecs.encode(text, "latin1"), which is how protocol 2 writes bytes.
NodeId Latin1Bytes(Builder& builder, Kind kind, Nodes arguments) {
  if (arguments.size() != 2 || !builder.Is(arguments[0], Kind::kText)) return kNoNode;
  const PickleNode& codec = builder.at(arguments[1]);
  if (!IsText(codec.kind) || (codec.text != "latin1" && codec.text != "latin-1")) return kNoNode;
  if (!builder.Charge(builder.at(arguments[0]).text.size())) return kNoNode;
  auto bytes = EncodeLatin1(builder.at(arguments[0]).text);
  return bytes ? builder.AddText(kind, std::move(*bytes)) : kNoNode;
}

NodeId Encode(Builder& builder, Nodes arguments) {
  return Latin1Bytes(builder, Kind::kBytes, arguments);
}

// bytes or bytearray: of nothing, of bytes, or of text and its encoding.
template <Kind kKind>
NodeId BytesOf(Builder& builder, Nodes arguments) {
  if (arguments.empty()) return builder.Add(kKind);
  if (arguments.size() == 2) return Latin1Bytes(builder, kKind, arguments);
  const Kind from = builder.KindOf(arguments[0]);
  if (arguments.size() != 1 || (from != Kind::kBytes && from != Kind::kByteArray)) return kNoNode;
  if (!builder.Charge(builder.at(arguments[0]).text.size())) return kNoNode;
  return builder.AddText(kKind, std::string(builder.at(arguments[0]).text));
}

// kNoNode when the arguments do not fit.
using KnownCallable = NodeId (*)(Builder& builder, Nodes arguments);

struct KnownName {
  std::string_view name;
  KnownCallable build;
};

// The frequent ones first. Up to protocol 2 the module is Python 2's __builtin__.
constexpr KnownName kKnown[] = {
    {"torch._utils _rebuild_tensor_v2", TensorV2},
    {"collections OrderedDict", OrderedDict},
    {"torch._utils _rebuild_parameter", Parameter},
    {"torch._utils _rebuild_tensor_v3", TensorV3},
    {"torch._utils _rebuild_tensor", Tensor},
    {"torch Size", Size},
    {"_codecs encode", Encode},
    {"builtins set", SetOf<Kind::kSet>},
    {"__builtin__ set", SetOf<Kind::kSet>},
    {"builtins frozenset", SetOf<Kind::kFrozenSet>},
    {"__builtin__ frozenset", SetOf<Kind::kFrozenSet>},
    {"builtins complex", Complex},
    {"__builtin__ complex", Complex},
    {"builtins bytes", BytesOf<Kind::kBytes>},
    {"__builtin__ bytes", BytesOf<Kind::kBytes>},
    {"builtins bytearray", BytesOf<Kind::kByteArray>},
    {"__builtin__ bytearray", BytesOf<Kind::kByteArray>},
};

}  // namespace

NodeId BuildCall(PickleBuilder& builder, NodeId callable, Nodes arguments) {
  // Keeps its length however long the chain of calls.
  constexpr std::string_view kResultOf = "result of ";
  const PickleNode& called = builder.at(callable);
  if (called.kind == Kind::kOpaque) {
    const std::string_view prefix = called.text.starts_with(kResultOf) ? "" : kResultOf;
    return builder.Opaque(std::string(prefix) + called.text, arguments);
  }
  const auto* const known = std::ranges::find(kKnown, called.text, &KnownName::name);
  if (known != std::ranges::end(kKnown)) {
    const NodeId node = known->build(builder, arguments);
    if (node != kNoNode) return node;
  }
  return builder.Opaque(builder.at(callable).text, arguments);
}

void RecycleArguments(PickleBuilder& builder, NodeId arguments, NodeId result) {
  if (!builder.MayRecycle(arguments)) return;
  if (builder.Is(result, Kind::kTensor)) {
    // Size and strides were copied.
    builder.Recycle(builder.at(arguments).items[2]);
    builder.Recycle(builder.at(arguments).items[3]);
  }
  builder.Recycle(arguments);
}

NodeId BuildPersistent(PickleBuilder& builder, NodeId id) {
  constexpr std::string_view kPersistent = "persistent id";
  const std::vector<NodeId>& parts = builder.at(id).items;
  if (!builder.Is(id, Kind::kTuple) || parts.size() != 5) {
    return builder.Opaque(kPersistent, {&id, 1});
  }
  const PickleNode& word = builder.at(parts[0]);
  const PickleNode& type = builder.at(parts[1]);
  const PickleNode& key = builder.at(parts[2]);
  const PickleNode& location = builder.at(parts[3]);
  const PickleNode& elements = builder.at(parts[4]);
  if (!IsText(word.kind) || word.text != "storage" || type.kind != Kind::kGlobal ||
      !IsText(key.kind) || !IsText(location.kind) || elements.kind != Kind::kInt ||
      elements.integer < 0 ||
      !builder.Charge(type.text.size() + 2 * key.text.size() + location.text.size())) {
    return builder.Opaque(kPersistent, {&id, 1});
  }
  const auto detail = static_cast<std::uint32_t>(builder.tree.storages.size());
  builder.tree.storages.push_back({.type = type.text,
                                   .key = key.text,
                                   .location = location.text,
                                   .elements = elements.integer});
  const NodeId node = builder.AddText(Kind::kStorage, std::string(key.text));
  builder.Recycle(id);
  builder.at(node).detail = detail;
  return node;
}

}  // namespace fastpersist::layout
