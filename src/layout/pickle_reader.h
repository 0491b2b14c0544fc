// SPDX-License-Identifier: Apache-2.0
// The restricted pickle reader: a pickle becomes a tree of plain values, and nothing is ever
// executed, imported or called. Containers, numbers, text, bytes, tensors and torch's rebuild
// functions are understood; whatever else the pickle would construct becomes an opaque node that
// keeps what it was made of, so that it can be shown.
//
// Safe on hostile input: no recursion (the reader keeps its own stack), every length is compared
// with the bytes that are left before memory is taken, no operation takes time in the square of
// the pickle's size, and the memory taken is at most 256 times the pickle's size plus 256 KiB. That
// is what a pickle made for it reaches (one byte can make one node); state dicts take about 6
// times. Pickle protocols 0 to 5. Pure.
//
// Source: the opcode documentation in CPython's Lib/pickletools.py; torch/_utils.py for the
// arguments of the rebuild functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fastpersist/error.h"

namespace fastpersist::layout {

/// Index into PickleTree::nodes.
using NodeId = std::uint32_t;
inline constexpr NodeId kNoNode = UINT32_MAX;

/// One value. Shared and cyclic references are shared NodeIds, as the memo of the pickle says, so
/// whoever walks the tree must expect both. Equal integers, booleans, None and empty tuples may be
/// one node as well.
struct PickleNode {
  enum class Kind : std::uint8_t {
    kNone,
    kBool,         ///< integer: 0 or 1
    kInt,          ///< integer
    kBigInt,       ///< text: decimal digits with sign (does not fit 64 bits)
    kFloat,        ///< real
    kText,         ///< text: UTF-8, surrogates kept as three bytes each ("surrogatepass"); not
                   ///< checked, so the bytes may be anything
    kBytes,        ///< text: the bytes (also protocol 0 to 2 byte strings)
    kByteArray,    ///< text
    kList,         ///< items
    kTuple,        ///< items
    kSet,          ///< items
    kFrozenSet,    ///< items
    kDict,         ///< items: key, value, key, value, ...; of equal keys the last one counts
    kOrderedDict,  ///< the same, of a collections.OrderedDict; attributes may follow
    kSize,         ///< items: a torch.Size
    kComplex,      ///< items: two kFloat
    kGlobal,       ///< text: "module name", not resolved
    kStorage,      ///< text: the key ("0", of record data/0); see storage
    kTensor,       ///< see tensor: torch._utils._rebuild_tensor, _v2 or _v3
    kParameter,    ///< items: data (kTensor or other); see tensor for requires_grad and hooks
    kOpaque,       ///< text: what would be called ("module name"), cut at 200 bytes; items: the
                   ///< callable's arguments, then what a list, dict or set would be filled with.
                   ///< Also "persistent id" (items: the id), "extension N", "int of N bytes", and
                   ///< "result of ..." where the callable is such a value itself
  };
  Kind kind = Kind::kNone;
  std::int64_t integer = 0;
  double real = 0;
  std::string text;
  std::vector<NodeId> items;
  /// What a BUILD opcode would set on an ordered dict, a tensor, a parameter or an opaque object
  /// (for OrderedDict: the dict of attributes, such as _metadata of a module's state_dict).
  NodeId attributes = kNoNode;
  /// Index into PickleTree::storages or ::tensors; kStorage, kTensor and kParameter only.
  std::uint32_t detail = 0;
};

/// A persistent id ("storage", type, key, location, elements).
struct PickleStorage {
  std::string type;           ///< "torch FloatStorage", "torch.storage UntypedStorage", ...
  std::string key;            ///< Record data/<key>.
  std::string location;       ///< "cpu", "cuda:0", "meta", ...
  std::int64_t elements = 0;  ///< Of the type; bytes for an untyped storage.
};

/// The arguments of a rebuild function. Negative sizes and offsets were refused; whether the view
/// lies within its storage is the business of torch_file.h.
struct PickleTensor {
  NodeId storage = kNoNode;  ///< A kStorage node.
  std::int64_t offset = 0;   ///< In elements.
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  ///< In elements.
  bool requires_grad = false;
  NodeId hooks = kNoNode;     ///< Mostly an empty kOrderedDict.
  std::string dtype;          ///< _v3 only: the attribute of torch, such as "float8_e4m3fn".
  NodeId metadata = kNoNode;  ///< Conjugate and negative bits: a kDict, or kNoNode.
};

struct PickleTree {
  std::vector<PickleNode> nodes;
  std::vector<PickleStorage> storages;  ///< One for each kStorage node.
  std::vector<PickleTensor> tensors;    ///< One for each kTensor and kParameter node.
  NodeId root = kNoNode;
  bool opaque = false;  ///< True when some node is kOpaque, or a kGlobal stands as a value.

  [[nodiscard]] const PickleNode& at(NodeId id) const { return nodes[id]; }
};

/// kCorrupt: not a pickle, or one that does not end, or uses its stack or memo wrongly; the detail
/// names the byte and the opcode. Calls whose arguments do not fit a known callable are no error
/// but opaque. The path of the error is left to the caller.
[[nodiscard]] Result<PickleTree> ReadPickle(std::string_view pickle);

}  // namespace fastpersist::layout
