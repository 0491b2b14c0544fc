// SPDX-License-Identifier: Apache-2.0
// What the parts of the ZIP reader share: fields out of bytes, the list of extra fields, where the
// directory lies, and the errors. Internal to zip_reader.cc, zip_ends.cc and zip_frames.cc.
//
// Source: PKWARE APPNOTE 6.3.x, sections 4.3.7 to 4.3.16, 4.4.28, and 4.5.3.
#pragma once

#include <bit>
#include <cassert>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "fastpersist/error.h"
#include "layout/byte_source.h"

namespace fastpersist::layout {

static_assert(std::endian::native == std::endian::little, "ZIP structures are little-endian");

inline constexpr std::uint32_t kLocalHeaderSignature = 0x04034b50;
inline constexpr std::uint64_t kFixedHeaderLength = 30;  ///< Of a local header, without the name.
inline constexpr std::uint64_t kDirectoryRecordLength = 46;  ///< Likewise.
inline constexpr std::uint32_t kLongField = 0xFFFFFFFFU;     ///< "The value is in the zip64 field."
inline constexpr std::uint16_t kDescriptorFollows = 0x0008;  ///< In the flags.

/// Precondition: the field lies within the bytes.
template <std::unsigned_integral T>
[[nodiscard]] T FieldAt(std::span<const std::byte> bytes, std::uint64_t at) {
  assert(at <= bytes.size() && sizeof(T) <= bytes.size() - at);
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

/// The list of extra fields of a header.
struct ExtraFields {
  bool well_formed = false;  ///< Each field ends within the list, and at most one is zip64's.
  /// The 64-bit values of the zip64 field; none: there is no such field.
  std::optional<std::span<const std::byte>> zip64;
};
/// Fewer than 4 bytes behind the last field are let pass: other writers align with them.
[[nodiscard]] ExtraFields ParseExtraFields(std::span<const std::byte> extra);

/// A name for a message: in quotes, cut when it is very long, without control characters, and
/// UTF-8 whatever it is.
[[nodiscard]] std::string Quoted(std::string_view name);

/// kCorrupt, of the bytes at offset; entry is empty where no entry is concerned.
[[nodiscard]] Error Damaged(const std::string& file, std::optional<std::uint64_t> offset,
                            std::string detail, std::string_view entry = {});

/// kUnsupportedFile, likewise.
[[nodiscard]] Error Unsupported(const std::string& file, std::uint64_t offset, std::string detail,
                                std::string advice, std::string_view entry = {});

/// Where the end records say that the directory lies: directly before them, with room for as many
/// entries.
struct DirectoryPlace {
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::uint64_t entries = 0;
};
/// Reads the end records, and nothing else unless there are none. Errors as ReadZipDirectory.
[[nodiscard]] Result<DirectoryPlace> FindDirectory(const ByteSource& source);

}  // namespace fastpersist::layout
