// SPDX-License-Identifier: Apache-2.0
#include "base/utf8.h"

#include <array>
#include <cstddef>
#include <cstdint>

namespace fastpersist::base {
namespace {

// Bytes that follow a lead byte; -1 for bytes that cannot lead.
int Continuations(unsigned char lead) {
  if (lead < 0x80) return 0;
  if (lead >= 0xC2 && lead <= 0xDF) return 1;
  if (lead >= 0xE0 && lead <= 0xEF) return 2;
  if (lead >= 0xF0 && lead <= 0xF4) return 3;
  return -1;
}

bool IsScalarValue(std::uint32_t code, int continuations) {
  constexpr std::array<std::uint32_t, 4> kSmallest{0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
  return code >= kSmallest.at(static_cast<std::size_t>(continuations)) && code <= 0x10FFFF &&
         !surrogate;
}

}  // namespace

bool IsUtf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i++]);
    const int continuations = Continuations(lead);
    if (continuations < 0) return false;
    std::uint32_t code = continuations == 0 ? lead : lead & (0x3FU >> continuations);
    for (int k = 0; k < continuations; ++k) {
      if (i == text.size()) return false;
      const auto byte = static_cast<unsigned char>(text[i++]);
      if ((byte & 0xC0U) != 0x80U) return false;
      code = code << 6U | (byte & 0x3FU);
    }
    if (!IsScalarValue(code, continuations)) return false;
  }
  return true;
}

}  // namespace fastpersist::base
