// SPDX-License-Identifier: Apache-2.0
// Files that prove themselves: the bytes follow from a generation number, every generation has a
// size of its own, and a CRC ends the file. A mixture of two generations, a hole or a missing tail
// cannot pass for a whole file.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "layout/stream.h"

namespace fastpersist::testing {

/// A file of about this many bytes (never a multiple of 512; at least 64).
[[nodiscard]] std::string GenerationFile(std::uint64_t generation, std::size_t about_bytes);

/// The generation of a whole file; nullopt for anything else.
[[nodiscard]] std::optional<std::uint64_t> GenerationOf(std::string_view content);

/// The content as a stream with one extent in memory, which must outlive it.
[[nodiscard]] layout::Stream StreamOf(std::string_view content);

}  // namespace fastpersist::testing
