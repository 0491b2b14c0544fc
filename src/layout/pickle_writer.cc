// SPDX-License-Identifier: Apache-2.0
#include "layout/pickle_writer.h"

#include <utility>

namespace fastpersist::layout {
namespace {

void PutLittleEndian(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

// One code point below 256: one ASCII byte, or two bytes with the lead C2 or C3.
bool IsOneLatin1Character(std::string_view text) {
  if (text.size() == 1) return static_cast<unsigned char>(text[0]) < 0x80;
  return text.size() == 2 && (text[0] == '\xC2' || text[0] == '\xC3');
}

}  // namespace

PickleWriter::PickleWriter() {
  Op('\x80');
  Op('\x02');
}

void PickleWriter::EmptyDict() {
  Op('}');
  Put();
}

void PickleWriter::EmptyTuple() { Op(')'); }
void PickleWriter::Mark() { Op('('); }
void PickleWriter::SetItem() { Op('s'); }
void PickleWriter::SetItems() { Op('u'); }
void PickleWriter::Bool(bool value) { Op(value ? '\x88' : '\x89'); }

void PickleWriter::Int(std::int64_t value) {
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
    // LONG1: the shortest two's complement.
    int bytes = 8;
    while (bytes > 1) {
      const int shift = 64 - 8 * (bytes - 1);
      if (static_cast<std::int64_t>(bits << shift) >> shift != value) break;
      --bytes;
    }
    Op('\x8a');
    Op(static_cast<char>(bytes));
    PutLittleEndian(out_, bits, bytes);
  }
}

void PickleWriter::Unicode(std::string_view text) {
  Op('X');
  PutLittleEndian(out_, text.size(), 4);
  out_ += text;
  Put();
}

void PickleWriter::Text(std::string_view text) {
  if (IsOneLatin1Character(text)) {
    Constant(text);
  } else {
    Unicode(text);
  }
}

void PickleWriter::Constant(std::string_view text) {
  if (const auto known = constants_.find(text); known != constants_.end()) {
    Get(known->second);
    return;
  }
  constants_.emplace(text, next_memo_);
  Unicode(text);
}

void PickleWriter::Global(std::string_view module, std::string_view name) {
  const auto [known, is_new] =
      globals_.try_emplace({std::string(module), std::string(name)}, next_memo_);
  if (!is_new) {
    Get(known->second);
    return;
  }
  Op('c');
  out_ += module;
  Op('\n');
  out_ += name;
  Op('\n');
  Put();
}

void PickleWriter::Tuple(std::size_t size) {
  constexpr char kShort[] = {'\x85', '\x86', '\x87'};
  Op(size <= 3 ? kShort[size - 1] : 't');
  Put();
}

void PickleWriter::Reduce() {
  Op('R');
  Put();
}

void PickleWriter::PersistentId() { Op('Q'); }

void PickleWriter::Put() {
  const std::uint32_t number = next_memo_++;
  Op(number < 256 ? 'q' : 'r');
  PutLittleEndian(out_, number, number < 256 ? 1 : 4);
}

void PickleWriter::Get(std::uint32_t number) {
  Op(number < 256 ? 'h' : 'j');
  PutLittleEndian(out_, number, number < 256 ? 1 : 4);
}

std::string PickleWriter::Finish() && {
  Op('.');
  return std::move(out_);
}

}  // namespace fastpersist::layout
