// SPDX-License-Identifier: Apache-2.0
// PyTorch files with states that Save cannot make: views, strides, storages that several tensors
// share, and archives whose records do not lie back to back.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "testing/archives.h"

namespace fastpersist::testing {

/// A tensor of a state: a view of one of its storages.
struct ViewOfStorage {
  std::string name;
  std::uint32_t storage = 0;
  std::int64_t offset = 0;  ///< In elements.
  std::vector<std::int64_t> shape = {};
  std::vector<std::int64_t> strides = {};
};

/// The records of a dict of views; all storages hold elements of item_size bytes (1, 4 or 8).
[[nodiscard]] std::vector<Body> RecordsOfViews(const std::vector<std::string>& storages,
                                               const std::vector<ViewOfStorage>& views,
                                               std::uint32_t item_size = 1);

/// The records of an archive written anew with that many bytes between any two of them; or only
/// behind the records whose names end so.
[[nodiscard]] std::string WithGaps(const std::string& archive, std::uint64_t gap,
                                   std::string_view behind = "");

}  // namespace fastpersist::testing
