// SPDX-License-Identifier: Apache-2.0
#include "layout/dict_of_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "layout/dtype_names.h"
#include "layout/pickle_writer.h"

namespace fastpersist::layout {
namespace {

constexpr std::size_t kBatch = PickleOpcodes::kBatch;

// What the pickle says of one tensor.
struct Described {
  std::string_view name;
  const FileDtype* type = nullptr;
  std::span<const std::int64_t> shape;
  std::uint64_t bytes = 0;
  std::uint64_t storage = 0;  // its number
};

// Numbers the storages in the order in which they are met.
class Storages {
 public:
  std::uint64_t NumberOf(const TensorView& view) {
    const std::uint64_t size = ByteSize(view);
    if (size == 0) return Append(view, 0);  // empty storages are never shared
    const auto [known, is_new] = known_.try_emplace({view.data, view.dtype, size}, bodies_.size());
    return is_new ? Append(view, size) : known->second;
  }
  [[nodiscard]] std::vector<Record> Bodies() && { return std::move(bodies_); }

 private:
  std::uint64_t Append(const TensorView& view, std::uint64_t size) {
    bodies_.push_back(
        {.body = {static_cast<const std::byte*>(view.data), size}, .in_memory = true});
    return bodies_.size() - 1;
  }

  std::map<std::tuple<const void*, DType, std::uint64_t>, std::uint64_t> known_;
  std::vector<Record> bodies_;
};

void WriteIntTuple(PickleWriter& out, std::span<const std::int64_t> values) {
  if (values.empty()) {
    out.EmptyTuple();
    return;
  }
  if (values.size() > 3) out.Mark();
  for (const std::int64_t value : values) out.Int(value);
  out.Tuple(values.size());
}

std::vector<std::int64_t> ContiguousStrides(std::span<const std::int64_t> shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(shape[i], 1);
  }
  return strides;
}

// torch saves types for which it has no class of storage as untyped ones, with the type beside
// them.
void WriteTensor(PickleWriter& out, const Described& tensor) {
  const bool typed = !tensor.type->storage.empty();
  out.Global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  out.Mark();
  out.Mark();
  out.Constant("storage");
  if (typed) {
    out.Global("torch", tensor.type->storage);
  } else {
    out.Global("torch.storage", "UntypedStorage");
  }
  out.Constant(fmt::format("{}", tensor.storage));  // torch keeps one string for each storage
  out.Constant("cpu");
  out.Int(static_cast<std::int64_t>(tensor.bytes / (typed ? tensor.type->item_size : 1)));
  out.Tuple(5);
  out.PersistentId();
  out.Int(0);  // offset in the storage
  WriteIntTuple(out, tensor.shape);
  WriteIntTuple(out, ContiguousStrides(tensor.shape));
  out.Bool(false);                           // requires_grad
  out.Global("collections", "OrderedDict");  // hooks: none
  out.EmptyTuple();
  out.Reduce();
  if (!typed) out.Global("torch", tensor.type->torch);
  out.Tuple(typed ? 6 : 7);
  out.Reduce();
}

std::string WritePickle(std::span<const Described> tensors) {
  PickleWriter out;
  out.EmptyDict();
  const auto write_entry = [&](const Described& tensor) {
    out.Text(tensor.name);
    WriteTensor(out, tensor);
  };
  if (tensors.size() == 1) {
    write_entry(tensors[0]);
    out.SetItem();
  } else if (!tensors.empty()) {
    // A full last batch is followed by an empty one, as CPython's pickler does it.
    for (std::size_t at = 0; at <= tensors.size(); at += kBatch) {
      const std::size_t count = std::min(kBatch, tensors.size() - at);
      out.Mark();
      for (const Described& tensor : tensors.subspan(at, count)) write_entry(tensor);
      out.SetItems();
    }
  }
  return std::move(out).Finish();
}

// The records in torch's order; bodies get their names here.
std::vector<Record> RecordsOf(std::span<const Described> tensors, std::vector<Record> bodies,
                              std::uint64_t alignment, std::string& pickle_arena) {
  pickle_arena = WritePickle(tensors);
  const std::size_t pickle_size = pickle_arena.size();
  pickle_arena += "1";
  const std::string alignment_text = fmt::format("{}", alignment);
  pickle_arena += alignment_text;
  pickle_arena += "little";

  std::span<const std::byte> rest = std::as_bytes(std::span(pickle_arena));
  const auto take = [&rest](std::size_t size) {
    const auto taken = rest.first(size);
    rest = rest.subspan(size);
    return taken;
  };
  std::vector<Record> records;
  records.reserve(bodies.size() + 4);
  records.push_back({.name = "data.pkl", .body = take(pickle_size)});
  records.push_back({.name = ".format_version", .body = take(1)});
  records.push_back({.name = ".storage_alignment", .body = take(alignment_text.size())});
  records.push_back({.name = "byteorder", .body = take(6)});
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    bodies[i].name = fmt::format("data/{}", i);
    records.push_back(std::move(bodies[i]));
  }
  return records;
}

}  // namespace

std::vector<Record> DictOfTensorsRecords(const State& state, std::uint64_t alignment,
                                         std::string& pickle_arena) {
  Storages storages;
  std::vector<Described> tensors;
  tensors.reserve(state.entries().size());
  for (const State::Entry& entry : state.entries()) {
    tensors.push_back({.name = entry.name,
                       .type = ElementTypeOf(entry.view.dtype),
                       .shape = entry.view.shape,
                       .bytes = ByteSize(entry.view),
                       .storage = storages.NumberOf(entry.view)});
  }
  return RecordsOf(tensors, std::move(storages).Bodies(), alignment, pickle_arena);
}

std::vector<Record> DictOfTensorsRecords(std::span<const PulledTensor> pulled,
                                         std::uint64_t alignment, std::string& pickle_arena) {
  std::vector<Described> tensors;
  std::vector<Record> bodies;
  tensors.reserve(pulled.size());
  bodies.reserve(pulled.size());
  for (const PulledTensor& tensor : pulled) {
    tensors.push_back({.name = tensor.name,
                       .type = tensor.type,
                       .shape = tensor.shape,
                       .bytes = tensor.body.length,
                       .storage = bodies.size()});
    bodies.push_back({.pulled = tensor.body});
  }
  return RecordsOf(tensors, std::move(bodies), alignment, pickle_arena);
}

}  // namespace fastpersist::layout
