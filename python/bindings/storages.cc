// SPDX-License-Identifier: Apache-2.0
#include "storages.h"

#include <algorithm>
#include <cassert>

namespace fastpersist::python {

namespace nb = nanobind;

void Storage::Unite() {
  std::ranges::sort(ranges);
  std::vector<ByteRange> united;
  for (const ByteRange& range : ranges) {
    if (range.first == range.second) continue;
    if (!united.empty() && range.first < united.back().second) {
      united.back().second = std::max(united.back().second, range.second);
    } else {
      united.push_back(range);
    }
  }
  ranges = std::move(united);
}

Storage* Storages::Find(std::uint64_t identity) {
  const auto at = storages_.find(identity);
  return at == storages_.end() ? nullptr : &at->second;
}

Storage* Storages::Add(std::uint64_t identity, Storage storage) {
  if (storage.address != 0) {
    const auto [known, is_new] = dtype_at_.try_emplace(storage.address, storage.dtype);
    if (!is_new && !known->second.is(storage.dtype)) return nullptr;
  }
  return &storages_.insert_or_assign(identity, std::move(storage)).first->second;
}

void Storages::Compact() {
  for (auto& [identity, storage] : storages_) storage.Unite();
  bodies_.clear();
  in_order_.clear();
  compact_ = true;
}

Place Storages::PlaceOf(std::uint64_t identity, ByteRange range, std::uint64_t item_size) {
  const Storage& storage = *Find(identity);
  ByteRange part{0, storage.size};
  if (compact_) {
    // The cluster that holds the range; an empty tensor lies in none.
    const auto after = std::ranges::upper_bound(storage.ranges, range.first, {}, &ByteRange::first);
    const bool within = range.first < range.second && after != storage.ranges.begin();
    part = within ? *std::prev(after) : ByteRange{range.first, range.first};
  }
  // An empty part never stands for the cluster that begins where it lies.
  const std::uint64_t first = part.first == part.second ? ~part.first : part.first;
  const auto [known, is_new] = bodies_.try_emplace({identity, first});
  Body& body = known->second;
  if (is_new) {
    // A real Python string: the pickler's memo goes by identity, and CPython shares short ones.
    PyObject* key = PyObject_Str(nb::int_(in_order_.size()).ptr());
    if (key == nullptr) throw nb::python_error();  // str() runs signal handlers, which may raise
    body.key = nb::steal(key);
    body.size = part.second - part.first;
    body.address = body.size == 0 ? 0 : storage.address + part.first;
    in_order_.push_back(&body);
  }
  return {.body = &body, .offset = (range.first - part.first) / item_size};
}

std::uint64_t Storages::ReferencedBytes() {
  std::uint64_t bytes = 0;
  for (auto& [identity, storage] : storages_) {
    storage.Unite();
    for (const auto& [begin, end] : storage.ranges) bytes += end - begin;
  }
  return bytes;
}

nb::list Storages::Records() const {
  nb::list records;
  std::string name;
  for (std::size_t i = 0; i < in_order_.size(); ++i) {
    name = "data/" + std::to_string(i);
    records.append(nb::make_tuple(nb::str(name.c_str(), name.size()),
                                  nb::make_tuple(in_order_[i]->address, in_order_[i]->size)));
  }
  return records;
}

nb::list Storages::Owners() const {
  nb::list owners;
  for (const auto& [identity, storage] : storages_) owners.append(storage.owner);
  return owners;
}

}  // namespace fastpersist::python
