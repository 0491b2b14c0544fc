// SPDX-License-Identifier: Apache-2.0
// Reads the structure of a ZIP archive: the end records, the central directory, and the frames
// (local header and data descriptor) around each body. Nothing that a file claims is believed
// before it was compared with the size of the file: lengths, offsets, overlaps and counts are
// bounded before memory is taken. Pure but for the ByteSource.
//
// Source: PKWARE APPNOTE 6.3.x, sections 4.3.7 to 4.3.16 and 4.5.3. Only what a checkpoint can be
// is accepted: one volume, stored entries, no encryption, nothing before the first entry, between
// the directory and the end records, or after them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fastpersist/error.h"
#include "layout/byte_source.h"

namespace fastpersist::layout {

/// One entry of the central directory. [header_offset, end) belongs to it alone.
struct ArchiveRecord {
  std::string name;                 ///< As stored, with the archive prefix.
  std::uint64_t header_offset = 0;  ///< Of the local header.
  std::uint64_t body_offset = 0;    ///< See ReadZipDirectory.
  std::uint64_t size = 0;           ///< Of the body.
  std::uint64_t end = 0;            ///< Where the next record's header, or the directory, begins.
  std::uint32_t crc = 0;            ///< CRC-32 of the body.
  std::uint16_t flags = 0;          ///< General purpose bits; bit 3: a descriptor follows the body.
  bool zip64 = false;               ///< The directory record has a zip64 extra field.

  [[nodiscard]] std::uint64_t body_end() const { return body_offset + size; }
};

struct ZipDirectory {
  std::vector<ArchiveRecord> records;  ///< In file order (ascending header_offset).
  std::uint64_t directory_offset = 0;
  std::uint64_t directory_length = 0;
};

/// Where the body of each record begins follows from its local header, which is not read here: that
/// would be one random read a record. In archives whose records lie back to back it follows from
/// the end of the record as well (end - descriptor - size), which is what body_offset is filled
/// with. Whoever reads a body checks the header in front of it in the same pass (CheckLocalHeader).
///
/// kCorrupt: not a ZIP archive, truncated, or damaged; names what is wrong and where, and, when no
/// end record is found, what the file seems to be instead (empty, all zeros, pickle, tar, gzip,
/// ...; see DescribeForeign). kUnsupportedFile: compressed or encrypted entries, several volumes.
[[nodiscard]] Result<ZipDirectory> ReadZipDirectory(const ByteSource& source);

/// Replaces body_offset by what the local headers say; one small read a record. For archives whose
/// records do not lie back to back.
[[nodiscard]] Result<void> LocateBodies(const ByteSource& source, ZipDirectory& directory);

/// Compares [header_offset, body_offset) with the directory. The error's offset is in the file.
/// A header whose own length leads to another body_offset is reported by SaysOtherBody.
[[nodiscard]] Result<void> CheckLocalHeader(const ArchiveRecord& record,
                                            std::span<const std::byte> header,
                                            const std::string& file);
/// True when the header is one, for this record's name, and its body begins elsewhere than at
/// body_offset: the records do not lie back to back, and LocateBodies is needed.
[[nodiscard]] bool SaysOtherBody(const ArchiveRecord& record, std::span<const std::byte> header);

/// Compares [body_end, end) with the directory: a data descriptor when bit 3 of the flags is set,
/// with or without signature, with 32-bit or 64-bit sizes; otherwise nothing is demanded.
[[nodiscard]] Result<void> CheckDescriptor(const ArchiveRecord& record,
                                           std::span<const std::byte> descriptor,
                                           const std::string& file);

/// What a file that is no ZIP archive seems to be, from its first bytes (as many as there are, up
/// to 512): "is empty", "is a tar archive", "is a pickle (PyTorch before 1.6, or pickle.dump)",
/// ...; the end of a sentence that begins with the file's name.
[[nodiscard]] std::string DescribeForeign(std::span<const std::byte> head, std::uint64_t size);

}  // namespace fastpersist::layout
