// SPDX-License-Identifier: Apache-2.0
// The ZIP structures that a PyTorch file consists of, byte for byte as torch writes them.
//
// Source: PKWARE APPNOTE 6.3.x (sections 4.3.7 to 4.3.16, 4.5.3), and the choices of torch's
// writer, found by comparing files: stored entries, no times, the sizes only in data descriptors
// and the directory, zip64 end records always, an "FB" extra field that pads each body to the
// alignment. All functions are pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fastpersist::layout {

/// One entry of the archive; all of it is known before the body is read, except the CRC.
struct ZipEntry {
  std::string name;                 ///< With the archive prefix; at most 65,535 bytes.
  std::uint64_t size = 0;           ///< Bytes of the body.
  std::uint64_t header_offset = 0;  ///< Where the local header begins.

  /// Sizes that do not fit 32 bits go into a zip64 extra field.
  [[nodiscard]] bool HasLongSize() const { return size >= 0xFFFFFFFFU; }
  [[nodiscard]] bool HasLongOffset() const { return header_offset >= 0xFFFFFFFFU; }
  /// 0 for empty bodies, else 16 or 24 bytes.
  [[nodiscard]] std::uint64_t DescriptorLength() const;
};

using Bytes = std::vector<std::byte>;

/// Bytes of the local header, padding included.
[[nodiscard]] std::uint64_t LocalHeaderLength(const ZipEntry& entry, std::uint64_t alignment);

/// Appends the local header, with the padding that makes the body begin at a multiple of alignment.
/// Precondition: alignment is a power of two up to 32768.
void AppendLocalHeader(const ZipEntry& entry, std::uint64_t alignment, Bytes& out);

/// Appends the data descriptor, DescriptorLength() bytes.
void AppendDescriptor(const ZipEntry& entry, std::uint32_t crc, Bytes& out);

/// Appends the entry's record in the central directory, DirectoryRecordLength bytes.
void AppendDirectoryRecord(const ZipEntry& entry, std::uint32_t crc, Bytes& out);
[[nodiscard]] std::uint64_t DirectoryRecordLength(const ZipEntry& entry);

/// Appends the zip64 end record, its locator and the end record, kEndRecordsLength bytes.
void AppendEndRecords(std::uint64_t entries, std::uint64_t directory_offset,
                      std::uint64_t directory_length, Bytes& out);
inline constexpr std::uint64_t kEndRecordsLength = 56 + 20 + 22;

/// A body that begins with this signature is mistaken for a descriptor by torch's id (see
/// serialization_id.h).
inline constexpr std::uint32_t kDescriptorSignature = 0x08074b50;

}  // namespace fastpersist::layout
