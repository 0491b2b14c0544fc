// SPDX-License-Identifier: Apache-2.0
// The storages that a state's tensors refer to, numbered in the order in which they are met, and
// where each tensor lies in them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fastpersist::python {

/// A half-open range of bytes within one storage.
using ByteRange = std::pair<std::uint64_t, std::uint64_t>;

/// One storage and what tensors refer to in it.
struct Storage {
  nanobind::object owner;  ///< Keeps the memory alive.
  nanobind::object dtype;
  std::uintptr_t address = 0;  ///< 0 when empty.
  std::uint64_t size = 0;      ///< Bytes.
  std::vector<ByteRange> ranges;

  /// Sorts and unites overlapping ranges.
  void Unite();
};

/// What one record of the file will hold.
struct Body {
  nanobind::object key;  ///< The Python string that names it in the pickle.
  std::uintptr_t address = 0;
  std::uint64_t size = 0;
};

/// Where a tensor's storage is in the file: its record, and the tensor's offset there in elements.
struct Place {
  const Body* body = nullptr;
  std::uint64_t offset = 0;
};

class Storages {
 public:
  /// The storage with this identity (torch's _cdata), or null.
  [[nodiscard]] Storage* Find(std::uint64_t identity);
  /// Adds one. nullptr when its memory was met as another type, which torch refuses.
  [[nodiscard]] Storage* Add(std::uint64_t identity, Storage storage);

  /// After all tensors were met once: from now on records are clusters, not whole storages.
  void Compact();
  [[nodiscard]] bool compact() const { return compact_; }
  /// The record for a tensor over [range) of the storage; numbers it when it is new.
  [[nodiscard]] Place PlaceOf(std::uint64_t identity, ByteRange range, std::uint64_t item_size);

  [[nodiscard]] std::uint64_t ReferencedBytes();
  [[nodiscard]] nanobind::list Records() const;
  [[nodiscard]] nanobind::list Owners() const;

 private:
  struct BodyKeyHash {
    std::size_t operator()(const std::pair<std::uint64_t, std::uint64_t>& key) const {
      return key.first * 31 + key.second;
    }
  };

  std::unordered_map<std::uint64_t, Storage> storages_;
  std::unordered_map<std::uintptr_t, nanobind::object> dtype_at_;
  // (identity, first byte of the cluster) → record; the first byte is 0 for whole storages.
  std::unordered_map<std::pair<std::uint64_t, std::uint64_t>, Body, BodyKeyHash> bodies_;
  std::vector<const Body*> in_order_;
  bool compact_ = false;
};

}  // namespace fastpersist::python
