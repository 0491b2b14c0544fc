// SPDX-License-Identifier: Apache-2.0
#include "layout/torch_container.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/align.h"
#include "layout/serialization_id.h"
#include "layout/zip.h"

namespace fastpersist::layout {
namespace {

constexpr std::string_view kVersionName = "version";
constexpr std::string_view kVersionBody = "3\n";
constexpr std::string_view kByteorderName = "byteorder";
constexpr std::string_view kByteorderBody = "little";
constexpr std::string_view kIdName = ".data/serialization_id";
constexpr std::uint64_t kMaxAlignment = 32768;  // the length of an extra field has 16 bits

// Late extents are numbered: 0 to N-1 the descriptor of that record, N the id, N+1 the directory.
// The id is itself the last record, N-1.
class TorchTail final : public LateBytes {
 public:
  TorchTail(std::vector<ZipEntry> entries, std::uint64_t names_hash)
      : entries_(std::move(entries)), names_hash_(names_hash) {
    for (const ZipEntry& entry : entries_) directory_length_ += DirectoryRecordLength(entry);
  }

  [[nodiscard]] std::uint32_t IdLate() const { return Count(); }
  [[nodiscard]] std::uint32_t DirectoryLate() const { return Count() + 1; }
  [[nodiscard]] std::uint64_t directory_length() const { return directory_length_; }
  void set_directory_offset(std::uint64_t offset) { directory_offset_ = offset; }

  void Render(std::uint32_t late_id, std::span<const RecordDigest> records,
              std::span<std::byte> out) const override {
    Bytes bytes;
    bytes.reserve(out.size());
    if (late_id < Count()) {
      AppendDescriptor(entries_[late_id], records[late_id].crc, bytes);
    } else if (late_id == IdLate()) {
      AppendSerializationId(records, bytes);
    } else {
      AppendDirectory(records, bytes);
    }
    assert(bytes.size() == out.size());
    std::ranges::copy(bytes, out.begin());
  }

  [[nodiscard]] std::optional<std::uint32_t> NeedsOnly(std::uint32_t late_id) const override {
    return late_id < Count() ? std::optional(late_id) : std::nullopt;
  }

 private:
  [[nodiscard]] std::uint32_t Count() const { return static_cast<std::uint32_t>(entries_.size()); }

  void AppendSerializationId(std::span<const RecordDigest> records, Bytes& out) const {
    ChecksumHash checksums;
    for (std::uint32_t i = 0; i + 1 < Count(); ++i) {
      if (entries_[i].size > 0) checksums.Add(entries_[i].size, records[i]);
    }
    const std::string id = FormatSerializationId(names_hash_, checksums.value());
    const auto bytes = std::as_bytes(std::span(id));
    out.insert(out.end(), bytes.begin(), bytes.end());
  }

  void AppendDirectory(std::span<const RecordDigest> records, Bytes& out) const {
    for (std::uint32_t i = 0; i < Count(); ++i) {
      AppendDirectoryRecord(entries_[i], records[i].crc, out);
    }
    AppendEndRecords(Count(), directory_offset_, directory_length_, out);
  }

  std::vector<ZipEntry> entries_;
  std::uint64_t names_hash_;
  std::uint64_t directory_length_ = 0;
  std::uint64_t directory_offset_ = 0;
};

Error Refuse(std::string detail) {
  return {.code = ErrorCode::kInvalidArgument, .operation = "layout", .detail = std::move(detail)};
}

Result<void> Check(std::span<const Record> records, const TorchContainerOptions& options) {
  if (options.prefix.empty()) {
    return std::unexpected(Refuse("the file name has no base name to call the archive after"));
  }
  if (!base::IsPowerOfTwo(options.alignment) || options.alignment > kMaxAlignment) {
    return std::unexpected(Refuse(fmt::format("storage_alignment {} is not a power of two up to {}",
                                              options.alignment, kMaxAlignment)));
  }
  std::unordered_set<std::string_view> names{kVersionName, kIdName};
  for (const Record& record : records) {
    if (!names.insert(record.name).second) {
      return std::unexpected(Refuse(fmt::format("two records are named '{}'", record.name)));
    }
    if (options.prefix.size() + 1 + record.name.size() > 0xFFFF) {
      return std::unexpected(Refuse("a record name is longer than 65,535 bytes"));
    }
  }
  return {};
}

// What torch's writer adds when it closes, the id apart: the version, and the byte order if nobody
// wrote it before. All the records of the file but the id.
std::vector<Record> WithOwnRecords(std::span<const Record> records) {
  std::vector<Record> all(records.begin(), records.end());
  all.push_back(
      {.name = std::string(kVersionName), .body = std::as_bytes(std::span(kVersionBody))});
  if (std::ranges::find(records, kByteorderName, &Record::name) == records.end()) {
    all.push_back(
        {.name = std::string(kByteorderName), .body = std::as_bytes(std::span(kByteorderBody))});
  }
  return all;
}

// Entries with their offsets, the id's included; returns the directory's offset.
std::uint64_t Place(std::span<const Record> records, const TorchContainerOptions& options,
                    std::vector<ZipEntry>& entries) {
  std::uint64_t offset = 0;
  const auto place = [&](std::string_view name, std::uint64_t size) {
    ZipEntry& entry = entries.emplace_back(
        ZipEntry{.name = options.prefix + '/', .size = size, .header_offset = offset});
    entry.name += name;
    offset += LocalHeaderLength(entry, options.alignment) + size + entry.DescriptorLength();
  };
  entries.reserve(records.size() + 1);
  for (const Record& record : records) place(record.name, record.size());
  place(kIdName, kSerializationIdLength);
  return offset;
}

std::uint64_t NamesHash(std::span<const Record> records) {
  std::vector<std::string_view> names;
  names.reserve(records.size());
  for (const Record& record : records) names.push_back(record.name);
  return HashRecordNames(names);
}

}  // namespace

Result<Stream> LayOutTorchContainer(std::span<const Record> given,
                                    const TorchContainerOptions& options) {
  if (auto checked = Check(given, options); !checked) return std::unexpected(checked.error());
  const std::vector<Record> records = WithOwnRecords(given);
  std::vector<ZipEntry> entries;
  const std::uint64_t directory_offset = Place(records, options, entries);

  StreamBuilder builder;
  std::uint64_t elsewhere = 0;
  for (const Record& record : records) {
    if (record.in_memory || record.pulled) elsewhere += record.size();
  }
  builder.Reserve(3 * entries.size() + 1, directory_offset - elsewhere);
  Bytes header;
  const auto add_header = [&](std::uint32_t i) {
    assert(builder.offset() == entries[i].header_offset);
    header.clear();
    AppendLocalHeader(entries[i], options.alignment, header);
    builder.AddGenerated(header);
  };

  const auto id = static_cast<std::uint32_t>(records.size());
  for (std::uint32_t i = 0; i < id; ++i) {
    // From the version on torch's writer is closing the file.
    if (i == given.size()) builder.BeginTail();
    add_header(i);
    if (records[i].pulled) {
      builder.AddPulled(*records[i].pulled, i);
    } else if (records[i].in_memory) {
      builder.AddMemory(records[i].body, i);
    } else {
      builder.AddGenerated(records[i].body, i);
    }
    builder.AddLate(entries[i].DescriptorLength(), i);
    if (i == 0) builder.EndHead();  // the pickle, which is torch's first record
  }
  add_header(id);
  auto tail = std::make_shared<TorchTail>(entries, NamesHash(records));
  tail->set_directory_offset(directory_offset);
  builder.AddLate(kSerializationIdLength, tail->IdLate(), id);
  builder.AddLate(entries[id].DescriptorLength(), id);
  assert(builder.offset() == directory_offset);
  builder.AddLate(tail->directory_length() + kEndRecordsLength, tail->DirectoryLate());
  return std::move(builder).Finish(id + 1, std::move(tail));
}

std::string ArchivePrefix(std::string_view path) {
  const auto is_ascii = [](char c) { return static_cast<unsigned char>(c) < 0x80; };
  if (!std::ranges::all_of(path, is_ascii)) return "archive";
  const std::size_t slash = path.find_last_of("/\\");
  std::string_view name = slash == std::string_view::npos ? path : path.substr(slash + 1);
  if (const std::size_t dot = name.find_last_of('.'); dot != std::string_view::npos) {
    name = name.substr(0, dot);
  }
  return std::string(name);
}

}  // namespace fastpersist::layout
