// SPDX-License-Identifier: Apache-2.0
#include "layout/pickle_writer.h"

namespace fastpersist::layout {
namespace {

// One code point below 256: one ASCII byte, or two bytes with the lead C2 or C3.
bool IsOneLatin1Character(std::string_view text) {
  if (text.size() == 1) return static_cast<unsigned char>(text[0]) < 0x80;
  return text.size() == 2 && (text[0] == '\xC2' || text[0] == '\xC3');
}

}  // namespace

void PickleWriter::EmptyDict() {
  out_.EmptyDict();
  out_.Put();
}

void PickleWriter::Text(std::string_view text) {
  if (IsOneLatin1Character(text)) {
    Constant(text);
  } else {
    out_.Unicode(text);
    out_.Put();
  }
}

void PickleWriter::Constant(std::string_view text) {
  if (const auto known = constants_.find(text); known != constants_.end()) {
    out_.Get(known->second);
    return;
  }
  out_.Unicode(text);
  constants_.emplace(text, out_.Put());
}

void PickleWriter::Global(std::string_view module, std::string_view name) {
  std::pair key{std::string(module), std::string(name)};
  if (const auto known = globals_.find(key); known != globals_.end()) {
    out_.Get(known->second);
    return;
  }
  out_.Global(module, name);
  globals_.emplace(std::move(key), out_.Put());
}

void PickleWriter::Tuple(std::size_t size) {
  out_.Tuple(size);
  out_.Put();
}

void PickleWriter::Reduce() {
  out_.Reduce();
  out_.Put();
}

}  // namespace fastpersist::layout
