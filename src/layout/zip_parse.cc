// SPDX-License-Identifier: Apache-2.0
#include "layout/zip_parse.h"

#include <fmt/format.h>

#include <utility>

#include "base/utf8.h"

namespace fastpersist::layout {
namespace {

constexpr std::uint16_t kZip64ExtraId = 0x0001;
constexpr std::size_t kExtraFieldHeaderLength = 4;
constexpr std::size_t kLongestQuoted = 200;

}  // namespace

ExtraFields ParseExtraFields(std::span<const std::byte> extra) {
  ExtraFields fields;
  while (extra.size() >= kExtraFieldHeaderLength) {
    const auto id = FieldAt<std::uint16_t>(extra, 0);
    const auto length = FieldAt<std::uint16_t>(extra, 2);
    extra = extra.subspan(kExtraFieldHeaderLength);
    if (length > extra.size()) return fields;
    if (id == kZip64ExtraId) {
      if (fields.zip64) return fields;
      fields.zip64 = extra.first(length);
    }
    extra = extra.subspan(length);
  }
  fields.well_formed = true;
  return fields;
}

std::string Quoted(std::string_view name) {
  const std::string_view shown = name.substr(0, kLongestQuoted);
  const bool keep_high = base::IsUtf8(shown);
  std::string quoted = "'";
  for (const char c : shown) {
    const auto byte = static_cast<unsigned char>(c);
    const bool keep = byte >= 0x80 ? keep_high : byte >= 0x20 && byte != 0x7F;
    if (keep) {
      quoted += c;
    } else {
      quoted += fmt::format("\\x{:02x}", byte);
    }
  }
  if (shown.size() < name.size()) quoted += "...";
  return quoted + '\'';
}

Error Damaged(const std::string& file, std::optional<std::uint64_t> offset, std::string detail,
              std::string_view entry) {
  Error error;
  error.code = ErrorCode::kCorrupt;
  error.operation = "read";
  error.path = file;
  error.offset = offset;
  error.entry = entry;
  error.detail = std::move(detail);
  error.advice = "restore the file from another copy";
  return error;
}

Error Unsupported(const std::string& file, std::uint64_t offset, std::string detail,
                  std::string advice, std::string_view entry) {
  Error error = Damaged(file, offset, std::move(detail), entry);
  error.code = ErrorCode::kUnsupportedFile;
  error.advice = std::move(advice);
  return error;
}

}  // namespace fastpersist::layout
