// SPDX-License-Identifier: Apache-2.0
// The opcodes of pickle protocol 2 that states of tensors need, and the numbering of the memo. What
// gets which opcode is the caller's business (pickle_writer.h for C++ states, the Python binding
// for Python objects).
//
// Source: the opcode documentation in CPython's Lib/pickletools.py. Used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fastpersist::layout {

class PickleOpcodes {
 public:
  /// CPython's pickler writes list and dict items in batches of this many.
  static constexpr std::size_t kBatch = 1000;

  PickleOpcodes();

  /// Gives the top of the stack the next number of the memo, and returns the number.
  std::uint32_t Put();
  /// Pushes what has that number.
  void Get(std::uint32_t number);

  void None() { Op('N'); }
  void Bool(bool value) { Op(value ? '\x88' : '\x89'); }
  void Int(std::int64_t value);
  void Float(double value);
  /// Precondition: text is UTF-8 and shorter than 4 GiB.
  void Unicode(std::string_view text);
  void Global(std::string_view module, std::string_view name);

  void EmptyDict() { Op('}'); }
  void EmptyList() { Op(']'); }
  void EmptyTuple() { Op(')'); }
  void Mark() { Op('('); }
  /// Of the top 1 to 3 items, or, above that, of those since the last mark.
  void Tuple(std::size_t size);
  void Append() { Op('a'); }
  void Appends() { Op('e'); }
  void SetItem() { Op('s'); }
  void SetItems() { Op('u'); }
  void Pop() { Op('0'); }
  void PopMark() { Op('1'); }
  void Reduce() { Op('R'); }
  void Build() { Op('b'); }
  void PersistentId() { Op('Q'); }

  /// Ends the pickle and returns it.
  [[nodiscard]] std::string Finish() &&;

 private:
  void Op(char opcode) { out_.push_back(opcode); }

  std::string out_;
  std::uint32_t next_memo_ = 0;
};

}  // namespace fastpersist::layout
