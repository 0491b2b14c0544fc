// SPDX-License-Identifier: Apache-2.0
// What a call in a pickle would have made, as a node. The callables that are known here are those
// that torch.save and the pickler use for plain values; nothing is ever called. A known callable
// with arguments that do not fit it is treated like an unknown one.
//
// Source: torch/_utils.py and the __reduce__ methods of CPython's types.
#pragma once

#include <span>

#include "layout/pickle_builder.h"
#include "layout/pickle_reader.h"

namespace fastpersist::layout {

/// The result of calling a kGlobal or kOpaque with these arguments, which must not lie in memory
/// that Add() moves (a node's items do not). Look at exhausted() afterwards.
[[nodiscard]] NodeId BuildCall(PickleBuilder& builder, NodeId callable,
                               std::span<const NodeId> arguments);

/// Gives the tuple of a call's arguments back, and those in it that the result does not refer to.
void RecycleArguments(PickleBuilder& builder, NodeId arguments, NodeId result);

/// kStorage for torch's ("storage", type, key, location, elements), else kOpaque. Look at
/// exhausted() afterwards.
[[nodiscard]] NodeId BuildPersistent(PickleBuilder& builder, NodeId id);

}  // namespace fastpersist::layout
