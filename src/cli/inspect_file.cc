// SPDX-License-Identifier: Apache-2.0
#include "cli/inspect_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cli/terminal.h"

namespace fastpersist::cli {
namespace {

using layout::Contents;
using layout::StoredTensor;

// For each storage the tensor that viewed it first.
class FirstViews {
 public:
  explicit FirstViews(const Contents& contents) : first_(contents.storages.size(), nullptr) {
    for (const StoredTensor& tensor : contents.tensors) {
      if (tensor.storage == layout::kNoStorage) continue;
      const StoredTensor*& first = first_[tensor.storage];
      if (first == nullptr) first = &tensor;
    }
  }
  // Null for that first tensor itself, and for one without a storage.
  [[nodiscard]] const StoredTensor* SharedWith(const StoredTensor& tensor) const {
    if (tensor.storage == layout::kNoStorage) return nullptr;
    const StoredTensor* first = first_[tensor.storage];
    return first == &tensor ? nullptr : first;
  }

 private:
  std::vector<const StoredTensor*> first_;
};

std::uint64_t TensorBytes(const Contents& contents) {
  std::uint64_t bytes = 0;
  for (const StoredTensor& tensor : contents.tensors) bytes += tensor.bytes;
  return bytes;
}

std::uint64_t StorageBytes(const Contents& contents) {
  std::uint64_t bytes = 0;
  for (const auto& storage : contents.storages) bytes += storage.size;
  return bytes;
}

bool IsTorch(const Contents& contents) { return contents.kind == Contents::Kind::kTorch; }

// --- For people ---

std::string Head(const checkpoint::OpenedFile& file, const Contents& contents) {
  std::string text = fmt::format("{}: {} file, {} ({})\n", Escaped(file.path()),
                                 IsTorch(contents) ? "PyTorch" : "safetensors",
                                 SizeText(file.size()), Counted(file.size(), "byte"));
  text += fmt::format("{}, {} in {} of {}\n", Counted(contents.tensors.size(), "tensor"),
                      SizeText(TensorBytes(contents)), Counted(contents.storages.size(), "storage"),
                      SizeText(StorageBytes(contents)));
  if (!IsTorch(contents)) {
    for (const auto& [key, value] : contents.metadata) {
      text += fmt::format("metadata: {} = {}\n", Escaped(key), Escaped(value));
    }
    return text;
  }
  text += fmt::format("archive '{}', {}, byte order {}, alignment {}\n", Escaped(contents.prefix),
                      contents.format_version.empty()
                          ? "no format version (before PyTorch 2.7)"
                          : fmt::format("format version {}", Escaped(contents.format_version)),
                      Escaped(contents.byteorder), contents.alignment);
  return text;
}

std::string StorageCell(const Contents& contents, const FirstViews& views,
                        const StoredTensor& tensor) {
  if (tensor.storage == layout::kNoStorage) return "none (meta)";
  const std::string name = IsTorch(contents) ? Escaped(contents.storages[tensor.storage].name) : "";
  const StoredTensor* other = views.SharedWith(tensor);
  if (other == nullptr) return name;
  return fmt::format("shares {} with '{}'", name, Escaped(other->name));
}

std::string Remarks(const StoredTensor& tensor) {
  std::string remarks;
  if (tensor.conjugate) remarks += " lazy conjugate";
  if (tensor.negative) remarks += " lazy negation";
  if (tensor.device != "cpu" && !tensor.device.empty()) remarks += " " + Escaped(tensor.device);
  return remarks;
}

std::string Tensors(const Contents& contents, std::size_t rows) {
  if (contents.tensors.empty()) return "";
  const FirstViews views(contents);
  Table table("llrl");
  table.Add({"NAME", "TYPE AND SHAPE", "BYTES", IsTorch(contents) ? "STORAGE" : ""});
  const std::size_t shown = std::min(rows, contents.tensors.size());
  for (std::size_t i = 0; i < shown; ++i) {
    const StoredTensor& tensor = contents.tensors[i];
    table.Add({Escaped(tensor.name),
               fmt::format("{} [{}]", Escaped(tensor.dtype), fmt::join(tensor.shape, ", ")),
               Grouped(tensor.bytes), StorageCell(contents, views, tensor) + Remarks(tensor)});
  }
  std::string text = "\n" + table.Text();
  if (shown < contents.tensors.size()) {
    text += fmt::format("... and {} (--all shows them)\n",
                        Counted(contents.tensors.size() - shown, "more tensor"));
  }
  return text;
}

std::string Values(const Contents& contents, std::size_t rows) {
  if (contents.values.empty()) return "";
  std::string text =
      fmt::format("\n{} no tensor:\n", contents.values.size() == 1
                                           ? "1 entry is"
                                           : Grouped(contents.values.size()) + " entries are");
  Table table("ll");
  const std::size_t shown = std::min(rows, contents.values.size());
  for (std::size_t i = 0; i < shown; ++i) {
    const auto& value = contents.values[i];
    const std::string cell = Escaped(value.text);
    table.Add({"  " + Escaped(value.name), value.opaque ? "opaque: " + cell : cell});
  }
  text += table.Text();
  if (shown < contents.values.size()) {
    text += fmt::format("  ... and {} more (--all shows them)\n",
                        Grouped(contents.values.size() - shown));
  }
  if (std::ranges::any_of(contents.values, &layout::StoredValue::opaque)) {
    text +=
        "Opaque entries are objects that only Python can make; "
        "torch.load(weights_only=True) may refuse them.\n";
  }
  return text;
}

// --- For programs ---

Json TensorJson(const Contents& contents, const FirstViews& views, const StoredTensor& tensor) {
  const bool stored = tensor.storage != layout::kNoStorage;
  const StoredTensor* other = views.SharedWith(tensor);
  return {{"name", tensor.name},
          {"dtype", tensor.dtype},
          {"shape", tensor.shape},
          {"strides", tensor.strides},
          {"bytes", tensor.bytes},
          {"storage", stored ? Json(contents.storages[tensor.storage].name) : Json(nullptr)},
          {"storage_offset", tensor.offset},
          {"shares_with", other != nullptr ? Json(other->name) : Json(nullptr)},
          {"device", tensor.device},
          {"conjugate", tensor.conjugate},
          {"negative", tensor.negative}};
}

Json StorageJson(const layout::StoredStorage& storage) {
  return {{"name", storage.name},
          {"bytes", storage.size},
          {"crc32", storage.crc ? Json(fmt::format("{:08x}", *storage.crc)) : Json(nullptr)}};
}

}  // namespace

void AddFile(Json& document, const checkpoint::OpenedFile& file, const Contents& contents) {
  document["format"] = IsTorch(contents) ? "torch" : "safetensors";
  document["bytes"] = file.size();
  document["tensor_count"] = contents.tensors.size();
  document["tensor_bytes"] = TensorBytes(contents);
  document["storage_bytes"] = StorageBytes(contents);
  if (IsTorch(contents)) {
    document["archive"] = {
        {"prefix", contents.prefix},
        {"format_version",
         contents.format_version.empty() ? Json(nullptr) : Json(contents.format_version)},
        {"byteorder", contents.byteorder},
        {"alignment", contents.alignment}};
  } else {
    document["metadata"] = contents.metadata.empty() ? Json::object() : Json(contents.metadata);
  }
  const FirstViews views(contents);
  Json& tensors = document["tensors"] = Json::array();
  for (const StoredTensor& tensor : contents.tensors) {
    tensors.push_back(TensorJson(contents, views, tensor));
  }
  Json& storages = document["storages"] = Json::array();
  for (const auto& storage : contents.storages) storages.push_back(StorageJson(storage));
  Json& values = document["values"] = Json::array();
  for (const auto& value : contents.values) {
    values.push_back({{"name", value.name}, {"text", value.text}, {"opaque", value.opaque}});
  }
}

std::string FileText(const checkpoint::OpenedFile& file, const Contents& contents,
                     std::size_t rows) {
  return Head(file, contents) + Tensors(contents, rows) + Values(contents, rows);
}

}  // namespace fastpersist::cli
