// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/state_snapshot.h"

#include <fmt/format.h>

#include <cstring>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "base/align.h"
#include "layout/dict_of_tensors.h"
#include "layout/torch_container.h"

namespace fastpersist::checkpoint {
namespace {

constexpr std::uint64_t kCopyAlign = 64;
constexpr std::uint64_t kTorchAlignment = 64;  // torch's default storage_alignment

// What is one storage in the file: entries with the same address, type and size.
struct Storage {
  const void* data = nullptr;  // where it is read
  std::uint64_t size = 0;
  std::string_view name;  // of the first entry
  bool live = true;
};

class Storages {
 public:
  Storages(const State& state, const std::unordered_set<std::string_view>& live) {
    for (const State::Entry& entry : state.entries()) {
      const std::uint64_t size = ByteSize(entry.view);
      if (size == 0) continue;
      const auto [known, is_new] = index_.try_emplace(KeyOf(entry.view), all_.size());
      if (is_new) all_.push_back({.data = entry.view.data, .size = size, .name = entry.name});
      Storage& storage = all_[known->second];
      storage.live = storage.live && live.contains(entry.name);
    }
  }

  [[nodiscard]] std::vector<Storage>& all() { return all_; }
  [[nodiscard]] const void* AddressOf(const TensorView& view) const {
    const auto known = index_.find(KeyOf(view));
    return known == index_.end() ? view.data : all_[known->second].data;
  }

 private:
  using Key = std::tuple<const void*, DType, std::uint64_t>;
  static Key KeyOf(const TensorView& view) { return {view.data, view.dtype, ByteSize(view)}; }

  std::map<Key, std::size_t> index_;
  std::vector<Storage> all_;  // in the order of the state
};

Result<std::unordered_set<std::string_view>> CheckNames(const State& state,
                                                        std::span<const std::string> live) {
  std::unordered_set<std::string_view> known;
  for (const State::Entry& entry : state.entries()) known.insert(entry.name);
  for (const std::string& name : live) {
    if (known.contains(name)) continue;
    return std::unexpected(Error{.code = ErrorCode::kInvalidArgument,
                                 .operation = "save",
                                 .entry = name,
                                 .detail = "it is said to be live, and is not in the state"});
  }
  return std::unordered_set<std::string_view>(live.begin(), live.end());
}

// Copies what is not live as far as there is room; the rest is made live. The bytes of that.
std::uint64_t CopyRest(std::vector<Storage>& storages, std::span<std::byte>& memory) {
  std::uint64_t unfit = 0;
  for (Storage& storage : storages) {
    if (storage.live) continue;
    if (storage.size > memory.size()) {
      storage.live = true;
      unfit += storage.size;
      continue;
    }
    std::memcpy(memory.data(), storage.data, storage.size);
    storage.data = memory.data();
    memory = memory.subspan(
        std::min<std::uint64_t>(base::AlignUp(storage.size, kCopyAlign), memory.size()));
  }
  return unfit;
}

std::vector<pipeline::LiveExtent> LiveExtents(const layout::Stream& stream,
                                              std::span<const Storage> storages) {
  std::map<std::pair<const void*, std::uint64_t>, std::string_view> live;
  for (const Storage& storage : storages) {
    if (storage.live) live.try_emplace({storage.data, storage.size}, storage.name);
  }
  std::vector<pipeline::LiveExtent> extents;
  for (std::size_t i = 0; i < stream.extents().size(); ++i) {
    const layout::Extent& extent = stream.extents()[i];
    if (extent.kind != layout::Extent::Kind::kMemory) continue;
    const auto found = live.find({extent.bytes, extent.length});
    if (found != live.end()) extents.push_back({.extent = i, .name = std::string(found->second)});
  }
  return extents;
}

}  // namespace

Result<StateSnapshot> TakeSnapshot(const State& state, std::span<const std::string> live,
                                   std::span<std::byte> memory) {
  const auto names = CheckNames(state, live);
  if (!names) return std::unexpected(names.error());
  Storages storages(state, *names);
  StateSnapshot snapshot;
  snapshot.unfit_bytes = CopyRest(storages.all(), memory);
  snapshot.spare = memory;

  State placed;
  for (const State::Entry& entry : state.entries()) {
    TensorView view = entry.view;
    view.data = storages.AddressOf(view);
    if (auto added = placed.Add(entry.name, std::move(view)); !added) {
      return std::unexpected(added.error());
    }
  }
  std::string pickle;
  const auto records = layout::DictOfTensorsRecords(placed, kTorchAlignment, pickle);
  auto stream =
      layout::LayOutTorchContainer(records, {.prefix = "state", .alignment = kTorchAlignment});
  if (!stream) return std::unexpected(stream.error());
  snapshot.stream = std::make_shared<const layout::Stream>(*std::move(stream));
  snapshot.live = LiveExtents(*snapshot.stream, storages.all());
  return snapshot;
}

}  // namespace fastpersist::checkpoint
