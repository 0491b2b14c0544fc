// SPDX-License-Identifier: Apache-2.0
#include "layout/serialization_id.h"

#include <fmt/format.h>

#include <functional>
#include <unordered_set>

#include "layout/zip.h"

#ifndef __GLIBCXX__
#error "The serialization id reproduces libstdc++'s hash order; build with libstdc++."
#endif

namespace fastpersist::layout {
namespace {

std::uint64_t Combine(std::uint64_t seed, std::uint64_t value) {
  return seed ^ (value + 0x9e3779b9U + (seed << 6U) + (seed >> 2U));
}

std::uint32_t ReadLittleEndian32(std::span<const std::byte> bytes) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    value |= std::to_integer<std::uint32_t>(bytes[i]) << (8 * i);
  }
  return value;
}

}  // namespace

std::uint64_t HashRecordNames(std::span<const std::string_view> names) {
  // Not string_view and no reserve: both would change the bucket order.
  std::unordered_set<std::string> set;
  for (const std::string_view name : names) set.emplace(name);
  std::uint64_t hash = 0;
  for (const std::string& name : set) hash = Combine(hash, std::hash<std::string>{}(name));
  return hash;
}

void ChecksumHash::Add(std::uint64_t size, const RecordDigest& digest) {
  const std::span head(digest.head);
  if (size >= head.size() && ReadLittleEndian32(head) == kDescriptorSignature) {
    value_ = Combine(value_, ReadLittleEndian32(head.subspan(4)));
  }
  value_ = Combine(value_, digest.crc);
}

std::string FormatSerializationId(std::uint64_t names, std::uint64_t checksums) {
  return fmt::format("{:020}{:020}", names, checksums);
}

}  // namespace fastpersist::layout
