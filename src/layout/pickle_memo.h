// SPDX-License-Identifier: Apache-2.0
// The memo of a pickle: which number stands for which node. Picklers number from 0 on, so a vector
// does; a pickle that claims large numbers gets a tree, whose memory follows the number of entries
// and not the numbers (and which, unlike a hash table, nobody can make slow). Used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "layout/pickle_reader.h"

namespace fastpersist::layout {

class PickleMemo {
 public:
  void Put(std::uint64_t number, NodeId node) {
    if (number >= dense_.size()) {
      if (number > 2 * count_ + kSlack) {
        if (sparse_.insert_or_assign(number, node).second) ++count_;
        return;
      }
      if (number == dense_.size()) {
        dense_.push_back(kNoNode);
      } else {
        dense_.resize(static_cast<std::size_t>(number) + 1, kNoNode);
      }
    }
    NodeId& entry = dense_[static_cast<std::size_t>(number)];
    if (entry == kNoNode && (sparse_.empty() || sparse_.erase(number) == 0)) ++count_;
    entry = node;
  }

  /// kNoNode when nothing was put there.
  [[nodiscard]] NodeId Get(std::uint64_t number) const {
    if (number < dense_.size() && dense_[static_cast<std::size_t>(number)] != kNoNode) {
      return dense_[static_cast<std::size_t>(number)];
    }
    const auto found = sparse_.find(number);
    return found == sparse_.end() ? kNoNode : found->second;
  }

  /// Number of entries, which is what MEMOIZE takes for the next number.
  [[nodiscard]] std::uint64_t count() const { return count_; }

 private:
  static constexpr std::uint64_t kSlack = 1024;

  std::vector<NodeId> dense_;
  std::map<std::uint64_t, NodeId> sparse_;
  std::uint64_t count_ = 0;
};

}  // namespace fastpersist::layout
