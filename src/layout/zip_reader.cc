// SPDX-License-Identifier: Apache-2.0
// The central directory. The end records are read in zip_ends.cc, the frames around bodies in
// zip_frames.cc.
#include "layout/zip_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/utf8.h"
#include "layout/zip_parse.h"

namespace fastpersist::layout {
namespace {

constexpr std::uint32_t kRecordSignature = 0x02014b50;
// Bits 0, 6 and 13 of the flags: encrypted, strongly encrypted, directory masked.
constexpr std::uint16_t kEncrypted = 0x0001 | 0x0040 | 0x2000;
constexpr std::uint64_t kLongestExtra = 0xFFFF;

std::string MethodName(std::uint16_t method) {
  switch (method) {
    case 8:
      return "deflate";
    case 9:
      return "deflate64";
    case 12:
      return "bzip2";
    case 14:
      return "lzma";
    case 93:
      return "zstd";
    case 95:
      return "xz";
    default:
      return fmt::format("method {}", method);
  }
}

// The central directory, one record after the other.
class DirectoryParser {
 public:
  DirectoryParser(const std::string& file, std::uint64_t offset, std::span<const std::byte> bytes)
      : file_(file), offset_(offset), bytes_(bytes) {}

  [[nodiscard]] std::uint64_t rest() const { return bytes_.size() - at_; }

  Result<ArchiveRecord> Next() {
    const std::uint64_t begin = at_;
    if (rest() < kDirectoryRecordLength)
      return Wrong(0, "the directory ends before its last record");
    if (Field<std::uint32_t>(0) != kRecordSignature) {
      return Wrong(0, "a record of the directory has no signature");
    }
    const auto name = Field<std::uint16_t>(28);
    const auto extra = Field<std::uint16_t>(30);
    const std::uint64_t length = kDirectoryRecordLength + name + extra + Field<std::uint16_t>(32);
    if (length > rest()) return Wrong(28, "a record of the directory reaches beyond its end");

    const auto text = bytes_.subspan(begin + kDirectoryRecordLength, name);
    ArchiveRecord record{.name = {reinterpret_cast<const char*>(text.data()), text.size()},
                         .header_offset = Field<std::uint32_t>(42),
                         .size = Field<std::uint32_t>(24),
                         .crc = Field<std::uint32_t>(16),
                         .flags = Field<std::uint16_t>(8)};
    if (auto good = CheckName(record.name); !good) return std::unexpected(std::move(good.error()));
    if (auto good = CheckKind(record); !good) return std::unexpected(std::move(good.error()));
    if (auto good = Lengthen(record, bytes_.subspan(begin + kDirectoryRecordLength + name, extra));
        !good) {
      return std::unexpected(std::move(good.error()));
    }
    at_ += length;
    return record;
  }

  // Of the bytes `at` in the current record.
  [[nodiscard]] std::unexpected<Error> Wrong(std::uint64_t at, std::string detail,
                                             std::string_view entry = {}) const {
    return std::unexpected(Damaged(file_, offset_ + at_ + at, std::move(detail), entry));
  }

 private:
  template <std::unsigned_integral T>
  [[nodiscard]] T Field(std::uint64_t at) const {
    return FieldAt<T>(bytes_, at_ + at);
  }

  [[nodiscard]] Result<void> CheckName(const std::string& name) const {
    std::string_view fault;
    if (name.empty()) {
      fault = "is empty";
    } else if (name.front() == '/') {
      fault = "begins with a slash";
    } else if (name.contains('\0')) {
      fault = "contains a zero byte";
    } else if (!base::IsUtf8(name)) {
      fault = "is not UTF-8";
    } else {
      return {};
    }
    return Wrong(kDirectoryRecordLength,
                 fmt::format("an entry is named {}, which {}", Quoted(name), fault));
  }

  [[nodiscard]] Result<void> CheckKind(const ArchiveRecord& record) const {
    const auto refuse = [&](std::uint64_t at, std::string_view what, std::string advice) {
      return std::unexpected(Unsupported(file_, offset_ + at_ + at,
                                         fmt::format("{} {}", Quoted(record.name), what),
                                         std::move(advice), record.name));
    };
    if ((record.flags & kEncrypted) != 0) {
      return refuse(8, "is encrypted", "decrypt the archive");
    }
    if (const auto method = Field<std::uint16_t>(10); method != 0) {
      return refuse(10, fmt::format("is compressed ({})", MethodName(method)),
                    "checkpoints are stored: pack it again without compression (zip -0)");
    }
    if (const auto disk = Field<std::uint16_t>(34); disk != 0) {
      return refuse(34, fmt::format("lies in volume {} of several", disk + 1),
                    "join the volumes to one archive (zip -s 0)");
    }
    return {};
  }

  // Takes what does not fit 32 bits from the zip64 field, and compares the sizes.
  [[nodiscard]] Result<void> Lengthen(ArchiveRecord& record,
                                      std::span<const std::byte> extra) const {
    const std::uint64_t extra_at = kDirectoryRecordLength + record.name.size();
    const auto wrong = [&](std::uint64_t at, std::string_view what) {
      return Wrong(at,
                   fmt::format("the record of {} in the directory {}", Quoted(record.name), what),
                   record.name);
    };
    const ExtraFields fields = ParseExtraFields(extra);
    if (!fields.well_formed) return wrong(extra_at, "has extra fields that overrun their length");
    record.zip64 = fields.zip64.has_value();
    std::span<const std::byte> values = fields.zip64.value_or(std::span<const std::byte>{});
    std::uint64_t stored_size = Field<std::uint32_t>(20);
    for (std::uint64_t* value : {&record.size, &stored_size, &record.header_offset}) {
      if (*value != kLongField) continue;
      if (values.size() < sizeof *value) return wrong(extra_at, "lacks a value in its zip64 field");
      *value = FieldAt<std::uint64_t>(values, 0);
      values = values.subspan(sizeof *value);
    }
    if (!values.empty()) return wrong(extra_at, "has a zip64 field that is too long");
    if (stored_size != record.size) {
      return wrong(20,
                   fmt::format("says that {} bytes are stored as {}", record.size, stored_size));
    }
    return {};
  }

  const std::string& file_;
  std::uint64_t offset_;
  std::span<const std::byte> bytes_;
  std::uint64_t at_ = 0;
};

// In file order. Most archives are in order already.
void Sort(std::vector<ArchiveRecord>& records) {
  if (std::ranges::is_sorted(records, {}, &ArchiveRecord::header_offset)) return;
  std::ranges::sort(records, {}, &ArchiveRecord::header_offset);
}

Result<void> CheckNamesDiffer(const std::string& file, const std::vector<ArchiveRecord>& records) {
  // Sorted rather than hashed: a file cannot choose names that make it slow.
  std::vector<const ArchiveRecord*> by_name;
  by_name.reserve(records.size());
  for (const ArchiveRecord& record : records) by_name.push_back(&record);
  const auto name = [](const ArchiveRecord* record) -> const std::string& { return record->name; };
  std::ranges::sort(by_name, {}, name);
  const auto twice = std::ranges::adjacent_find(by_name, {}, name);
  if (twice == by_name.end()) return {};
  const ArchiveRecord& record = **twice;
  return std::unexpected(
      Damaged(file, std::max(record.header_offset, (*std::next(twice))->header_offset),
              fmt::format("two entries are named {}", Quoted(record.name)), record.name));
}

// As torch and most writers do it; where they do not, the local header says so.
std::uint64_t LikelyDescriptorLength(const ArchiveRecord& record) {
  if ((record.flags & kDescriptorFollows) == 0) return 0;
  return record.size >= kLongField || record.header_offset >= kLongField ? 24 : 16;
}

// Fills in end and body_offset. Records are in file order.
Result<void> Place(const std::string& file, ZipDirectory& directory) {
  std::vector<ArchiveRecord>& records = directory.records;
  const std::uint64_t first =
      records.empty() ? directory.directory_offset : records.front().header_offset;
  if (first != 0) {
    return std::unexpected(
        Damaged(file, 0, fmt::format("{} bytes precede the first entry of the archive", first)));
  }
  for (std::size_t i = 0; i < records.size(); ++i) {
    ArchiveRecord& record = records[i];
    const bool last = i + 1 == records.size();
    record.end = last ? directory.directory_offset : records[i + 1].header_offset;
    const std::uint64_t shortest = kFixedHeaderLength + record.name.size();
    if (record.header_offset > record.end || shortest > record.end - record.header_offset ||
        record.size > record.end - record.header_offset - shortest) {
      return std::unexpected(
          Damaged(file, record.header_offset,
                  fmt::format("{}, with {} bytes, overlaps {} at offset {}", Quoted(record.name),
                              record.size, last ? "the directory" : Quoted(records[i + 1].name),
                              record.end),
                  record.name));
    }
    const std::uint64_t slack = record.end - record.header_offset - shortest - record.size;
    const std::uint64_t descriptor = LikelyDescriptorLength(record);
    record.body_offset = record.header_offset + shortest;
    // More than the extra fields can be: not back to back, and the local header will say so.
    if (slack >= descriptor && slack - descriptor <= kLongestExtra) {
      record.body_offset += slack - descriptor;
    }
  }
  return {};
}

}  // namespace

Result<ZipDirectory> ReadZipDirectory(const ByteSource& source) {
  const Result<DirectoryPlace> place = FindDirectory(source);
  if (!place) return std::unexpected(place.error());
  std::vector<std::byte> bytes(static_cast<std::size_t>(place->length));
  if (auto read = source.Read(place->offset, bytes); !read) {
    return std::unexpected(std::move(read.error()));
  }

  ZipDirectory directory{
      .records = {}, .directory_offset = place->offset, .directory_length = place->length};
  directory.records.reserve(static_cast<std::size_t>(place->entries));
  DirectoryParser parser(source.name(), place->offset, bytes);
  for (std::uint64_t i = 0; i < place->entries; ++i) {
    Result<ArchiveRecord> record = parser.Next();
    if (!record) return std::unexpected(std::move(record.error()));
    directory.records.push_back(std::move(*record));
  }
  if (parser.rest() != 0) {
    return parser.Wrong(
        0, fmt::format("{} bytes follow the last of the {} records of the directory", parser.rest(),
                       place->entries));
  }
  Sort(directory.records);
  if (auto placed = Place(source.name(), directory); !placed) {
    return std::unexpected(std::move(placed.error()));
  }
  if (auto differ = CheckNamesDiffer(source.name(), directory.records); !differ) {
    return std::unexpected(std::move(differ.error()));
  }
  return directory;
}

}  // namespace fastpersist::layout
