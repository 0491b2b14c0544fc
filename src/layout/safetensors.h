// SPDX-License-Identifier: Apache-2.0
// The safetensors file, byte for byte as the safetensors package writes it: eight bytes with the
// length of a JSON header, the header padded with spaces to a multiple of eight, then the tensors
// in descending order of their type and ascending order of their name. Pure.
//
// Source: the format description in the README of the safetensors project. With more than one
// metadata key the package's order is random; ours is sorted.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fastpersist/error.h"
#include "layout/stream.h"

namespace fastpersist::layout {

struct SafetensorsEntry {
  std::string name;   ///< UTF-8.
  std::string dtype;  ///< As in the header: "F32", "BF16", ...
  std::vector<std::int64_t> shape;
  std::span<const std::byte> body;   ///< Must outlive the stream.
  std::optional<PulledBody> pulled;  ///< In place of body.

  [[nodiscard]] std::uint64_t size() const { return pulled ? pulled->length : body.size(); }
};

/// Errors: kUnsupportedState for an unknown type, a name that is not UTF-8, used twice, or
/// reserved, and for a header of more than 100,000,000 bytes.
[[nodiscard]] Result<Stream> LayOutSafetensors(std::vector<SafetensorsEntry> entries,
                                               const std::map<std::string, std::string>& metadata);

}  // namespace fastpersist::layout
