// SPDX-License-Identifier: Apache-2.0
// What stands in the way of a conversion: everything that the other format cannot hold is named
// before a byte is written. Pure.
#pragma once

#include <string>
#include <vector>

#include "fastpersist/save.h"
#include "layout/contents.h"

namespace fastpersist::cli {

struct ConvertChoices {
  bool tensors_only = false;      ///< Leave out what is no tensor.
  bool duplicate_shared = false;  ///< Write shared memory once for each tensor.
};

/// A tensor, and an earlier one whose bytes it has or lies between.
struct SharedMemory {
  const layout::StoredTensor* tensor = nullptr;
  const layout::StoredTensor* with = nullptr;
};
/// In the order of the file's storages; at most one entry for each tensor.
[[nodiscard]] std::vector<SharedMemory> FindSharedMemory(const layout::Contents& contents);

/// The names of what is no tensor. What an opaque object was made of goes with its name.
[[nodiscard]] std::vector<std::string> FindNonTensors(const layout::Contents& contents);

/// One clause for each kind of obstacle, each naming all that it concerns; empty when the file can
/// be converted.
[[nodiscard]] std::vector<std::string> FindObstacles(const layout::Contents& contents, Format to,
                                                     const ConvertChoices& choices);

/// True when tensors lie deeper than in one dict, so that a flat list of names loses something.
[[nodiscard]] bool IsNested(const layout::Contents& contents);

/// Names of tensors that got a number because an earlier entry came to the same name: in
/// {"a.b": x, "a": {"b": y}} y is called "a.b#2".
[[nodiscard]] std::vector<std::string> FindNumbered(const layout::Contents& contents);

/// "'a', 'b'".
[[nodiscard]] std::string Quoted(const std::vector<std::string>& names);

}  // namespace fastpersist::cli
