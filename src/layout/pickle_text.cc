// SPDX-License-Identifier: Apache-2.0
#include "layout/pickle_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fastpersist::layout {
namespace {

bool IsNegative(std::string_view bytes) {
  return !bytes.empty() && (static_cast<unsigned char>(bytes.back()) & 0x80U) != 0;
}

// Words of 32 bits, lowest first, of the absolute value.
std::vector<std::uint32_t> Magnitude(std::string_view bytes) {
  const bool negative = IsNegative(bytes);
  std::vector<std::uint32_t> words(bytes.size() / 4 + 1, negative ? UINT32_MAX : 0);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const unsigned shift = 8 * (i % 4);
    words[i / 4] &= ~(0xFFU << shift);
    words[i / 4] |= std::uint32_t{static_cast<unsigned char>(bytes[i])} << shift;
  }
  if (!negative) return words;
  bool carry = true;
  for (std::uint32_t& word : words) {
    word = ~word + (carry ? 1 : 0);
    carry = carry && word == 0;
  }
  return words;
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// Exactly that many digits at the front of text.
std::optional<std::uint32_t> ParseHex(std::string_view text, std::size_t digits) {
  if (text.size() < digits) return std::nullopt;
  std::uint32_t value = 0;
  for (const char c : text.substr(0, digits)) {
    const int digit = HexDigit(c);
    if (digit < 0) return std::nullopt;
    value = value << 4 | static_cast<std::uint32_t>(digit);
  }
  return value;
}

bool IsOctal(char c) { return c >= '0' && c <= '7'; }

// The byte that stands for a one-letter escape; 0 for none.
char PlainEscape(char letter) {
  constexpr std::string_view kLetters = "\\'\"bftnrva";
  constexpr std::string_view kBytes = "\\'\"\b\f\t\n\r\v\a";
  const std::size_t at = kLetters.find(letter);
  return at == std::string_view::npos ? '\0' : kBytes[at];
}

// rest begins behind a backslash. Appends what the escape stands for and returns its length;
// nothing when it is not whole.
std::optional<std::size_t> UnescapeByte(std::string_view rest, std::string& out) {
  if (rest.empty()) return std::nullopt;
  if (rest[0] == 'x') {
    const auto value = ParseHex(rest.substr(1), 2);
    if (!value) return std::nullopt;
    out.push_back(static_cast<char>(*value));
    return 3;
  }
  if (IsOctal(rest[0])) {
    unsigned value = 0;
    std::size_t length = 0;
    for (; length < std::min<std::size_t>(rest.size(), 3) && IsOctal(rest[length]); ++length) {
      value = value * 8 + static_cast<unsigned>(rest[length] - '0');
    }
    out.push_back(static_cast<char>(value));
    return length;
  }
  const char plain = PlainEscape(rest[0]);
  if (plain == '\0') out.push_back('\\');  // Python keeps what it does not know.
  out.push_back(plain == '\0' ? rest[0] : plain);
  return 1;
}

void AppendUtf8(std::uint32_t code, std::string& out) {
  const auto tail = [&](unsigned shift) {
    out.push_back(static_cast<char>(0x80U | ((code >> shift) & 0x3FU)));
  };
  if (code < 0x80) {
    out.push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    out.push_back(static_cast<char>(0xC0U | (code >> 6)));
    tail(0);
  } else if (code < 0x1'0000) {
    out.push_back(static_cast<char>(0xE0U | (code >> 12)));
    tail(6);
    tail(0);
  } else {
    out.push_back(static_cast<char>(0xF0U | (code >> 18)));
    tail(12);
    tail(6);
    tail(0);
  }
}

}  // namespace

std::string_view ShortestTwosComplement(std::string_view bytes) {
  while (bytes.size() > 1) {
    const bool negative = IsNegative(bytes);
    const std::string_view shorter = bytes.substr(0, bytes.size() - 1);
    if (bytes.back() != (negative ? '\xFF' : '\0') || IsNegative(shorter) != negative) break;
    bytes = shorter;
  }
  return bytes;
}

std::string DecimalOfTwosComplement(std::string_view bytes) {
  constexpr std::uint64_t kBillion = 1'000'000'000;
  std::vector<std::uint32_t> words = Magnitude(bytes);
  std::vector<std::uint32_t> groups;  // Of nine digits, lowest first.
  while (true) {
    while (!words.empty() && words.back() == 0) words.pop_back();
    if (words.empty()) break;
    std::uint64_t rest = 0;
    for (std::size_t i = words.size(); i-- > 0;) {
      rest = rest << 32 | words[i];
      words[i] = static_cast<std::uint32_t>(rest / kBillion);
      rest %= kBillion;
    }
    groups.push_back(static_cast<std::uint32_t>(rest));
  }
  if (groups.empty()) return "0";
  std::string digits = IsNegative(bytes) ? "-" : "";
  fmt::format_to(std::back_inserter(digits), "{}", groups.back());
  for (std::size_t i = groups.size() - 1; i-- > 0;) {
    fmt::format_to(std::back_inserter(digits), "{:09}", groups[i]);
  }
  return digits;
}

bool IsDecimal(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  if (text.empty() || (text[0] == '0' && text.size() > 1)) return false;
  return std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

std::optional<std::string> UnquoteBytes(std::string_view line) {
  if (line.size() < 2 || line.front() != line.back()) return std::nullopt;
  if (line.front() != '\'' && line.front() != '"') return std::nullopt;
  line = line.substr(1, line.size() - 2);
  std::string out;
  while (!line.empty()) {
    const std::size_t plain = std::min(line.find('\\'), line.size());
    out += line.substr(0, plain);
    line.remove_prefix(plain);
    if (line.empty()) break;
    const auto length = UnescapeByte(line.substr(1), out);
    if (!length) return std::nullopt;
    line.remove_prefix(1 + *length);
  }
  return out;
}

std::optional<std::string> DecodeRawUnicodeEscape(std::string_view line) {
  constexpr std::uint32_t kLastCodePoint = 0x10'FFFF;
  std::string out;
  for (std::size_t i = 0; i < line.size();) {
    const char next = line[i] == '\\' && i + 1 < line.size() ? line[i + 1] : '\0';
    if (next == 'u' || next == 'U') {
      const std::size_t digits = next == 'u' ? 4 : 8;
      const auto code = ParseHex(line.substr(i + 2), digits);
      if (!code || *code > kLastCodePoint) return std::nullopt;
      AppendUtf8(*code, out);
      i += 2 + digits;
      continue;
    }
    AppendUtf8(static_cast<unsigned char>(line[i++]), out);
    // A second backslash does not begin an escape.
    if (next == '\\') {
      out.push_back(next);
      ++i;
    }
  }
  return out;
}

std::optional<std::string> EncodeLatin1(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x80) {
      out.push_back(text[i]);
      continue;
    }
    // U+0080 to U+00FF are C2 80 to C3 BF.
    if ((byte != 0xC2 && byte != 0xC3) || i + 1 == text.size()) return std::nullopt;
    const auto tail = static_cast<unsigned char>(text[++i]);
    if ((tail & 0xC0U) != 0x80) return std::nullopt;
    out.push_back(static_cast<char>((byte & 0x03U) << 6 | (tail & 0x3FU)));
  }
  return out;
}

}  // namespace fastpersist::layout
