// SPDX-License-Identifier: Apache-2.0
#include "layout/state_leaves.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "layout/short_text.h"

namespace fastpersist::layout {
namespace {

using Kind = PickleNode::Kind;

constexpr std::size_t kMaxNamedDepth = 100;
constexpr std::size_t kMaxName = 4096;
constexpr std::size_t kKeyLimit = 80;  // of keys that are not text
constexpr std::size_t kNamesPerPickleByte = 64;
constexpr std::size_t kNamesAtLeast = std::size_t{1} << 20U;
constexpr int kMaxParametersInEachOther = 8;
constexpr std::string_view kEllipsis = "\u2026";

bool IsDict(Kind kind) { return kind == Kind::kDict || kind == Kind::kOrderedDict; }

bool IsContainer(Kind kind) {
  return IsDict(kind) || kind == Kind::kList || kind == Kind::kTuple || kind == Kind::kSet ||
         kind == Kind::kFrozenSet;
}

// What lies directly below a node.
struct Child {
  enum class By : std::uint8_t { kKey, kIndex, kWord, kNothing };
  NodeId node = kNoNode;
  By by = By::kNothing;
  NodeId key = kNoNode;   // kKey
  std::size_t index = 0;  // kIndex
  std::string_view word;  // kWord
};

class Walk {
 public:
  Walk(const PickleTree& tree, std::size_t pickle_size)
      : tree_(tree),
        entered_(tree.nodes.size(), false),
        budget_(kNamesPerPickleByte * pickle_size + kNamesAtLeast) {}

  std::vector<StateLeaf> Run() && {
    if (tree_.root >= tree_.nodes.size()) return {};
    Visit({.node = tree_.root}, {});
    while (!stack_.empty()) {
      Frame& frame = stack_.back();
      const std::size_t next = frame.next++;
      if (std::ranges::binary_search(frame.overridden, next)) continue;
      const auto child = ChildOf(frame.node, next);
      if (child) {
        path_.resize(frame.position.length);
        Visit(*child, frame.position);
      } else {
        stack_.pop_back();
      }
    }
    return std::move(leaves_);
  }

 private:
  // Where we are: how much of path_ is the name, or that the name is too long to be built.
  struct Position {
    std::size_t length = 0;
    bool named = false;  // some key led here; false at the root
    bool hidden = false;
  };
  struct Frame {
    NodeId node;
    std::size_t next;
    Position position;
    std::vector<std::size_t> overridden;  // dicts: children whose key comes again, ascending
  };

  [[nodiscard]] bool Exists(NodeId id) const { return id < tree_.nodes.size(); }

  // The tensor, or whatever else, that stands for a node: parameters stand for their data.
  [[nodiscard]] NodeId DataOf(NodeId id) const {
    for (int i = 0; i < kMaxParametersInEachOther; ++i) {
      const PickleNode& node = tree_.at(id);
      if (node.kind != Kind::kParameter || node.items.empty() || !Exists(node.items[0])) break;
      id = node.items[0];
    }
    return id;
  }

  [[nodiscard]] std::optional<Child> ChildOf(NodeId id, std::size_t i) const {
    const PickleNode& node = tree_.at(id);
    std::size_t items = 0;
    if (IsDict(node.kind)) {
      items = node.items.size() / 2;
      if (i < items) {
        return Child{
            .node = node.items[2 * i + 1], .by = Child::By::kKey, .key = node.items[2 * i]};
      }
      return std::nullopt;
    }
    if (node.kind == Kind::kParameter) {
      items = std::min<std::size_t>(node.items.size(), 1);
      if (i < items) return Child{.node = node.items[0]};
    } else if (IsContainer(node.kind) || node.kind == Kind::kOpaque) {
      items = node.items.size();
      if (i < items) return Child{.node = node.items[i], .by = Child::By::kIndex, .index = i};
    }
    if (i == items && Exists(node.attributes)) {
      const bool dict = IsDict(tree_.at(node.attributes).kind);
      return Child{.node = node.attributes,
                   .by = dict ? Child::By::kNothing : Child::By::kWord,
                   .word = "attributes"};
    }
    return std::nullopt;
  }

  // Lists what the child is, and puts it on the stack if there may be something below it.
  void Visit(const Child& child, Position position) {
    if (!Exists(child.node)) return;
    const PickleNode& node = tree_.at(child.node);
    if (IsContainer(node.kind) && entered_[child.node]) return;
    Extend(child, position);
    if (IsContainer(node.kind)) {
      if (!node.items.empty()) {
        Enter(child.node, position);
      } else if (position.named && child.by != Child::By::kNothing) {
        Emit(child.node, position);
      }
    } else if (node.kind == Kind::kParameter) {
      const NodeId data = DataOf(child.node);
      if (tree_.at(data).kind == Kind::kTensor) Emit(data, position);
      EnterParameter(child.node, position);
    } else {
      Emit(child.node, position);
      if (node.kind == Kind::kOpaque || Exists(node.attributes)) Enter(child.node, position);
    }
  }

  void Enter(NodeId id, const Position& position) {
    if (entered_[id]) return;
    entered_[id] = true;
    stack_.push_back(
        {.node = id, .next = 0, .position = position, .overridden = Overridden(tree_.at(id))});
  }

  // Of equal keys the last one counts, as in Python.
  std::vector<std::size_t> Overridden(const PickleNode& node) {
    std::vector<std::size_t> overridden;
    if (!IsDict(node.kind)) return overridden;
    std::unordered_set<NodeId> seen;
    for (std::size_t i = node.items.size() / 2; i-- > 0;) {
      if (!seen.insert(FirstEqual(node.items[2 * i])).second) overridden.push_back(i);
    }
    std::ranges::reverse(overridden);
    return overridden;
  }

  // Some node that is the same for all keys equal to this one, as far as texts and integers go.
  NodeId FirstEqual(NodeId key) {
    if (!Exists(key)) return key;
    const PickleNode& node = tree_.at(key);
    if (node.kind == Kind::kText) {
      // The same long text may be the key of many dicts: it is compared once.
      const auto [known, is_new] = first_equal_.try_emplace(key, key);
      if (is_new) known->second = texts_.try_emplace(node.text, key).first->second;
      return known->second;
    }
    if (node.kind != Kind::kInt && node.kind != Kind::kBool) return key;
    return integers_.try_emplace(node.integer, key).first->second;
  }

  // A tensor in a parameter was listed with it, once for each name of the parameter.
  void EnterParameter(NodeId id, const Position& position) {
    if (entered_[id]) return;
    const NodeId data = DataOf(id);
    const bool listed = tree_.at(data).kind == Kind::kTensor;
    entered_[id] = true;
    stack_.push_back(
        {.node = id, .next = listed ? 1U : 0U, .position = position, .overridden = {}});
    if (listed && Exists(tree_.at(data).attributes)) Enter(data, position);
  }

  void Extend(const Child& child, Position& position) {
    if (child.by == Child::By::kNothing || position.hidden) return;
    if (budget_ < kMaxName) position.hidden = true;
    if (position.hidden) return;
    std::string key;
    if (child.by == Child::By::kIndex) {
      key = fmt::format("{}", child.index);
    } else if (child.by == Child::By::kWord) {
      key = child.word;
    } else {
      key = KeyText(child.key);
    }
    if (stack_.size() > kMaxNamedDepth || position.length + 1 + key.size() > kMaxName ||
        key.size() > budget_) {
      position.hidden = true;
      return;
    }
    budget_ -= key.size();
    if (position.named) path_ += '.';
    path_ += key;
    position.named = true;
    position.length = path_.size();
  }

  [[nodiscard]] std::string KeyText(NodeId id) const {
    const bool text = Exists(id) && tree_.at(id).kind == Kind::kText;
    // One byte more than a name may have says that it was too long.
    return text ? Shortened(tree_.at(id).text, kMaxName + 1) : ShortText(tree_, id, kKeyLimit);
  }

  void Emit(NodeId id, const Position& position) {
    std::string name;
    if (!position.hidden && position.length <= budget_) {
      budget_ -= position.length;
      name.assign(path_, 0, position.length);
      if (!position.named) name = tree_.at(id).kind == Kind::kTensor ? "tensor" : "value";
    } else {
      name = fmt::format("{}{}", kEllipsis, ++hidden_);
    }
    leaves_.push_back({.name = Unique(std::move(name)), .node = id});
  }

  // The numbers of a name only grow, so that many equal names take no quadratic time.
  std::string Unique(std::string name) {
    const auto [at, is_new] = last_number_.try_emplace(name, 1);
    if (is_new) return name;
    std::string numbered;
    std::uint32_t number = at->second;
    do {
      numbered = fmt::format("{}#{}", name, ++number);
    } while (last_number_.contains(numbered));
    at->second = number;
    last_number_.emplace(numbered, 1);
    return numbered;
  }

  const PickleTree& tree_;
  std::vector<bool> entered_;
  std::size_t budget_;
  std::size_t hidden_ = 0;
  std::string path_;
  std::vector<Frame> stack_;
  std::vector<StateLeaf> leaves_;
  // Maps, not hash tables: a file cannot choose keys that make them slow.
  std::map<std::string, std::uint32_t> last_number_;
  std::unordered_map<NodeId, NodeId> first_equal_;  // of key nodes that are texts
  std::map<std::string_view, NodeId> texts_;        // the first key node of that text
  std::map<std::int64_t, NodeId> integers_;
};

}  // namespace

std::vector<StateLeaf> StateLeaves(const PickleTree& tree, std::size_t pickle_size) {
  return Walk(tree, pickle_size).Run();
}

}  // namespace fastpersist::layout
