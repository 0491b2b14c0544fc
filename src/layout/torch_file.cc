// SPDX-License-Identifier: Apache-2.0
// ReadTorchFile of contents.h: the archive's directory, the small records with their checksums, and
// the storages. No tensor data is read.
//
// Source: torch/serialization.py (_load) and caffe2/serialize/inline_container.cc, which read the
// same.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <span>
#include <string_view>
#include <utility>

#include "base/crc32.h"
#include "layout/contents.h"
#include "layout/short_text.h"
#include "layout/torch_tensors.h"

namespace fastpersist::layout {
namespace {

constexpr std::size_t kNameLimit = 200;
constexpr std::uint64_t kMaxPickle = std::uint64_t{4} << 30U;
constexpr std::uint64_t kMaxSmallRecord = std::uint64_t{1} << 20U;
// Fixed part, name and extra field; both lengths have 16 bits.
constexpr std::uint64_t kMaxLocalHeader = 30 + 2 * 0xFFFF;
constexpr std::string_view kPickleName = "/data.pkl";

std::unexpected<Error> Refuse(const ByteSource& source, ErrorCode code, std::string detail,
                              std::string advice = {}) {
  return std::unexpected(Error{.code = code,
                               .operation = "read",
                               .path = source.name(),
                               .detail = std::move(detail),
                               .advice = std::move(advice)});
}

bool Has(const ZipDirectory& archive, std::string_view ending) {
  return std::ranges::any_of(
      archive.records, [&](const ArchiveRecord& record) { return record.name.ends_with(ending); });
}

// torch.serialization.set_crc32_options(False) writes 0 for every record.
bool HasChecksums(const ZipDirectory& archive) {
  return std::ranges::any_of(archive.records, [](const ArchiveRecord& record) {
    return record.size > 0 && record.crc != 0;
  });
}

// An archive without data.pkl: what it is instead.
std::unexpected<Error> RefuseForeignArchive(const ByteSource& source, const ZipDirectory& archive) {
  if (Has(archive, ".npy")) {
    return Refuse(source, ErrorCode::kUnsupportedFile, "is a NumPy .npz file",
                  "read it with NumPy");
  }
  if (Has(archive, "[Content_Types].xml")) {
    return Refuse(source, ErrorCode::kUnsupportedFile, "is an office document");
  }
  if (Has(archive, "META-INF/MANIFEST.MF")) {
    return Refuse(source, ErrorCode::kUnsupportedFile, "is a Java archive");
  }
  std::string names;
  for (std::size_t i = 0; i < archive.records.size() && i < 3; ++i) {
    names += fmt::format("{}'{}'", i == 0 ? "" : ", ", Shortened(archive.records[i].name, 60));
  }
  return Refuse(source, ErrorCode::kCorrupt,
                fmt::format("is a zip archive without data.pkl: no checkpoint (it holds {} "
                            "entries{}{}{})",
                            archive.records.size(), names.empty() ? "" : ": ", names,
                            archive.records.size() > 3 ? ", ..." : ""));
}

// The part of the record names before the first slash, which torch calls the archive's name.
Result<std::string> FindPrefix(const ByteSource& source, const ZipDirectory& archive) {
  for (const ArchiveRecord& record : archive.records) {
    if (!record.name.ends_with(kPickleName)) continue;
    const std::string_view prefix =
        std::string_view(record.name).substr(0, record.name.size() - kPickleName.size());
    if (!prefix.contains('/')) return std::string(prefix);
  }
  return RefuseForeignArchive(source, archive);
}

class SmallRecords {
 public:
  SmallRecords(const ByteSource& source, Contents& contents)
      : source_(source), contents_(contents) {}

  [[nodiscard]] const ArchiveRecord* Find(std::string_view name) const {
    const std::string full = fmt::format("{}/{}", contents_.prefix, name);
    const auto& records = contents_.archive.records;
    const auto at = std::ranges::find(records, full, &ArchiveRecord::name);
    return at == records.end() ? nullptr : &*at;
  }

  // The body, its checksum compared; nullopt if there is no such record.
  Result<std::optional<std::string>> Read(std::string_view name, std::uint64_t limit) {
    const ArchiveRecord* record = Find(name);
    if (record == nullptr) return std::nullopt;
    if (record->size > limit) {
      return Corrupt(*record, fmt::format("entry '{}' has {} bytes; at most {} make sense",
                                          Shown(*record), record->size, limit));
    }
    if (auto checked = CheckHeader(*record); !checked) {
      return std::unexpected(std::move(checked.error()));
    }
    std::string body(record->size, '\0');
    const auto bytes = std::as_writable_bytes(std::span(body));
    if (auto read = source_.Read(record->body_offset, bytes); !read) {
      return std::unexpected(std::move(read.error()));
    }
    if (const std::uint32_t found = base::Crc32(bytes);
        contents_.checksums && found != record->crc) {
      auto refused = Corrupt(*record, fmt::format("entry '{}' is damaged: its checksum is {:08x} "
                                                  "and should be {:08x}",
                                                  Shown(*record), found, record->crc));
      refused.error().expected_crc = record->crc;
      refused.error().found_crc = found;
      return refused;
    }
    return body;
  }

 private:
  static std::string Shown(const ArchiveRecord& record) {
    return Shortened(record.name, kNameLimit);
  }
  [[nodiscard]] std::unexpected<Error> Corrupt(const ArchiveRecord& record,
                                               std::string detail) const {
    auto refused = Refuse(source_, ErrorCode::kCorrupt, std::move(detail));
    refused.error().offset = record.body_offset;
    refused.error().entry = Shown(record);
    return refused;
  }

  // The record's body_offset may be another one afterwards.
  Result<void> CheckHeader(const ArchiveRecord& record) {
    for (;;) {
      const std::uint64_t length = record.body_offset - record.header_offset;
      std::vector<std::byte> header(std::min(length, kMaxLocalHeader));
      if (auto read = source_.Read(record.header_offset, header); !read) return read;
      if (located_ || !SaysOtherBody(record, header)) {
        return CheckLocalHeader(record, header, source_.name());
      }
      if (auto located = LocateBodies(source_, contents_.archive); !located) return located;
      located_ = true;
    }
  }

  const ByteSource& source_;
  Contents& contents_;
  bool located_ = false;
};

std::string_view Trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const auto first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

Result<void> ReadSettings(const ByteSource& source, SmallRecords& records, Contents& contents) {
  struct Setting {
    std::string_view name;
    std::string text;
    bool present;
  };
  Setting settings[] = {{"byteorder", {}, false},
                        {".storage_alignment", {}, false},
                        {".format_version", {}, false},
                        {"version", {}, false},
                        {".data/serialization_id", {}, false}};
  for (Setting& setting : settings) {
    auto text = records.Read(setting.name, kMaxSmallRecord);
    if (!text) return std::unexpected(std::move(text.error()));
    setting.present = text->has_value();
    if (setting.present) setting.text = std::move(**text);
  }
  const auto& [byteorder, alignment, format, version, id] = settings;
  if (byteorder.present) {
    contents.byteorder = byteorder.text;
    if (byteorder.text != "little" && byteorder.text != "big") {
      return Refuse(source, ErrorCode::kCorrupt,
                    fmt::format("has byteorder '{}', which is neither little nor big",
                                Shortened(byteorder.text, 40)));
    }
  }
  if (alignment.present) {
    const std::string_view text = Trimmed(alignment.text);
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), contents.alignment);
    if (error != std::errc() || end != text.data() + text.size()) {
      return Refuse(source, ErrorCode::kCorrupt,
                    fmt::format("has .storage_alignment '{}', which is not a number",
                                Shortened(alignment.text, 40)));
    }
  }
  contents.format_version = Shortened(Trimmed(format.text), 40);
  return {};
}

void AddStorages(Contents& contents) {
  const std::string start = contents.prefix + "/data/";
  const auto& records = contents.archive.records;
  for (std::uint32_t i = 0; i < records.size(); ++i) {
    const ArchiveRecord& record = records[i];
    if (!record.name.starts_with(start) || record.name.size() == start.size()) continue;
    contents.storages.push_back(
        {.name = record.name.substr(contents.prefix.size() + 1),
         .offset = record.body_offset,
         .size = record.size,
         .crc = contents.checksums ? std::optional(record.crc) : std::nullopt,
         .record = i});
  }
}

std::unexpected<Error> TorchScript(const ByteSource& source) {
  return Refuse(source, ErrorCode::kUnsupportedFile,
                "is a TorchScript archive: a program, no checkpoint",
                "load it with torch.jit.load and save its state_dict");
}

Result<void> RefuseTorchScript(const ByteSource& source, const Contents& contents) {
  const std::string code = contents.prefix + "/code/";
  const std::string constants = contents.prefix + "/constants.pkl";
  const bool script =
      std::ranges::any_of(contents.archive.records, [&](const ArchiveRecord& record) {
        return record.name.starts_with(code) || record.name == constants;
      });
  if (!script) return {};
  return TorchScript(source);
}

}  // namespace

Result<Contents> ReadTorchFile(const ByteSource& source) {
  Contents contents{.kind = Contents::Kind::kTorch};
  auto archive = ReadZipDirectory(source);
  if (!archive) {
    // torch.jit.save compresses the program's text.
    const bool program = archive.error().code == ErrorCode::kUnsupportedFile &&
                         archive.error().entry.contains("/code/");
    if (program) return TorchScript(source);
    return std::unexpected(std::move(archive.error()));
  }
  contents.archive = std::move(*archive);
  contents.checksums = HasChecksums(contents.archive);
  auto prefix = FindPrefix(source, contents.archive);
  if (!prefix) return std::unexpected(std::move(prefix.error()));
  contents.prefix = std::move(*prefix);
  const auto failed = [](Result<void>& result) { return !result; };

  Result<void> step = RefuseTorchScript(source, contents);
  if (failed(step)) return std::unexpected(std::move(step.error()));
  SmallRecords records(source, contents);
  step = ReadSettings(source, records, contents);
  if (failed(step)) return std::unexpected(std::move(step.error()));

  auto pickle = records.Read(kPickleName.substr(1), kMaxPickle);
  if (!pickle) return std::unexpected(std::move(pickle.error()));
  contents.pickle = std::move(**pickle);  // FindPrefix found it
  auto tree = ReadPickle(contents.pickle);
  if (!tree) {
    tree.error().operation = "read";
    tree.error().path = source.name();
    tree.error().entry = contents.prefix + std::string(kPickleName);
    return std::unexpected(std::move(tree.error()));
  }
  contents.tree = std::move(*tree);
  AddStorages(contents);
  step = ReadStateTensors(contents, source.name());
  if (failed(step)) return std::unexpected(std::move(step.error()));
  return contents;
}

}  // namespace fastpersist::layout
