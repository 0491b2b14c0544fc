// SPDX-License-Identifier: Apache-2.0
// ZIP archives for tests of readers: made by the library's own writer, and read with every check
// that there is.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fastpersist/error.h"
#include "layout/byte_source.h"

namespace fastpersist::testing {

struct Body {
  std::string name;
  std::string bytes;
  bool operator==(const Body&) const = default;
};

/// A file of the PyTorch layout with these records, "archive/" before each name, and torch's own.
[[nodiscard]] std::string ArchiveOf(const std::vector<Body>& bodies, std::uint64_t alignment = 64);

/// Everything in an archive, as a reader does it: the directory, then the local header, the body
/// with its CRC-32 and the descriptor of each record; LocateBodies where a header demands it.
[[nodiscard]] Result<std::vector<Body>> ReadBodies(const layout::ByteSource& source);

/// The bytes that hexadecimal digits stand for.
[[nodiscard]] std::string FromHex(std::string_view digits);

/// A number as a file holds it.
template <std::unsigned_integral T>
[[nodiscard]] std::string Little(T value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

}  // namespace fastpersist::testing
