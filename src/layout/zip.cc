// SPDX-License-Identifier: Apache-2.0
#include "layout/zip.h"

#include <algorithm>
#include <cassert>
#include <concepts>

#include "base/align.h"

namespace fastpersist::layout {
namespace {

constexpr std::uint32_t kMax32 = 0xFFFFFFFFU;
constexpr std::uint64_t kLocalHeaderLength = 30;
constexpr std::uint64_t kDirectoryRecordLength = 46;
constexpr std::uint64_t kExtraFieldHeaderLength = 4;
// Bit 11: names are UTF-8. Bit 3: CRC and sizes follow the body in a descriptor.
constexpr std::uint16_t kFlagUtf8 = 0x0800;
constexpr std::uint16_t kFlagDescriptor = 0x0008;
constexpr std::uint16_t kZip64ExtraId = 0x0001;
constexpr std::uint16_t kPaddingExtraId = 0x4246;  // "FB"

template <std::unsigned_integral T>
void Put(Bytes& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    out.push_back(static_cast<std::byte>(value >> (8 * i)));
  }
}

void PutText(Bytes& out, std::string_view text) {
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  out.insert(out.end(), bytes, bytes + text.size());
}

std::uint16_t Flags(const ZipEntry& entry) {
  return entry.size == 0 ? kFlagUtf8 : kFlagUtf8 | kFlagDescriptor;
}

std::uint16_t Zip64ExtraLength(const ZipEntry& entry) {
  if (!entry.HasLongSize() && !entry.HasLongOffset()) return 0;
  return static_cast<std::uint16_t>(kExtraFieldHeaderLength + (entry.HasLongSize() ? 16 : 0) +
                                    (entry.HasLongOffset() ? 8 : 0));
}

// The local header is written before the body, when torch's writer has stored nothing yet: its
// stored size is 0. In the directory both sizes are the real one.
void PutZip64Extra(const ZipEntry& entry, std::uint64_t stored_size, Bytes& out) {
  const std::uint16_t length = Zip64ExtraLength(entry);
  if (length == 0) return;
  Put(out, kZip64ExtraId);
  Put(out, static_cast<std::uint16_t>(length - kExtraFieldHeaderLength));
  if (entry.HasLongSize()) {
    Put(out, entry.size);
    Put(out, stored_size);
  }
  if (entry.HasLongOffset()) Put(out, entry.header_offset);
}

}  // namespace

std::uint64_t ZipEntry::DescriptorLength() const {
  if (size == 0) return 0;
  return HasLongSize() || HasLongOffset() ? 24 : 16;
}

void AppendLocalHeader(const ZipEntry& entry, std::uint64_t alignment, Bytes& out) {
  assert(base::IsPowerOfTwo(alignment) && alignment <= 32768);
  assert(entry.name.size() <= 0xFFFF);
  const std::uint16_t zip64 = Zip64ExtraLength(entry);
  const std::uint64_t unpadded = entry.header_offset + kLocalHeaderLength + entry.name.size() +
                                 zip64 + kExtraFieldHeaderLength;
  const auto padding = static_cast<std::uint16_t>(base::AlignUp(unpadded, alignment) - unpadded);

  Put(out, std::uint32_t{0x04034b50});
  Put(out, std::uint16_t{0});  // version needed
  Put(out, Flags(entry));
  Put(out, std::uint16_t{0});  // method: stored
  Put(out, std::uint32_t{0});  // no time, no date: files are reproducible
  Put(out, std::uint32_t{0});  // CRC: in the descriptor
  Put(out, std::uint64_t{0});  // both sizes: in the descriptor
  Put(out, static_cast<std::uint16_t>(entry.name.size()));
  Put(out, static_cast<std::uint16_t>(zip64 + kExtraFieldHeaderLength + padding));
  PutText(out, entry.name);
  PutZip64Extra(entry, /*stored_size=*/0, out);
  Put(out, kPaddingExtraId);
  Put(out, padding);
  out.insert(out.end(), padding, std::byte{'Z'});
}

void AppendDescriptor(const ZipEntry& entry, std::uint32_t crc, Bytes& out) {
  const std::uint64_t length = entry.DescriptorLength();
  if (length == 0) return;
  Put(out, kDescriptorSignature);
  Put(out, crc);
  if (length == 24) {
    Put(out, entry.size);
    Put(out, entry.size);
  } else {
    Put(out, static_cast<std::uint32_t>(entry.size));
    Put(out, static_cast<std::uint32_t>(entry.size));
  }
}

std::uint64_t DirectoryRecordLength(const ZipEntry& entry) {
  return kDirectoryRecordLength + entry.name.size() + Zip64ExtraLength(entry);
}

void AppendDirectoryRecord(const ZipEntry& entry, std::uint32_t crc, Bytes& out) {
  const auto size = static_cast<std::uint32_t>(std::min<std::uint64_t>(entry.size, kMax32));
  Put(out, std::uint32_t{0x02014b50});
  Put(out, std::uint16_t{0});  // version made by
  Put(out, std::uint16_t{0});  // version needed
  Put(out, Flags(entry));
  Put(out, std::uint16_t{0});  // method: stored
  Put(out, std::uint32_t{0});  // time, date
  Put(out, crc);
  Put(out, size);
  Put(out, size);
  Put(out, static_cast<std::uint16_t>(entry.name.size()));
  Put(out, Zip64ExtraLength(entry));
  Put(out, std::uint16_t{0});  // comment
  Put(out, std::uint16_t{0});  // disk
  Put(out, std::uint16_t{0});  // internal attributes
  Put(out, std::uint32_t{0});  // external attributes
  Put(out, static_cast<std::uint32_t>(std::min<std::uint64_t>(entry.header_offset, kMax32)));
  PutText(out, entry.name);
  PutZip64Extra(entry, entry.size, out);
}

void AppendEndRecords(std::uint64_t entries, std::uint64_t directory_offset,
                      std::uint64_t directory_length, Bytes& out) {
  Put(out, std::uint32_t{0x06064b50});  // zip64 end of central directory
  Put(out, std::uint64_t{44});          // length of the rest of this record
  Put(out, std::uint16_t{0x031e});      // version made by
  Put(out, std::uint16_t{0x002d});      // version needed: 4.5
  Put(out, std::uint32_t{0});           // this disk
  Put(out, std::uint32_t{0});           // disk of the directory
  Put(out, entries);
  Put(out, entries);
  Put(out, directory_length);
  Put(out, directory_offset);

  Put(out, std::uint32_t{0x07064b50});  // zip64 end locator
  Put(out, std::uint32_t{0});
  Put(out, directory_offset + directory_length);
  Put(out, std::uint32_t{1});  // disks in all

  const auto entries16 = static_cast<std::uint16_t>(std::min<std::uint64_t>(entries, 0xFFFF));
  Put(out, std::uint32_t{0x06054b50});  // end of central directory
  Put(out, std::uint16_t{0});
  Put(out, std::uint16_t{0});
  Put(out, entries16);
  Put(out, entries16);
  Put(out, static_cast<std::uint32_t>(std::min<std::uint64_t>(directory_length, kMax32)));
  Put(out, static_cast<std::uint32_t>(std::min<std::uint64_t>(directory_offset, kMax32)));
  Put(out, std::uint16_t{0});  // comment
}

}  // namespace fastpersist::layout
