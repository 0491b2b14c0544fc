// SPDX-License-Identifier: Apache-2.0
#include "storage_cells.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace fastpersist::python {
namespace {

// A StorageImpl is larger than this in every torch; nothing beyond is looked at.
constexpr std::size_t kLooked = 64;

std::uint64_t WordAt(std::uintptr_t object, std::size_t offset) {
  std::uint64_t word = 0;
  std::memcpy(&word, reinterpret_cast<const std::byte*>(object) + offset, sizeof word);
  return word;
}

// The first offset at which every storage has what it should have.
template <class Wanted>
std::optional<std::size_t> Find(std::span<const KnownStorage> known, Wanted wanted) {
  for (std::size_t offset = 0; offset < kLooked; offset += sizeof(std::uint64_t)) {
    if (std::ranges::all_of(known, [&](const KnownStorage& storage) {
          return WordAt(storage.identity, offset) == wanted(storage);
        })) {
      return offset;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<StorageLayout> LearnStorageLayout(std::span<const KnownStorage> known) {
  if (known.size() < 2) return std::nullopt;
  const auto address = Find(known, [](const KnownStorage& storage) { return storage.address; });
  const auto size = Find(known, [](const KnownStorage& storage) { return storage.size; });
  if (!address || !size) return std::nullopt;
  return StorageLayout{.address = *address, .size = *size};
}

}  // namespace fastpersist::python
