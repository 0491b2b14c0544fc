// SPDX-License-Identifier: Apache-2.0
#include "layout/pickle_opcodes.h"

#include <bit>
#include <utility>

namespace fastpersist::layout {
namespace {

void PutLittleEndian(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

// Bytes of the shortest two's complement.
int TwosComplementLength(std::int64_t value) {
  int bytes = 8;
  while (bytes > 1) {
    const int shift = 64 - 8 * (bytes - 1);
    const auto bits = static_cast<std::uint64_t>(value) << shift;
    if (static_cast<std::int64_t>(bits) >> shift != value) break;
    --bytes;
  }
  return bytes;
}

}  // namespace

PickleOpcodes::PickleOpcodes() {
  Op('\x80');
  Op('\x02');
}

std::uint32_t PickleOpcodes::Put() {
  const std::uint32_t number = next_memo_++;
  Op(number < 256 ? 'q' : 'r');
  PutLittleEndian(out_, number, number < 256 ? 1 : 4);
  return number;
}

void PickleOpcodes::Get(std::uint32_t number) {
  Op(number < 256 ? 'h' : 'j');
  PutLittleEndian(out_, number, number < 256 ? 1 : 4);
}

void PickleOpcodes::Int(std::int64_t value) {
  const auto bits = static_cast<std::uint64_t>(value);
  if (value >= 0 && value <= 0xFF) {
    Op('K');
    PutLittleEndian(out_, bits, 1);
  } else if (value >= 0 && value <= 0xFFFF) {
    Op('M');
    PutLittleEndian(out_, bits, 2);
  } else if (value >= INT32_MIN && value <= INT32_MAX) {
    Op('J');
    PutLittleEndian(out_, bits, 4);
  } else {
    const int bytes = TwosComplementLength(value);
    Op('\x8a');
    Op(static_cast<char>(bytes));
    PutLittleEndian(out_, bits, bytes);
  }
}

void PickleOpcodes::Float(double value) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  Op('G');
  for (int i = 7; i >= 0; --i) out_.push_back(static_cast<char>(bits >> (8 * i)));
}

void PickleOpcodes::Unicode(std::string_view text) {
  Op('X');
  PutLittleEndian(out_, text.size(), 4);
  out_ += text;
}

void PickleOpcodes::Global(std::string_view module, std::string_view name) {
  Op('c');
  out_ += module;
  Op('\n');
  out_ += name;
  Op('\n');
}

void PickleOpcodes::Tuple(std::size_t size) {
  constexpr char kShort[] = {'\x85', '\x86', '\x87'};
  Op(size <= 3 ? kShort[size - 1] : 't');
}

std::string PickleOpcodes::Finish() && {
  Op('.');
  return std::move(out_);
}

}  // namespace fastpersist::layout
