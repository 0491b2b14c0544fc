// SPDX-License-Identifier: Apache-2.0
#include "layout/pickle_use.h"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "layout/pickle_machine.h"

namespace fastpersist::layout {
namespace {

// Little-endian, of as many bytes as there are.
std::uint64_t Unsigned(std::string_view bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) {
    value = value << 8 | static_cast<unsigned char>(bytes[i]);
  }
  return value;
}

// How many bytes the argument at the front of rest takes; more than there are when it is cut off.
std::size_t LengthOf(PickleArgument argument, std::string_view rest) {
  constexpr std::size_t kCut = SIZE_MAX;
  const auto counted = [&](std::size_t width) {
    if (rest.size() < width) return kCut;
    const std::uint64_t length = Unsigned(rest.substr(0, width));
    return length > rest.size() ? kCut : width + static_cast<std::size_t>(length);
  };
  const auto line = [&](std::size_t from) {
    const std::size_t end = rest.find('\n', from);
    return end == std::string_view::npos ? kCut : end + 1;
  };
  switch (argument) {
    case PickleArgument::kNone:
      return 0;
    case PickleArgument::kOne:
      return 1;
    case PickleArgument::kTwo:
      return 2;
    case PickleArgument::kFour:
      return 4;
    case PickleArgument::kEight:
      return 8;
    case PickleArgument::kCountedByOne:
      return counted(1);
    case PickleArgument::kCountedByFour:
      return counted(4);
    case PickleArgument::kCountedByEight:
      return counted(8);
    case PickleArgument::kLine:
      return line(0);
    case PickleArgument::kTwoLines: {
      const std::size_t first = line(0);
      return first == kCut ? kCut : line(first);
    }
  }
  return kCut;
}

}  // namespace

PickleUse FindUse(std::string_view pickle, std::span<const PickleOpcode, 256> table) {
  constexpr unsigned char kDup = '2';
  PickleUse use;
  const auto note = [&](std::uint64_t number) {
    // More values than bytes cannot be in the memo; no pickler numbers like that.
    if (number >= pickle.size()) {
      use.duplicates = true;
      return;
    }
    const auto index = static_cast<std::size_t>(number);
    if (index >= use.numbers.size())
      use.numbers.resize(std::max(index + 1, 2 * use.numbers.size()));
    use.numbers[index] = true;
  };
  for (std::string_view rest = pickle; !rest.empty();) {
    const PickleOpcode& opcode = table[static_cast<unsigned char>(rest[0])];
    if (opcode.run == nullptr) break;
    rest.remove_prefix(1);
    const std::size_t length = LengthOf(opcode.argument, rest);
    if (length > rest.size()) break;
    const std::string_view argument = rest.substr(0, length);
    rest.remove_prefix(length);
    if (opcode.code == kDup) use.duplicates = true;
    if (opcode.code == 'h' || opcode.code == 'j') note(Unsigned(argument));
    if (opcode.code == 'g') {
      std::uint64_t number = 0;
      const auto parsed = std::from_chars(argument.begin(), argument.end() - 1, number);
      if (parsed.ec != std::errc{}) break;
      note(number);
    }
  }
  return use;
}

}  // namespace fastpersist::layout
