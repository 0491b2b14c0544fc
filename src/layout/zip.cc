// SPDX-License-Identifier: Apache-2.0
#include "layout/zip.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <concepts>
#include <cstring>

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

static_assert(std::endian::native == std::endian::little, "ZIP structures are little-endian");

// Writes fields one after the other into bytes that were made room for.
class Fields {
 public:
  Fields(Bytes& out, std::uint64_t length) : at_(out.size()), out_(out) {
    out.resize(at_ + length);
  }
  template <std::unsigned_integral T>
  void Put(T value) {
    std::memcpy(out_.data() + at_, &value, sizeof value);
    at_ += sizeof value;
  }
  void PutText(std::string_view text) {
    std::memcpy(out_.data() + at_, text.data(), text.size());
    at_ += text.size();
  }
  void Fill(std::size_t count, char with) {
    std::memset(out_.data() + at_, with, count);
    at_ += count;
  }

 private:
  std::size_t at_;
  Bytes& out_;
};

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
void PutZip64Extra(const ZipEntry& entry, std::uint64_t stored_size, Fields& out) {
  const std::uint16_t length = Zip64ExtraLength(entry);
  if (length == 0) return;
  out.Put(kZip64ExtraId);
  out.Put(static_cast<std::uint16_t>(length - kExtraFieldHeaderLength));
  if (entry.HasLongSize()) {
    out.Put(entry.size);
    out.Put(stored_size);
  }
  if (entry.HasLongOffset()) out.Put(entry.header_offset);
}

// Of the local header, with an empty padding field.
std::uint64_t UnpaddedLength(const ZipEntry& entry) {
  return kLocalHeaderLength + entry.name.size() + Zip64ExtraLength(entry) + kExtraFieldHeaderLength;
}

}  // namespace

std::uint64_t ZipEntry::DescriptorLength() const {
  if (size == 0) return 0;
  return HasLongSize() || HasLongOffset() ? 24 : 16;
}

std::uint64_t LocalHeaderLength(const ZipEntry& entry, std::uint64_t alignment) {
  return base::AlignUp(entry.header_offset + UnpaddedLength(entry), alignment) -
         entry.header_offset;
}

void AppendLocalHeader(const ZipEntry& entry, std::uint64_t alignment, Bytes& out) {
  assert(base::IsPowerOfTwo(alignment) && alignment <= 32768);
  assert(entry.name.size() <= 0xFFFF);
  const std::uint64_t length = LocalHeaderLength(entry, alignment);
  const auto padding = static_cast<std::uint16_t>(length - UnpaddedLength(entry));
  const std::uint16_t zip64 = Zip64ExtraLength(entry);

  Fields fields(out, length);
  fields.Put(std::uint32_t{0x04034b50});
  fields.Put(std::uint16_t{0});  // version needed
  fields.Put(Flags(entry));
  fields.Put(std::uint16_t{0});  // method: stored
  fields.Put(std::uint32_t{0});  // no time, no date: files are reproducible
  fields.Put(std::uint32_t{0});  // CRC: in the descriptor
  fields.Put(std::uint64_t{0});  // both sizes: in the descriptor
  fields.Put(static_cast<std::uint16_t>(entry.name.size()));
  fields.Put(static_cast<std::uint16_t>(zip64 + kExtraFieldHeaderLength + padding));
  fields.PutText(entry.name);
  PutZip64Extra(entry, /*stored_size=*/0, fields);
  fields.Put(kPaddingExtraId);
  fields.Put(padding);
  fields.Fill(padding, 'Z');
}

void AppendDescriptor(const ZipEntry& entry, std::uint32_t crc, Bytes& out) {
  const std::uint64_t length = entry.DescriptorLength();
  if (length == 0) return;
  Fields fields(out, length);
  fields.Put(kDescriptorSignature);
  fields.Put(crc);
  if (length == 24) {
    fields.Put(entry.size);
    fields.Put(entry.size);
  } else {
    fields.Put(static_cast<std::uint32_t>(entry.size));
    fields.Put(static_cast<std::uint32_t>(entry.size));
  }
}

std::uint64_t DirectoryRecordLength(const ZipEntry& entry) {
  return kDirectoryRecordLength + entry.name.size() + Zip64ExtraLength(entry);
}

void AppendDirectoryRecord(const ZipEntry& entry, std::uint32_t crc, Bytes& out) {
  const auto size = static_cast<std::uint32_t>(std::min<std::uint64_t>(entry.size, kMax32));
  Fields fields(out, DirectoryRecordLength(entry));
  fields.Put(std::uint32_t{0x02014b50});
  fields.Put(std::uint16_t{0});  // version made by
  fields.Put(std::uint16_t{0});  // version needed
  fields.Put(Flags(entry));
  fields.Put(std::uint16_t{0});  // method: stored
  fields.Put(std::uint32_t{0});  // time, date
  fields.Put(crc);
  fields.Put(size);
  fields.Put(size);
  fields.Put(static_cast<std::uint16_t>(entry.name.size()));
  fields.Put(Zip64ExtraLength(entry));
  fields.Put(std::uint16_t{0});  // comment
  fields.Put(std::uint16_t{0});  // disk
  fields.Put(std::uint16_t{0});  // internal attributes
  fields.Put(std::uint32_t{0});  // external attributes
  fields.Put(static_cast<std::uint32_t>(std::min<std::uint64_t>(entry.header_offset, kMax32)));
  fields.PutText(entry.name);
  PutZip64Extra(entry, entry.size, fields);
}

void AppendEndRecords(std::uint64_t entries, std::uint64_t directory_offset,
                      std::uint64_t directory_length, Bytes& out) {
  Fields fields(out, kEndRecordsLength);
  fields.Put(std::uint32_t{0x06064b50});  // zip64 end of central directory
  fields.Put(std::uint64_t{44});          // length of the rest of this record
  fields.Put(std::uint16_t{0x031e});      // version made by
  fields.Put(std::uint16_t{0x002d});      // version needed: 4.5
  fields.Put(std::uint32_t{0});           // this disk
  fields.Put(std::uint32_t{0});           // disk of the directory
  fields.Put(entries);
  fields.Put(entries);
  fields.Put(directory_length);
  fields.Put(directory_offset);

  fields.Put(std::uint32_t{0x07064b50});  // zip64 end locator
  fields.Put(std::uint32_t{0});
  fields.Put(directory_offset + directory_length);
  fields.Put(std::uint32_t{1});  // disks in all

  const auto entries16 = static_cast<std::uint16_t>(std::min<std::uint64_t>(entries, 0xFFFF));
  fields.Put(std::uint32_t{0x06054b50});  // end of central directory
  fields.Put(std::uint16_t{0});
  fields.Put(std::uint16_t{0});
  fields.Put(entries16);
  fields.Put(entries16);
  fields.Put(static_cast<std::uint32_t>(std::min<std::uint64_t>(directory_length, kMax32)));
  fields.Put(static_cast<std::uint32_t>(std::min<std::uint64_t>(directory_offset, kMax32)));
  fields.Put(std::uint16_t{0});  // comment
}

}  // namespace fastpersist::layout
