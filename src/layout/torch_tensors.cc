// SPDX-License-Identifier: Apache-2.0
#include "layout/torch_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "layout/file_dtypes.h"
#include "layout/short_text.h"
#include "layout/state_leaves.h"

namespace fastpersist::layout {
namespace {

using Kind = PickleNode::Kind;

constexpr std::size_t kNameLimit = 200;      // in messages
constexpr std::size_t kValueLimit = 80;      // of StoredValue::text
constexpr std::size_t kCallableLimit = 240;  // likewise, of opaque values
constexpr std::size_t kDeviceLimit = 64;
// Of the bytes that shapes and strides may take, for each byte of the pickle: a pickle that names
// one tensor of very many dimensions very often would need far more memory than its size.
constexpr std::size_t kShapePerPickleByte = 64;
constexpr std::size_t kShapesAtLeast = std::size_t{1} << 20U;

// A persistent id of the pickle and what the archive has for it.
struct Storage {
  const FileDtype* dtype = nullptr;   // null when its class is not known
  std::uint32_t index = kNoStorage;   // into Contents::storages
  std::optional<std::uint64_t> size;  // in bytes; nullopt when neither record nor class tells
  std::string problem;                // the end of a sentence; empty when all is well
};

Storage Resolve(const PickleStorage& stored, const Contents& contents,
                const std::map<std::string, std::uint32_t, std::less<>>& by_name) {
  const std::string_view type = stored.type;
  const std::size_t space = type.find_last_of(" .");
  Storage storage{
      .dtype = FindTorchStorage(space == std::string_view::npos ? type : type.substr(space + 1))};
  const std::string name = "data/" + stored.key;
  const std::string shown = Shortened(name, kNameLimit);
  std::uint64_t claimed = 0;
  if (stored.elements < 0 ||
      (storage.dtype != nullptr &&
       __builtin_mul_overflow(static_cast<std::uint64_t>(stored.elements),
                              std::uint64_t{storage.dtype->item_size}, &claimed))) {
    storage.problem = fmt::format("is in storage {}, which should have an impossible {} elements",
                                  shown, stored.elements);
    return storage;
  }
  const auto found = by_name.find(name);
  if (found == by_name.end()) {
    if (storage.dtype != nullptr) storage.size = claimed;
    if (stored.location != "meta") {
      storage.problem = fmt::format("is in storage {}, and the archive has no such record", shown);
    }
    return storage;
  }
  storage.index = found->second;
  storage.size = contents.storages[found->second].size;
  if (storage.dtype != nullptr && *storage.size != claimed) {
    storage.problem = fmt::format(
        "is in storage {}, whose record has {} bytes where the pickle says {} elements of {} "
        "bytes",
        shown, *storage.size, stored.elements, storage.dtype->item_size);
  }
  return storage;
}

// Bytes from the begin of the storage to the end of the view; nullopt when that overflows.
// Precondition: no size is 0, and sizes and strides are not negative.
std::optional<std::uint64_t> EndOfView(const PickleTensor& tensor, std::uint64_t item_size) {
  auto last = static_cast<std::uint64_t>(tensor.offset);
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    std::uint64_t span = 0;
    if (__builtin_mul_overflow(static_cast<std::uint64_t>(tensor.shape[i] - 1),
                               static_cast<std::uint64_t>(tensor.strides[i]), &span) ||
        __builtin_add_overflow(last, span, &last)) {
      return std::nullopt;
    }
  }
  std::uint64_t end = 0;
  if (__builtin_add_overflow(last, std::uint64_t{1}, &end) ||
      __builtin_mul_overflow(end, item_size, &end)) {
    return std::nullopt;
  }
  return end;
}

bool IsNegative(std::int64_t value) { return value < 0; }

class StateReader {
 public:
  StateReader(Contents& contents, const std::string& file)
      : contents_(contents),
        tree_(contents.tree),
        file_(file),
        shape_budget_(kShapePerPickleByte * contents.pickle.size() + kShapesAtLeast) {}

  Result<void> Read() {
    ResolveStorages();
    for (StateLeaf& leaf : StateLeaves(tree_, contents_.pickle.size())) {
      if (tree_.at(leaf.node).kind == Kind::kTensor) {
        if (auto added = AddTensor(leaf); !added) return added;
      } else {
        AddValue(leaf);
      }
    }
    // Storages that no tensor has: in opaque objects, or by themselves.
    for (std::size_t i = 0; i < storages_.size(); ++i) {
      if (storages_[i].problem.empty()) continue;
      const std::string name = Shortened("data/" + tree_.storages[i].key, kNameLimit);
      return Corrupt(name, "something in the state " + storages_[i].problem);
    }
    return {};
  }

 private:
  [[nodiscard]] std::unexpected<Error> Corrupt(std::string entry, std::string detail) const {
    return std::unexpected(Error{.code = ErrorCode::kCorrupt,
                                 .operation = "read",
                                 .path = file_,
                                 .entry = std::move(entry),
                                 .detail = std::move(detail)});
  }
  [[nodiscard]] std::unexpected<Error> CorruptTensor(const std::string& name,
                                                     std::string_view problem) const {
    std::string shown = Shortened(name, kNameLimit);
    std::string detail = fmt::format("tensor '{}' {}", shown, problem);
    return Corrupt(std::move(shown), std::move(detail));
  }

  void ResolveStorages() {
    std::map<std::string, std::uint32_t, std::less<>> by_name;
    for (std::uint32_t i = 0; i < contents_.storages.size(); ++i) {
      by_name.emplace(contents_.storages[i].name, i);
    }
    storages_.reserve(tree_.storages.size());
    for (const PickleStorage& stored : tree_.storages) {
      storages_.push_back(Resolve(stored, contents_, by_name));
    }
  }

  // The PickleTree's index of the tensor's storage.
  [[nodiscard]] std::optional<std::uint32_t> StorageOf(const PickleTensor& tensor) const {
    if (tensor.storage >= tree_.nodes.size()) return std::nullopt;
    const PickleNode& node = tree_.at(tensor.storage);
    if (node.kind != Kind::kStorage || node.detail >= storages_.size()) return std::nullopt;
    return node.detail;
  }

  [[nodiscard]] bool HasBit(const PickleTensor& tensor, std::string_view bit) const {
    if (tensor.metadata >= tree_.nodes.size()) return false;
    const auto& items = tree_.at(tensor.metadata).items;
    bool set = false;  // of equal keys the last one counts
    for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
      const PickleNode& key = tree_.at(items[i]);
      if (key.kind == Kind::kText && key.text == bit) set = tree_.at(items[i + 1]).integer != 0;
    }
    return set;
  }

  Result<void> AddTensor(StateLeaf& leaf) {
    const PickleTensor& stored = tree_.tensors[tree_.at(leaf.node).detail];
    const auto storage_id = StorageOf(stored);
    if (!storage_id) return CorruptTensor(leaf.name, "has no storage");
    const Storage& storage = storages_[*storage_id];
    if (!storage.problem.empty()) return CorruptTensor(leaf.name, storage.problem);
    if (!TakeFromBudget(stored)) {
      return CorruptTensor(leaf.name,
                           "and others share shapes of more dimensions than a state of "
                           "this size can have");
    }
    const FileDtype* dtype = stored.dtype.empty() ? storage.dtype : FindTorchDtype(stored.dtype);
    StoredTensor tensor{.name = std::move(leaf.name),
                        .dtype = DtypeName(stored, *storage_id, dtype),
                        .item_size = dtype == nullptr ? 0 : dtype->item_size,
                        .shape = stored.shape,
                        .strides = stored.strides,
                        .storage = storage.index,
                        .device = Shortened(tree_.storages[*storage_id].location, kDeviceLimit),
                        .conjugate = HasBit(stored, "conj"),
                        .negative = HasBit(stored, "neg")};
    if (const std::string problem = Place(stored, storage, tensor); !problem.empty()) {
      return CorruptTensor(tensor.name, problem);
    }
    contents_.tensors.push_back(std::move(tensor));
    return {};
  }

  // Shared tensors are copied for each of their names.
  bool TakeFromBudget(const PickleTensor& tensor) {
    const std::size_t bytes = (tensor.shape.size() + tensor.strides.size()) * sizeof(std::int64_t);
    if (bytes > shape_budget_) return false;
    shape_budget_ -= bytes;
    return true;
  }

  [[nodiscard]] std::string DtypeName(const PickleTensor& tensor, std::uint32_t storage,
                                      const FileDtype* dtype) const {
    if (dtype != nullptr) return std::string(dtype->torch);
    return Shortened(tensor.dtype.empty() ? tree_.storages[storage].type : tensor.dtype,
                     kDeviceLimit);
  }

  // Fills in offset and bytes. Returns the end of a sentence if the view does not fit its storage.
  static std::string Place(const PickleTensor& stored, const Storage& storage,
                           StoredTensor& tensor) {
    if (stored.shape.size() != stored.strides.size()) {
      return fmt::format("has {} sizes and {} strides", stored.shape.size(), stored.strides.size());
    }
    if (std::ranges::any_of(stored.shape, IsNegative) ||
        std::ranges::any_of(stored.strides, IsNegative) || stored.offset < 0) {
      return "has a negative size, stride or offset";
    }
    const std::uint64_t item_size = tensor.item_size;
    if (item_size == 0) return {};
    const auto offset = static_cast<std::uint64_t>(stored.offset);
    if (std::ranges::find(stored.shape, 0) != stored.shape.end()) {
      // Nothing is read, so torch lets the offset lie anywhere.
      if (!__builtin_mul_overflow(offset, item_size, &tensor.offset) &&
          tensor.offset <= storage.size.value_or(0)) {
        return {};
      }
      tensor.offset = 0;
      return {};
    }
    const auto end = EndOfView(stored, item_size);
    std::uint64_t bytes = item_size;
    bool fits = true;
    for (const std::int64_t size : stored.shape) {
      fits = fits && !__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes);
    }
    if (!end || !fits) return "has an impossibly large shape";
    if (storage.size && *end > *storage.size) {
      return fmt::format("ends at byte {} of its storage, which has {} bytes", *end, *storage.size);
    }
    tensor.offset = offset * item_size;
    tensor.bytes = bytes;
    return {};
  }

  void AddValue(StateLeaf& leaf) {
    const Kind kind = tree_.at(leaf.node).kind;
    const bool opaque = kind == Kind::kOpaque || kind == Kind::kGlobal;
    contents_.values.push_back(
        {.name = std::move(leaf.name),
         .text = ShortText(tree_, leaf.node, opaque ? kCallableLimit : kValueLimit),
         .opaque = opaque});
  }

  Contents& contents_;
  const PickleTree& tree_;
  const std::string& file_;
  std::size_t shape_budget_;
  std::vector<Storage> storages_;  // one for each of tree_.storages
};

}  // namespace

Result<void> ReadStateTensors(Contents& contents, const std::string& file) {
  return StateReader(contents, file).Read();
}

}  // namespace fastpersist::layout
