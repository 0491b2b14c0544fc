// SPDX-License-Identifier: Apache-2.0
// Short readable text of what a file holds: names and values that come from outside are cleaned to
// UTF-8 and cut before they go into a message or a list. Pure.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "layout/pickle_reader.h"

namespace fastpersist::layout {

/// At most limit bytes of text, an ellipsis marking a cut; bytes that are not UTF-8 appear as
/// "\xNN".
[[nodiscard]] std::string Shortened(std::string_view text, std::size_t limit);

/// About as Python's repr writes the value: "3", "'adam'", "(0.9, 0.999)", "b'\x00'"; for globals
/// and opaque objects "module name". At most limit bytes; an ellipsis marks a cut. Takes time and
/// memory of the order of limit, however large the value.
[[nodiscard]] std::string ShortText(const PickleTree& tree, NodeId id, std::size_t limit);

}  // namespace fastpersist::layout
