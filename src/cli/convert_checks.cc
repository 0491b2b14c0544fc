// SPDX-License-Identifier: Apache-2.0
#include "cli/convert_checks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string_view>
#include <utility>

#include "layout/file_dtypes.h"
#include "layout/gather.h"

namespace fastpersist::cli {
namespace {

using layout::Contents;
using layout::StoredTensor;

std::uint64_t SpanOf(const StoredTensor& tensor) {
  return layout::SpanBytes(tensor.shape, tensor.strides, tensor.item_size);
}

// Whether a type has whole bytes for elements, and a name in both formats.
bool TypeIsInBoth(const StoredTensor& tensor) {
  const auto* type = layout::FindTorchDtype(tensor.dtype);
  return type != nullptr && type->item_size > 0 && type->bits == 8 * type->item_size &&
         !type->safetensors.empty();
}

class Obstacles {
 public:
  explicit Obstacles(const Contents& contents) : contents_(contents) {}

  using Concerns = std::function<bool(const StoredTensor&)>;
  // A clause that names all tensors that it concerns, with their types if these are the matter.
  void Tensors(std::string_view clause, const Concerns& concerns, bool with_type = false) {
    std::vector<std::string> names;
    for (const StoredTensor& tensor : contents_.tensors) {
      if (!concerns(tensor)) continue;
      names.push_back(with_type ? fmt::format("'{}' ({})", tensor.name, tensor.dtype)
                                : fmt::format("'{}'", tensor.name));
    }
    Add(clause, names);
  }

  void Values() {
    std::vector<std::string> names;
    for (const auto& name : FindNonTensors(contents_)) names.push_back(fmt::format("'{}'", name));
    Add("these entries are no tensors (--tensors-only leaves them out)", names);
  }

  void Shared() {
    std::vector<std::string> names;
    for (const SharedMemory& shared : FindSharedMemory(contents_)) {
      names.push_back(fmt::format("'{}' with '{}'", shared.tensor->name, shared.with->name));
    }
    Add("these tensors share memory (--duplicate-shared writes each of them out)", names);
  }

  void Whole(std::string clause) { found_.push_back(std::move(clause)); }

  [[nodiscard]] std::vector<std::string> Take() && { return std::move(found_); }

 private:
  void Add(std::string_view clause, const std::vector<std::string>& names) {
    if (!names.empty()) found_.push_back(fmt::format("{}: {}", clause, fmt::join(names, ", ")));
  }

  const Contents& contents_;
  std::vector<std::string> found_;
};

}  // namespace

std::vector<SharedMemory> FindSharedMemory(const Contents& contents) {
  std::vector<std::vector<const StoredTensor*>> views(contents.storages.size());
  for (const StoredTensor& tensor : contents.tensors) {
    if (tensor.storage != layout::kNoStorage && tensor.bytes > 0) {
      views[tensor.storage].push_back(&tensor);
    }
  }
  std::vector<SharedMemory> found;
  for (auto& tensors : views) {
    std::ranges::sort(tensors, {}, [](const StoredTensor* tensor) {
      return std::pair(tensor->offset, tensor);  // equal ones in the order of the state
    });
    const StoredTensor* last = nullptr;  // the one that reaches farthest so far
    for (const StoredTensor* tensor : tensors) {
      const bool shares = last != nullptr && tensor->offset < last->offset + SpanOf(*last);
      // Of two, the later in the state is the one to be named first.
      if (shares) found.push_back({std::max(tensor, last), std::min(tensor, last)});
      const std::uint64_t end = tensor->offset + SpanOf(*tensor);
      if (last == nullptr || end > last->offset + SpanOf(*last)) last = tensor;
    }
  }
  return found;
}

std::vector<std::string> FindNonTensors(const Contents& contents) {
  std::vector<std::string> names;
  std::string within;  // the last opaque object's name and a dot
  for (const auto& value : contents.values) {
    if (!within.empty() && value.name.starts_with(within)) continue;
    within = value.opaque ? value.name + '.' : "";
    names.push_back(value.name);
  }
  return names;
}

std::vector<std::string> FindObstacles(const Contents& contents, Format to,
                                       const ConvertChoices& choices) {
  Obstacles obstacles(contents);
  if (contents.byteorder != "little") {
    obstacles.Whole("it was written on a big-endian machine");
  }
  obstacles.Tensors("these tensors are on the meta device and have no data",
                    [](const StoredTensor& t) { return t.storage == layout::kNoStorage; });
  obstacles.Tensors("these tensors are lazy conjugates or negations (save them resolved)",
                    [](const StoredTensor& t) { return t.conjugate || t.negative; });
  obstacles.Tensors(
      to == Format::kSafetensors ? "safetensors files cannot hold these types"
                                 : "PyTorch files cannot hold these types",
      [](const StoredTensor& t) { return !TypeIsInBoth(t); }, /*with_type=*/true);
  if (!choices.tensors_only) obstacles.Values();
  if (!choices.duplicate_shared) {
    obstacles.Shared();
    obstacles.Tensors(
        "these tensors show elements of their memory several times (--duplicate-shared writes them "
        "out, and holds each in memory meanwhile)",
        [&](const StoredTensor& t) {
          return t.storage != layout::kNoStorage && t.bytes > contents.storages[t.storage].size;
        });
  }
  return std::move(obstacles).Take();
}

bool IsNested(const Contents& contents) {
  using Kind = layout::PickleNode::Kind;
  if (contents.kind != Contents::Kind::kTorch) return false;
  if (contents.tree.root >= contents.tree.nodes.size()) return false;
  const auto& root = contents.tree.at(contents.tree.root);
  if (root.kind != Kind::kDict && root.kind != Kind::kOrderedDict) return true;
  std::size_t direct = 0;
  for (std::size_t i = 1; i < root.items.size(); i += 2) {
    const auto kind = contents.tree.at(root.items[i]).kind;
    if (kind == Kind::kTensor || kind == Kind::kParameter) ++direct;
  }
  return direct < contents.tensors.size();
}

std::vector<std::string> FindNumbered(const Contents& contents) {
  std::set<std::string_view> all;
  for (const StoredTensor& tensor : contents.tensors) all.insert(tensor.name);
  for (const auto& value : contents.values) all.insert(value.name);
  std::vector<std::string> numbered;
  for (const StoredTensor& tensor : contents.tensors) {
    const std::size_t mark = tensor.name.rfind('#');
    if (mark == std::string::npos || mark + 1 == tensor.name.size()) continue;
    const std::string_view name = tensor.name;
    const bool number =
        std::ranges::all_of(name.substr(mark + 1), [](char c) { return c >= '0' && c <= '9'; });
    if (number && all.contains(name.substr(0, mark))) numbered.push_back(tensor.name);
  }
  return numbered;
}

std::string Quoted(const std::vector<std::string>& names) {
  return fmt::format("'{}'", fmt::join(names, "', '"));
}

}  // namespace fastpersist::cli
