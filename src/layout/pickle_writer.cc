// SPDX-License-Identifier: Apache-2.0
#include "layout/pickle_writer.h"

namespace fastpersist::layout {

void PickleWriter::EmptyDict() {
  out_.EmptyDict();
  out_.Put();
}

void PickleWriter::Text(std::string_view text) {
  out_.Unicode(text);
  out_.Put();
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
