// SPDX-License-Identifier: Apache-2.0
// Bytes as hexadecimal digits, so that tests can hold what other programs wrote.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace fastpersist::testing {

[[nodiscard]] inline std::string ToHex(std::span<const std::byte> bytes) {
  std::string hex;
  for (const std::byte byte : bytes) hex += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
  return hex;
}

[[nodiscard]] inline std::string ToHex(std::string_view text) {
  return ToHex(std::as_bytes(std::span(text)));
}

}  // namespace fastpersist::testing
