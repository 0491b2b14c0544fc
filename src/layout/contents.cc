// SPDX-License-Identifier: Apache-2.0
#include "layout/contents.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <string_view>

#include "layout/safetensors_header.h"

namespace fastpersist::layout {
namespace {

constexpr std::size_t kLengthField = 8;
using Head = std::array<std::byte, kLengthField + 1>;

// The format has no magic number: a length that the file can have, and the begin of a JSON object.
bool LooksLikeSafetensors(const Head& head, std::uint64_t size) {
  if (size < kLengthField + 1 || head.back() != std::byte{'{'}) return false;
  std::uint64_t length = 0;
  for (std::size_t i = kLengthField; i-- > 0;) {
    length = length << 8U | std::to_integer<std::uint64_t>(head.at(i));
  }
  return length <= kMaxSafetensorsHeader && length <= size - kLengthField;
}

// A file of that name that is neither: damaged at its begin or cut off, unless its bytes say that
// it is something else altogether, which the reader of archives tells.
bool IsDamagedSafetensors(const Head& head, const ByteSource& source) {
  constexpr std::string_view kSuffix = ".safetensors";
  if (!std::string_view(source.name()).ends_with(kSuffix) || source.size() == 0) return false;
  if (head == Head{}) return false;
  // A length below 2^40, as bytes 5 to 7 tell, or JSON where it belongs: no text, no pickle.
  const bool length =
      source.size() >= kLengthField && std::all_of(head.begin() + 5, head.begin() + kLengthField,
                                                   [](std::byte b) { return b == std::byte{0}; });
  return source.size() < kLengthField || length || head.back() == std::byte{'{'};
}

}  // namespace

Result<Contents> ReadContents(const ByteSource& source) {
  Head head{};
  const auto there = std::min<std::uint64_t>(source.size(), head.size());
  if (auto read = source.Read(0, std::span(head).first(there)); !read) {
    return std::unexpected(std::move(read.error()));
  }
  // A header of 19280 bytes begins with PK too; in an archive the ninth byte is no brace.
  const bool zip = head[0] == std::byte{'P'} && head[1] == std::byte{'K'};
  if (LooksLikeSafetensors(head, source.size()) || (!zip && IsDamagedSafetensors(head, source))) {
    return ReadSafetensorsFile(source);
  }
  return ReadTorchFile(source);
}

void AdoptBodyOffsets(Contents& contents) {
  for (StoredStorage& storage : contents.storages) {
    if (storage.record < contents.archive.records.size()) {
      storage.offset = contents.archive.records[storage.record].body_offset;
    }
  }
}

}  // namespace fastpersist::layout
