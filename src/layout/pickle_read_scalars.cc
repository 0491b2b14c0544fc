// SPDX-License-Identifier: Apache-2.0
// The opcodes that push None, a number, text or bytes. In the names: k for binary forms with
// lengths of so many bytes, "Line" for the text forms of protocol 0.
#include <fmt/format.h>

#include <bit>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <system_error>

#include "layout/pickle_machine.h"
#include "layout/pickle_text.h"

namespace fastpersist::layout {
namespace {

using Kind = PickleNode::Kind;
using Machine = PickleMachine;
using Argument = PickleArgument;

// Longer integers are not converted to decimal, which takes time in the square of their length. No
// checkpoint has them.
constexpr std::size_t kMaxIntegerBytes = 1000;
constexpr std::size_t kMaxIntegerDigits = 2410;

bool PushText(Machine& machine, Kind kind, std::string_view text) {
  return machine.Push(machine.builder.AddText(kind, std::string(text)));
}

bool None(Machine& machine) { return machine.Push(machine.builder.None()); }
bool True(Machine& machine) { return machine.Push(machine.builder.Bool(true)); }
bool False(Machine& machine) { return machine.Push(machine.builder.Bool(false)); }

template <unsigned kWidth>
bool Unsigned(Machine& machine) {
  std::uint64_t value = 0;
  if (!machine.TakeUnsigned(kWidth, value)) return false;
  return machine.Push(machine.builder.Int(static_cast<std::int64_t>(value)));
}

bool SignedFour(Machine& machine) {
  std::uint64_t value = 0;
  if (!machine.TakeUnsigned(4, value)) return false;
  return machine.Push(machine.builder.Int(static_cast<std::int32_t>(value)));
}

// Little-endian two's complement.
bool PushLong(Machine& machine, std::string_view bytes) {
  bytes = ShortestTwosComplement(bytes);
  if (bytes.size() > kMaxIntegerBytes) {
    return machine.Push(machine.builder.Opaque(fmt::format("int of {} bytes", bytes.size()), {}));
  }
  if (bytes.size() > 8) return PushText(machine, Kind::kBigInt, DecimalOfTwosComplement(bytes));
  const bool negative = !bytes.empty() && (static_cast<unsigned char>(bytes.back()) & 0x80U) != 0;
  std::uint64_t value = negative ? UINT64_MAX : 0;
  for (std::size_t i = bytes.size(); i-- > 0;) {
    value = value << 8 | static_cast<unsigned char>(bytes[i]);
  }
  return machine.Push(machine.builder.Int(static_cast<std::int64_t>(value)));
}

bool ShortLong(Machine& machine) {
  std::string_view bytes;
  return machine.TakeCounted(1, bytes) && PushLong(machine, bytes);
}

// A length of four bytes with a sign, as Python 2 wrote them.
bool TakeSignedCounted(Machine& machine, std::string_view& bytes) {
  std::uint64_t length = 0;
  if (!machine.TakeUnsigned(4, length)) return false;
  if (length > INT32_MAX) return machine.Fail("its length is negative");
  return machine.Take(length, bytes);
}

bool Long(Machine& machine) {
  std::string_view bytes;
  return TakeSignedCounted(machine, bytes) && PushLong(machine, bytes);
}

bool PushDecimal(Machine& machine, std::string_view digits) {
  if (!IsDecimal(digits)) return machine.Fail("it is no decimal number");
  std::int64_t value = 0;
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (parsed.ec == std::errc{}) return machine.Push(machine.builder.Int(value));
  if (digits.size() <= kMaxIntegerDigits) return PushText(machine, Kind::kBigInt, digits);
  return machine.Push(machine.builder.Opaque(fmt::format("int of {} digits", digits.size()), {}));
}

bool IntLine(Machine& machine) {
  std::string_view line;
  if (!machine.TakeLine(line)) return false;
  if (line == "00" || line == "01") return machine.Push(machine.builder.Bool(line == "01"));
  return PushDecimal(machine, line);
}

bool LongLine(Machine& machine) {
  std::string_view line;
  if (!machine.TakeLine(line)) return false;
  if (line.ends_with('L')) line.remove_suffix(1);
  return PushDecimal(machine, line);
}

bool PushFloat(Machine& machine, double value) {
  const NodeId node = machine.builder.Add(Kind::kFloat);
  machine.builder.at(node).real = value;
  return machine.Push(node);
}

// Big-endian, as no other number in a pickle.
bool Float(Machine& machine) {
  std::string_view bytes;
  if (!machine.Take(8, bytes)) return false;
  std::uint64_t bits = 0;
  for (const char byte : bytes) bits = bits << 8 | static_cast<unsigned char>(byte);
  return PushFloat(machine, std::bit_cast<double>(bits));
}

bool FloatLine(Machine& machine) {
  std::string_view line;
  if (!machine.TakeLine(line)) return false;
  double value = 0;
  const auto parsed = std::from_chars(line.begin(), line.end(), value);
  if (parsed.ec != std::errc{} || parsed.ptr != line.end()) return machine.Fail("it is no number");
  return PushFloat(machine, value);
}

template <Kind kKind, unsigned kWidth>
bool Counted(Machine& machine) {
  std::string_view bytes;
  return machine.TakeCounted(kWidth, bytes) && PushText(machine, kKind, bytes);
}

bool BinString(Machine& machine) {
  std::string_view bytes;
  return TakeSignedCounted(machine, bytes) && PushText(machine, Kind::kBytes, bytes);
}

template <Kind kKind, std::optional<std::string> (*kDecode)(std::string_view)>
bool DecodedLine(Machine& machine) {
  std::string_view line;
  if (!machine.TakeLine(line)) return false;
  auto text = kDecode(line);
  if (!text) return machine.Fail("its quotes or escapes are not whole");
  return machine.Push(machine.builder.AddText(kKind, std::move(*text)));
}

constexpr PickleOpcode kOpcodes[] = {
    {'N', "NONE", None},
    {0x88, "NEWTRUE", True},
    {0x89, "NEWFALSE", False},
    {'K', "BININT1", Unsigned<1>, Argument::kOne},
    {'M', "BININT2", Unsigned<2>, Argument::kTwo},
    {'J', "BININT", SignedFour, Argument::kFour},
    {0x8A, "LONG1", ShortLong, Argument::kCountedByOne},
    {0x8B, "LONG4", Long, Argument::kCountedByFour},
    {'I', "INT", IntLine, Argument::kLine},
    {'L', "LONG", LongLine, Argument::kLine},
    {'G', "BINFLOAT", Float, Argument::kEight},
    {'F', "FLOAT", FloatLine, Argument::kLine},
    {0x8C, "SHORT_BINUNICODE", Counted<Kind::kText, 1>, Argument::kCountedByOne},
    {'X', "BINUNICODE", Counted<Kind::kText, 4>, Argument::kCountedByFour},
    {0x8D, "BINUNICODE8", Counted<Kind::kText, 8>, Argument::kCountedByEight},
    {'V', "UNICODE", DecodedLine<Kind::kText, DecodeRawUnicodeEscape>, Argument::kLine},
    {'C', "SHORT_BINBYTES", Counted<Kind::kBytes, 1>, Argument::kCountedByOne},
    {'B', "BINBYTES", Counted<Kind::kBytes, 4>, Argument::kCountedByFour},
    {0x8E, "BINBYTES8", Counted<Kind::kBytes, 8>, Argument::kCountedByEight},
    {0x96, "BYTEARRAY8", Counted<Kind::kByteArray, 8>, Argument::kCountedByEight},
    {'U', "SHORT_BINSTRING", Counted<Kind::kBytes, 1>, Argument::kCountedByOne},
    {'T', "BINSTRING", BinString, Argument::kCountedByFour},
    {'S', "STRING", DecodedLine<Kind::kBytes, UnquoteBytes>, Argument::kLine},
};

}  // namespace

std::span<const PickleOpcode> PickleScalarOpcodes() { return kOpcodes; }

}  // namespace fastpersist::layout
