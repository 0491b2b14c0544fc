// SPDX-License-Identifier: Apache-2.0
// A minimal pickle writer: just enough of protocol 2 for a dict of tensors, opcode for opcode what
// CPython's pickler makes of the same dict, so that C++ callers get the file that torch.save writes.
//
// Source: the opcode documentation in CPython's Lib/pickletools.py.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace fastpersist::layout {

class PickleWriter {
 public:
  PickleWriter();

  void EmptyDict();
  void EmptyTuple();
  void Mark();
  void SetItem();   ///< One key and value on the stack.
  void SetItems();  ///< Keys and values above the last mark.
  void Bool(bool value);
  void Int(std::int64_t value);
  /// A new string object; CPython has one object for each one-character Latin-1 string.
  void Text(std::string_view text);
  /// A string constant of the program: one object, however often it is written.
  void Constant(std::string_view text);
  void Global(std::string_view module, std::string_view name);
  /// A non-empty tuple of the items above the last mark (sizes above 3), or of the top 1 to 3.
  void Tuple(std::size_t size);
  void Reduce();  ///< Calls the function below the argument tuple; the result is remembered.
  void PersistentId();

  /// Ends the pickle and returns it.
  [[nodiscard]] std::string Finish() &&;

 private:
  void Op(char opcode) { out_.push_back(opcode); }
  void Put();  // remembers the top of the stack under the next number
  void Get(std::uint32_t number);
  void Unicode(std::string_view text);

  std::string out_;
  std::uint32_t next_memo_ = 0;
  std::map<std::string, std::uint32_t, std::less<>> constants_;
  std::map<std::pair<std::string, std::string>, std::uint32_t> globals_;
};

}  // namespace fastpersist::layout
