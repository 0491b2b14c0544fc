// SPDX-License-Identifier: Apache-2.0
// A first look over a pickle that skips from opcode to opcode and finds which numbers of the memo
// are ever asked for. Picklers put nearly every value there and ask for few: what nobody asks for
// need not be kept once it was used. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace fastpersist::layout {

struct PickleOpcode;

struct PickleUse {
  std::vector<bool> numbers;  ///< True for those that are asked for.
  /// A value may have two references that the memo knows nothing of, or a number was too large to
  /// be noted.
  bool duplicates = false;

  [[nodiscard]] bool IsUsed(std::uint64_t number) const {
    return number < numbers.size() && numbers[static_cast<std::size_t>(number)];
  }
};

/// table has the opcode of each byte. Stops where the pickle is damaged, as its reader does.
[[nodiscard]] PickleUse FindUse(std::string_view pickle, std::span<const PickleOpcode, 256> table);

}  // namespace fastpersist::layout
