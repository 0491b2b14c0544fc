// SPDX-License-Identifier: Apache-2.0
#include "layout/dict_of_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <tuple>

#include "layout/dtype_names.h"
#include "layout/pickle_writer.h"

namespace fastpersist::layout {
namespace {

constexpr std::size_t kBatch = PickleOpcodes::kBatch;

// Numbers the storages in the order in which they are met.
class Storages {
 public:
  std::uint64_t NumberOf(const TensorView& view) {
    const std::uint64_t size = ByteSize(view);
    if (size == 0) return Append(view, 0);  // empty storages are never shared
    const auto [known, is_new] = known_.try_emplace({view.data, view.dtype, size}, bodies_.size());
    return is_new ? Append(view, size) : known->second;
  }
  [[nodiscard]] const std::vector<std::span<const std::byte>>& bodies() const { return bodies_; }

 private:
  std::uint64_t Append(const TensorView& view, std::uint64_t size) {
    bodies_.emplace_back(static_cast<const std::byte*>(view.data), size);
    return bodies_.size() - 1;
  }

  std::map<std::tuple<const void*, DType, std::uint64_t>, std::uint64_t> known_;
  std::vector<std::span<const std::byte>> bodies_;
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

void WriteTensor(PickleWriter& out, const TensorView& view, std::uint64_t storage) {
  out.Global("torch._utils", "_rebuild_tensor_v2");
  out.Mark();
  out.Mark();
  out.Constant("storage");
  out.Global("torch", TorchStorageName(view.dtype));
  out.Constant(fmt::format("{}", storage));  // torch keeps one string object for each storage
  out.Constant("cpu");
  out.Int(static_cast<std::int64_t>(ByteSize(view) / ItemSize(view.dtype)));
  out.Tuple(5);
  out.PersistentId();
  out.Int(0);  // offset in the storage
  WriteIntTuple(out, view.shape);
  WriteIntTuple(out, ContiguousStrides(view.shape));
  out.Bool(false);                           // requires_grad
  out.Global("collections", "OrderedDict");  // hooks: none
  out.EmptyTuple();
  out.Reduce();
  out.Tuple(6);
  out.Reduce();
}

std::string WritePickle(const State& state, Storages& storages) {
  PickleWriter out;
  out.EmptyDict();
  const auto write_entry = [&](const State::Entry& entry) {
    out.Text(entry.name);
    WriteTensor(out, entry.view, storages.NumberOf(entry.view));
  };
  const std::span entries(state.entries());
  if (entries.size() == 1) {
    write_entry(entries[0]);
    out.SetItem();
  } else if (!entries.empty()) {
    // A full last batch is followed by an empty one, as CPython's pickler does it.
    for (std::size_t at = 0; at <= entries.size(); at += kBatch) {
      const std::size_t count = std::min(kBatch, entries.size() - at);
      out.Mark();
      for (const State::Entry& entry : entries.subspan(at, count)) write_entry(entry);
      out.SetItems();
    }
  }
  return std::move(out).Finish();
}

}  // namespace

std::vector<Record> DictOfTensorsRecords(const State& state, std::uint64_t alignment,
                                         std::string& pickle_arena) {
  Storages storages;
  pickle_arena = WritePickle(state, storages);
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
  records.reserve(storages.bodies().size() + 4);
  records.push_back({.name = "data.pkl", .body = take(pickle_size)});
  records.push_back({.name = ".format_version", .body = take(1)});
  records.push_back({.name = ".storage_alignment", .body = take(alignment_text.size())});
  records.push_back({.name = "byteorder", .body = take(6)});
  for (std::size_t i = 0; i < storages.bodies().size(); ++i) {
    records.push_back(
        {.name = fmt::format("data/{}", i), .body = storages.bodies()[i], .in_memory = true});
  }
  return records;
}

}  // namespace fastpersist::layout
