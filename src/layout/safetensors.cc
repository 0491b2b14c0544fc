// SPDX-License-Identifier: Apache-2.0
#include "layout/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "base/align.h"

namespace fastpersist::layout {
namespace {

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::uint64_t kHeaderAlignment = 8;
// The package refuses to read, and to write, longer ones.
constexpr std::uint64_t kMaxHeader = 100'000'000;

// The package's order of types, ascending; files are laid out in descending order, so that every
// tensor is aligned to its element.
constexpr auto kTypeOrder = std::to_array<std::string_view>(
    {"BOOL",    "F4",          "F6_E2M3",     "F6_E3M2", "U8",  "I8",  "F8_E5M2", "F8_E4M3",
     "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16",     "U16", "F16", "BF16",    "I32",
     "U32",     "F32",         "C64",         "F64",     "I64", "U64"});

std::optional<std::size_t> TypeRank(std::string_view dtype) {
  const auto* at = std::ranges::find(kTypeOrder, dtype);
  if (at == kTypeOrder.end()) return std::nullopt;
  return static_cast<std::size_t>(at - kTypeOrder.begin());
}

std::unexpected<Error> Refuse(std::string detail) {
  return std::unexpected(Error{
      .code = ErrorCode::kUnsupportedState, .operation = "layout", .detail = std::move(detail)});
}

Result<std::string> Header(std::span<const SafetensorsEntry> entries,
                           const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[std::string(kMetadataKey)] = metadata;
  std::uint64_t offset = 0;
  for (const SafetensorsEntry& entry : entries) {
    const std::uint64_t end = offset + entry.size();
    // push_back appends; operator[] would search all earlier names.
    header.push_back({entry.name, nlohmann::ordered_json{{"dtype", entry.dtype},
                                                         {"shape", entry.shape},
                                                         {"data_offsets", {offset, end}}}});
    offset = end;
  }
  try {
    std::string text = header.dump();
    text.append(base::AlignUp(text.size(), kHeaderAlignment) - text.size(), ' ');
    if (text.size() > kMaxHeader) {
      return Refuse(
          fmt::format("names and shapes of {} tensors take {} bytes; a safetensors header "
                      "holds at most {}",
                      entries.size(), text.size(), kMaxHeader));
    }
    return text;
  } catch (const nlohmann::json::exception& error) {
    return Refuse(fmt::format("a tensor name or a metadata entry is not UTF-8 ({})", error.what()));
  }
}

Result<void> SortAndCheck(std::vector<SafetensorsEntry>& entries) {
  for (const SafetensorsEntry& entry : entries) {
    if (entry.name == kMetadataKey) {
      return Refuse(
          fmt::format("'{}' is reserved in safetensors files; rename the tensor", kMetadataKey));
    }
    if (!TypeRank(entry.dtype)) {
      return Refuse(fmt::format("'{}' has type '{}', which safetensors files cannot hold",
                                entry.name, entry.dtype));
    }
  }
  std::ranges::sort(entries, [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    const auto rank_a = TypeRank(a.dtype);
    const auto rank_b = TypeRank(b.dtype);
    return rank_a != rank_b ? rank_a > rank_b : a.name < b.name;
  });
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const SafetensorsEntry& entry : entries) names.push_back(entry.name);
  std::ranges::sort(names);
  if (const auto twice = std::ranges::adjacent_find(names); twice != names.end()) {
    return Refuse(fmt::format("two tensors are named '{}'", *twice));
  }
  return {};
}

}  // namespace

Result<Stream> LayOutSafetensors(std::vector<SafetensorsEntry> entries,
                                 const std::map<std::string, std::string>& metadata) {
  if (auto checked = SortAndCheck(entries); !checked) return std::unexpected(checked.error());
  auto header = Header(entries, metadata);
  if (!header) return std::unexpected(header.error());

  StreamBuilder builder;
  std::array<std::byte, 8> length{};
  for (std::size_t i = 0; i < length.size(); ++i) {
    length[i] = static_cast<std::byte>(header->size() >> (8 * i));
  }
  builder.AddGenerated(length);
  builder.AddGenerated(std::as_bytes(std::span(*header)));
  std::uint32_t record = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.pulled) {
      builder.AddPulled(*entry.pulled, record++);
    } else {
      builder.AddMemory(entry.body, record++);
    }
  }
  return std::move(builder).Finish(record, nullptr);
}

}  // namespace fastpersist::layout
