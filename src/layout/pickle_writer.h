// SPDX-License-Identifier: Apache-2.0
// A minimal pickle writer: just enough of protocol 2 for a dict of tensors, opcode for opcode what
// CPython's pickler makes of the same dict, so that C++ callers get the file that torch.save
// writes. Used by one thread.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "layout/pickle_opcodes.h"

namespace fastpersist::layout {

class PickleWriter {
 public:
  void EmptyDict();
  void EmptyTuple() { out_.EmptyTuple(); }
  void Mark() { out_.Mark(); }
  void SetItem() { out_.SetItem(); }    ///< One key and value on the stack.
  void SetItems() { out_.SetItems(); }  ///< Keys and values above the last mark.
  void Bool(bool value) { out_.Bool(value); }
  void Int(std::int64_t value) { out_.Int(value); }
  /// A new string object.
  void Text(std::string_view text);
  /// A string of which the program has one object, however often it is written.
  void Constant(std::string_view text);
  void Global(std::string_view module, std::string_view name);
  /// A non-empty tuple of the items above the last mark (sizes above 3), or of the top 1 to 3.
  void Tuple(std::size_t size);
  void Reduce();  ///< Calls the function below the argument tuple; the result is remembered.
  void PersistentId() { out_.PersistentId(); }

  /// Ends the pickle and returns it.
  [[nodiscard]] std::string Finish() && { return std::move(out_).Finish(); }

 private:
  PickleOpcodes out_;
  std::map<std::string, std::uint32_t, std::less<>> constants_;
  std::map<std::pair<std::string, std::string>, std::uint32_t> globals_;
};

}  // namespace fastpersist::layout
