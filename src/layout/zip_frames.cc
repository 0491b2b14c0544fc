// SPDX-License-Identifier: Apache-2.0
// The frames around bodies: local header and data descriptor (see zip_reader.h). What torch writes
// there and the standard does not foresee: sizes of 0 beside a zip64 field that holds the size, a
// stored size of 0, and perhaps the offset of the header.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "layout/zip.h"
#include "layout/zip_parse.h"
#include "layout/zip_reader.h"

namespace fastpersist::layout {
namespace {

// Offsets in a local header.
constexpr std::uint64_t kFlagsAt = 6;
constexpr std::uint64_t kMethodAt = 8;
constexpr std::uint64_t kCrcAt = 14;
constexpr std::uint64_t kStoredSizeAt = 18;
constexpr std::uint64_t kSizeAt = 22;
constexpr std::uint64_t kNameLengthAt = 26;
constexpr std::uint64_t kExtraLengthAt = 28;

std::string_view TextOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::unexpected<Error> WrongHeader(const ArchiveRecord& record, const std::string& file,
                                   std::uint64_t at, std::string_view what) {
  return std::unexpected(
      Damaged(file, record.header_offset + at,
              fmt::format("the local header of {} {}", Quoted(record.name), what), record.name));
}

// Signature and length of the name; the fixed part must be there.
Result<void> CheckFixedPart(const ArchiveRecord& record, std::span<const std::byte> fixed,
                            const std::string& file) {
  if (FieldAt<std::uint32_t>(fixed, 0) != kLocalHeaderSignature) {
    return WrongHeader(record, file, 0, "has no signature");
  }
  const auto length = FieldAt<std::uint16_t>(fixed, kNameLengthAt);
  if (length != record.name.size()) {
    return WrongHeader(record, file, kNameLengthAt,
                       fmt::format("has a name of {} bytes, where the directory has one of {}",
                                   length, record.name.size()));
  }
  return {};
}

std::uint64_t HeaderLength(std::span<const std::byte> fixed) {
  return kFixedHeaderLength + FieldAt<std::uint16_t>(fixed, kNameLengthAt) +
         FieldAt<std::uint16_t>(fixed, kExtraLengthAt);
}

// A header that is written before its body has zeros here, and a descriptor behind the body.
bool IsSizeOf(const ArchiveRecord& record, std::uint64_t value) {
  return value == record.size || (value == 0 && (record.flags & kDescriptorFollows) != 0);
}

Result<void> CheckSizes(const ArchiveRecord& record, std::span<const std::byte> header,
                        const std::string& file) {
  const std::uint64_t extra_at = kFixedHeaderLength + record.name.size();
  const ExtraFields extra = ParseExtraFields(header.subspan(extra_at));
  if (!extra.well_formed) {
    return WrongHeader(record, file, extra_at, "has extra fields that do not end where they must");
  }
  std::span<const std::byte> values = extra.zip64.value_or(std::span<const std::byte>{});
  const auto offset_of = [&](std::span<const std::byte> rest) {
    return static_cast<std::uint64_t>(rest.data() - header.data());
  };
  // Size before stored size: the order of the zip64 field.
  std::span<const std::byte> unread = values;
  for (const std::uint64_t at : {kSizeAt, kStoredSizeAt}) {
    std::uint64_t size = FieldAt<std::uint32_t>(header, at);
    if (size == kLongField) {
      if (unread.size() < sizeof size) {
        return WrongHeader(record, file, at, "has a long size and no zip64 field for it");
      }
      size = FieldAt<std::uint64_t>(unread, 0);
      unread = unread.subspan(sizeof size);
    }
    if (!IsSizeOf(record, size)) {
      return WrongHeader(record, file, at,
                         fmt::format("has the size {}, the directory has {}", size, record.size));
    }
  }
  for (; !values.empty(); values = values.subspan(sizeof(std::uint64_t))) {
    const bool whole = values.size() >= sizeof(std::uint64_t);
    const std::uint64_t value = whole ? FieldAt<std::uint64_t>(values, 0) : 0;
    if (!whole || (value != 0 && value != record.size && value != record.header_offset)) {
      return WrongHeader(record, file, offset_of(values), "has a wrong zip64 field");
    }
  }
  return {};
}

// A data descriptor in one of its forms.
struct DescriptorForm {
  std::size_t crc_at;  // 4 behind a signature, else 0
  bool long_sizes;     // 8 bytes each
  [[nodiscard]] std::size_t length() const { return crc_at + (long_sizes ? 20U : 12U); }
};

bool Matches(const ArchiveRecord& record, std::span<const std::byte> bytes, DescriptorForm form) {
  if (bytes.size() < form.length()) return false;
  if (form.crc_at != 0 && FieldAt<std::uint32_t>(bytes, 0) != kDescriptorSignature) return false;
  if (FieldAt<std::uint32_t>(bytes, form.crc_at) != record.crc) return false;
  const std::size_t sizes_at = form.crc_at + sizeof(std::uint32_t);
  if (form.long_sizes) {
    return FieldAt<std::uint64_t>(bytes, sizes_at) == record.size &&
           FieldAt<std::uint64_t>(bytes, sizes_at + 8) == record.size;
  }
  return FieldAt<std::uint32_t>(bytes, sizes_at) == record.size &&
         FieldAt<std::uint32_t>(bytes, sizes_at + 4) == record.size;
}

}  // namespace

Result<void> LocateBodies(const ByteSource& source, ZipDirectory& directory) {
  std::array<std::byte, kFixedHeaderLength> fixed{};
  for (ArchiveRecord& record : directory.records) {
    if (auto read = source.Read(record.header_offset, fixed); !read) return read;
    if (auto good = CheckFixedPart(record, fixed, source.name()); !good) return good;
    const std::uint64_t room = record.end - record.header_offset;
    const std::uint64_t length = HeaderLength(fixed);
    if (length > room || record.size > room - length) {
      return WrongHeader(record, source.name(), kExtraLengthAt,
                         fmt::format("leaves no room for the body of {} bytes", record.size));
    }
    record.body_offset = record.header_offset + length;
  }
  return {};
}

bool SaysOtherBody(const ArchiveRecord& record, std::span<const std::byte> header) {
  const std::uint64_t with_name = kFixedHeaderLength + record.name.size();
  return header.size() >= with_name && FieldAt<std::uint32_t>(header, 0) == kLocalHeaderSignature &&
         FieldAt<std::uint16_t>(header, kNameLengthAt) == record.name.size() &&
         TextOf(header.subspan(kFixedHeaderLength, record.name.size())) == record.name &&
         HeaderLength(header) != header.size();
}

Result<void> CheckLocalHeader(const ArchiveRecord& record, std::span<const std::byte> header,
                              const std::string& file) {
  if (header.size() < kFixedHeaderLength + record.name.size()) {
    return WrongHeader(record, file, 0, "is cut short");
  }
  if (auto good = CheckFixedPart(record, header, file); !good) return good;
  if (TextOf(header.subspan(kFixedHeaderLength, record.name.size())) != record.name) {
    return WrongHeader(record, file, kFixedHeaderLength, "has another name than the directory");
  }
  if (HeaderLength(header) != header.size()) {
    return WrongHeader(record, file, kExtraLengthAt,
                       fmt::format("is {} bytes long, and the body begins behind {}",
                                   HeaderLength(header), header.size()));
  }
  const auto flags = FieldAt<std::uint16_t>(header, kFlagsAt);
  if (flags != record.flags) {
    return WrongHeader(
        record, file, kFlagsAt,
        fmt::format("has the flags {:#06x}, the directory has {:#06x}", flags, record.flags));
  }
  if (const auto method = FieldAt<std::uint16_t>(header, kMethodAt); method != 0) {
    return WrongHeader(record, file, kMethodAt,
                       fmt::format("has the method {}, the directory has 0 (stored)", method));
  }
  const auto crc = FieldAt<std::uint32_t>(header, kCrcAt);
  if (crc != record.crc && (crc != 0 || (record.flags & kDescriptorFollows) == 0)) {
    return WrongHeader(
        record, file, kCrcAt,
        fmt::format("has the CRC-32 {:08x}, the directory has {:08x}", crc, record.crc));
  }
  return CheckSizes(record, header, file);
}

Result<void> CheckDescriptor(const ArchiveRecord& record, std::span<const std::byte> descriptor,
                             const std::string& file) {
  if ((record.flags & kDescriptorFollows) == 0) return {};
  constexpr std::array<DescriptorForm, 4> kForms{{{.crc_at = 4, .long_sizes = false},
                                                  {.crc_at = 4, .long_sizes = true},
                                                  {.crc_at = 0, .long_sizes = false},
                                                  {.crc_at = 0, .long_sizes = true}}};
  const auto matches = [&](DescriptorForm form) { return Matches(record, descriptor, form); };
  if (std::ranges::any_of(kForms, matches)) return {};

  const auto wrong = [&](std::uint64_t at, std::string_view what) {
    return std::unexpected(Damaged(
        file, record.body_end() + at,
        fmt::format("the data descriptor of {} {}", Quoted(record.name), what), record.name));
  };
  if (descriptor.size() < 16) return wrong(0, "is cut short, or does not agree with the directory");
  if (FieldAt<std::uint32_t>(descriptor, 0) != kDescriptorSignature) {
    return wrong(0, "has no signature, or does not agree with the directory");
  }
  if (const auto crc = FieldAt<std::uint32_t>(descriptor, 4); crc != record.crc) {
    return wrong(4,
                 fmt::format("has the CRC-32 {:08x}, the directory has {:08x}", crc, record.crc));
  }
  return wrong(8, fmt::format("has sizes other than the {} bytes of the directory", record.size));
}

}  // namespace fastpersist::layout
