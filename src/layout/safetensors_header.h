// SPDX-License-Identifier: Apache-2.0
// The JSON header of a safetensors file as it was written, before anything in it is compared with
// the file. Takes what the safetensors package takes, but no name twice, since two readers could
// then see two different files. Safe on hostile input: the memory used is bounded by a small
// multiple of the header's size, and the depth of the nesting is limited. Pure.
//
// Source: the format description in the README of the safetensors project, and trials with its
// package.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fastpersist/error.h"

namespace fastpersist::layout {

/// The package reads no longer header.
inline constexpr std::uint64_t kMaxSafetensorsHeader = 100'000'000;

struct SafetensorsHeader {
  struct Entry {
    std::string name;
    std::string dtype;
    std::vector<std::int64_t> shape;  ///< None is negative.
    std::uint64_t begin = 0;          ///< In the data, which follow the header.
    std::uint64_t end = 0;
  };
  std::vector<Entry> entries;  ///< In the order of the text.
  std::map<std::string, std::string> metadata;
};

/// The error has a detail ("its header ..."), the entry if one is concerned, and in offset the
/// position in the text if one is known; the caller adds the rest.
[[nodiscard]] Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text);

}  // namespace fastpersist::layout
