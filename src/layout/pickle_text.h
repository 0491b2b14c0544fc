// SPDX-License-Identifier: Apache-2.0
// How pickles write numbers and text down, undone: long integers, quoted byte strings, text with
// \u escapes, and text that stands for Latin-1 bytes. Pure.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace fastpersist::layout {

/// Without the bytes that only repeat the sign of a little-endian two's complement number.
[[nodiscard]] std::string_view ShortestTwosComplement(std::string_view bytes);

/// The decimal digits, with sign, of a little-endian two's complement number. Takes time in the
/// square of its length: the caller bounds it.
[[nodiscard]] std::string DecimalOfTwosComplement(std::string_view bytes);

/// True for -?[0-9]+ without a leading zero.
[[nodiscard]] bool IsDecimal(std::string_view text);

/// The bytes that Python's repr() of a byte string stands for; quoted in ' or ". Nothing when the
/// quotes or the escapes are not whole.
[[nodiscard]] std::optional<std::string> UnquoteBytes(std::string_view line);

/// The UTF-8 of what Python's codec raw-unicode-escape wrote: bytes are Latin-1, \uXXXX and
/// \UXXXXXXXX are code points. Nothing when an escape is not whole or beyond U+10FFFF.
[[nodiscard]] std::optional<std::string> DecodeRawUnicodeEscape(std::string_view line);

/// One byte for each code point of the UTF-8. Nothing when a code point is above 255.
[[nodiscard]] std::optional<std::string> EncodeLatin1(std::string_view text);

}  // namespace fastpersist::layout
