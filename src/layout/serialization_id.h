// SPDX-License-Identifier: Apache-2.0
// The 40 digits that torch writes as the last record, .data/serialization_id: two 64-bit hashes in
// 20 decimals each, one of the record names, one of the record checksums. The width is fixed, so
// the layout does not depend on the data.
//
// Source: found by experiment with torch 2.4 to 2.13, whose files are the oracle. The iteration
// order of libstdc++'s unordered_set<std::string> is part of the first hash, so libstdc++ is
// required.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "layout/stream.h"

namespace fastpersist::layout {

inline constexpr std::size_t kSerializationIdLength = 40;

/// The first hash. names: all records without the archive prefix, in file order, the id's excluded.
[[nodiscard]] std::uint64_t HashRecordNames(std::span<const std::string_view> names);

/// The second hash, one record at a time in file order; empty records are not passed.
class ChecksumHash {
 public:
  /// size: bytes of the body. torch's writer takes a body of at least 8 bytes that begins like a
  /// data descriptor for one, and folds the word after the signature too.
  void Add(std::uint64_t size, const RecordDigest& digest);
  [[nodiscard]] std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0;
};

[[nodiscard]] std::string FormatSerializationId(std::uint64_t names, std::uint64_t checksums);

}  // namespace fastpersist::layout
