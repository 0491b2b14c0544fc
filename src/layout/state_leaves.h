// SPDX-License-Identifier: Apache-2.0
// The tensors and values of a state, in its order, each under a name: the keys and indices that
// lead to it, joined by dots. Pure.
//
// Safe on hostile input: no recursion, and time and memory of the order of the pickle's size.
// Every container is entered once, by the first path that reaches it, so cycles end; a tensor or
// value that several containers share is listed under each of its names.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "layout/pickle_reader.h"

namespace fastpersist::layout {

struct StateLeaf {
  /// Unique and UTF-8. "tensor" or "value" for a state that is nothing else; "#2", "#3", ... is
  /// added to a name that others bear already. What lies deeper than 100 levels, or would have a
  /// name longer than 4096 bytes, is numbered: an ellipsis, then "1", "2", ...; so is everything
  /// after names that took 64 times the pickle's size, which no plain state reaches.
  std::string name;
  NodeId node = kNoNode;  ///< Of any kind but kParameter; containers only when they are empty.
};

/// A parameter counts as the tensor in it. Dicts are named by their keys, other containers by
/// number, and so are the arguments of opaque objects; what a tensor or an opaque object has as
/// attributes, by the attribute's name. The attributes of ordered dicts are left out.
[[nodiscard]] std::vector<StateLeaf> StateLeaves(const PickleTree& tree, std::size_t pickle_size);

}  // namespace fastpersist::layout
