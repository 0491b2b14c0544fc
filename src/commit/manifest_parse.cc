// SPDX-License-Identifier: Apache-2.0
// Reading of manifests. They may be damaged in any way, and come from anywhere: nothing in them is
// believed before it was checked.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <set>
#include <utility>

#include "commit/manifest.h"
#include "commit/manifest_json.h"

namespace fastpersist::commit {
namespace {

constexpr unsigned kMaxDepth = 32;             // ours are 5 deep; writing JSON recurses
constexpr std::size_t kMaxValues = 4'000'000;  // a value takes up to about 100 bytes of memory
constexpr unsigned kMaxMetadataDepth = 200;    // Python's own parser recurses

// Depth and number of values of a JSON text, before anything is allocated for them.
bool IsModest(std::string_view text, unsigned max_depth) {
  unsigned depth = 0;
  std::size_t values = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        quoted = false;
      }
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      if (++depth > max_depth || ++values > kMaxValues) return false;
    } else if (c == ']' || c == '}') {
      if (depth > 0) --depth;
    } else if (c == ',' && ++values > kMaxValues) {
      return false;
    }
  }
  return true;
}

// Takes members out of an object, and remembers the first that is not as it should be.
class Reader {
 public:
  Reader(const Json& object, std::string where, std::string& wrong)
      : object_(object), where_(std::move(where)), wrong_(wrong) {}

  std::uint64_t Number(const char* key, std::uint64_t most = kMaxNumber) {
    const Json* value = Find(key);
    // A negative number is of another type.
    if (value != nullptr && value->is_number_unsigned()) {
      if (const auto number = value->get<std::uint64_t>(); number <= most) return number;
    }
    Wrong(fmt::format("{}{} is no number from 0 to {}", where_, key, most));
    return 0;
  }
  std::uint32_t Number32(const char* key) {
    return static_cast<std::uint32_t>(Number(key, std::numeric_limits<std::uint32_t>::max()));
  }
  std::string Text(const char* key) {
    const Json* value = Find(key);
    if (value != nullptr && value->is_string()) return value->get<std::string>();
    Wrong(fmt::format("{}{} is no text", where_, key));
    return {};
  }
  std::uint32_t Crc(const char* key) {
    const Json* value = Find(key);
    return value == nullptr ? 0 : ToCrc(*value, key);
  }
  std::uint32_t ToCrc(const Json& value, const char* key) {
    std::uint32_t crc = 0;
    if (value.is_string()) {
      const auto& text = value.get_ref<const std::string&>();
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), crc, 16);
      if (text.size() == 8 && error == std::errc() && end == text.data() + text.size()) return crc;
    }
    Wrong(fmt::format("{}{} is no checksum of eight hexadecimal digits", where_, key));
    return 0;
  }
  const Json& Array(const char* key) {
    static const Json kNone = Json::array();
    const Json* value = Find(key);
    if (value != nullptr && value->is_array()) return *value;
    Wrong(fmt::format("{}{} is no list", where_, key));
    return kNone;
  }
  void Require(bool kept, std::string_view breach) {
    if (!kept) Wrong(fmt::format("{}{}", where_, breach));
  }

 private:
  const Json* Find(const char* key) {
    if (object_.is_object()) {
      if (const auto found = object_.find(key); found != object_.end()) return &*found;
    }
    Wrong(fmt::format("{}{} is missing", where_, key));
    return nullptr;
  }
  void Wrong(std::string sentence) {
    if (wrong_.empty()) wrong_ = std::move(sentence);
  }

  const Json& object_;
  std::string where_;
  std::string& wrong_;
};

bool IsReserved(std::string_view name) {
  return name == kManifestName || name == kRetiredName || name == kOwnerName ||
         name == kManifestTemporary;
}

Part ReadPart(const Json& json, const std::string& where, std::string& wrong) {
  Reader reader(json, where, wrong);
  Part part{.root = reader.Text("root"),
            .file = reader.Text("file"),
            .offset = reader.Number("offset"),
            .length = reader.Number("length"),
            .crc = reader.Crc("crc32")};
  reader.Require(part.root.empty() || IsPlainName(part.root), "root is no id");
  reader.Require(IsPlainName(part.file), "file is no name of a file in this directory");
  reader.Require(!IsReserved(part.file), "file is a name that is taken");
  return part;
}

ManifestStream ReadStream(const Json& json, const std::string& where, std::string& wrong) {
  Reader reader(json, where, wrong);
  ManifestStream stream{.name = reader.Text("name"),
                        .format = reader.Text("format"),
                        .size = reader.Number("size"),
                        .crc = reader.Crc("crc32")};
  reader.Require(IsPlainName(stream.name), "name is no name of a file");
  for (const Json& crc : reader.Array("record_crc32s")) {
    stream.record_crcs.push_back(reader.ToCrc(crc, "record_crc32s"));
  }
  for (const Json& part : reader.Array("parts")) {
    stream.parts.push_back(
        ReadPart(part, fmt::format("{}parts[{}].", where, stream.parts.size()), wrong));
  }
  std::uint64_t end = 0;
  bool tiles = !stream.parts.empty();
  for (const Part& part : stream.parts) {
    // Only an empty stream has an empty part. Both numbers are below 2^63: the sum fits.
    tiles = tiles && part.offset == end && (part.length > 0 || stream.size == 0);
    end += part.length;
    if (end > kMaxNumber) tiles = false;
    if (!tiles) break;
  }
  reader.Require(tiles && end == stream.size, "parts do not make up the stream without gaps");
  reader.Require(stream.parts.size() != 1 || stream.parts.front().crc == stream.crc,
                 "crc32 is not that of its only part");
  return stream;
}

// Names that must be different are.
std::string FirstRepeated(const Manifest& manifest) {
  std::set<std::string_view> names;
  std::set<std::pair<std::string_view, std::string_view>> files;
  for (const ManifestStream& stream : manifest.streams) {
    if (!names.insert(stream.name).second) return stream.name;
    for (const Part& part : stream.parts) {
      if (!files.emplace(part.root, part.file).second) return part.file;
    }
  }
  return {};
}

// Numbers stay text: they may be larger than any type here.
bool IsJsonObject(const std::string& text) {
  if (!IsModest(text, kMaxMetadataDepth)) return false;
  const auto first = text.find_first_not_of(" \t\r\n");
  return first != std::string::npos && text[first] == '{' && Json::accept(text);
}

std::string WhatIsWrong(const Manifest& manifest) {
  if (manifest.version == 0 || manifest.reader_version == 0) return "the version is 0";
  if (!IsPlainName(manifest.generation)) return "generation is no name of a directory";
  if (std::string name = FirstRepeated(manifest); !name.empty()) {
    return fmt::format("'{}' appears twice", name);
  }
  if (!IsJsonObject(manifest.metadata)) return "metadata is no JSON object of moderate depth";
  return {};
}

Manifest ReadManifest(const Json& json, std::string& wrong) {
  Reader reader(json, "", wrong);
  Manifest manifest{.version = reader.Number32("version"),
                    .reader_version = reader.Number32("reader_version"),
                    .library = reader.Text("library"),
                    .created = reader.Text("created"),
                    .job = reader.Text("job"),
                    .generation = reader.Text("generation"),
                    .step = reader.Number("step"),
                    .sequence = reader.Number("sequence"),
                    .world_size = reader.Number32("world_size"),
                    .metadata = reader.Text("metadata")};
  for (const Json& stream : reader.Array("streams")) {
    manifest.streams.push_back(
        ReadStream(stream, fmt::format("streams[{}].", manifest.streams.size()), wrong));
    if (!wrong.empty()) break;
  }
  if (wrong.empty()) wrong = WhatIsWrong(manifest);
  return manifest;
}

Error Damaged(const std::string& path, std::string detail) {
  return {.code = ErrorCode::kCorrupt,
          .operation = "read the manifest",
          .path = path,
          .detail = std::move(detail),
          .advice = "restore another checkpoint, or this file from another copy"};
}

// The inner object, its checksum compared.
Result<Json> Unwrap(std::string_view text, const std::string& path) {
  if (text.size() > kMaxManifestBytes || !IsModest(text, kMaxDepth)) {
    return std::unexpected(Damaged(path, "it is larger or deeper than any manifest"));
  }
  Json outer = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!outer.is_object()) return std::unexpected(Damaged(path, "it is no complete JSON object"));
  std::string wrong;
  const std::uint32_t expected = Reader(outer, "", wrong).Crc("crc32");
  const auto inner = outer.find("manifest");
  if (wrong.empty() && (inner == outer.end() || !inner->is_object())) {
    wrong = "manifest is no object";
  }
  if (!wrong.empty()) return std::unexpected(Damaged(path, std::move(wrong)));
  if (const std::uint32_t found = CanonicalCrc(*inner); found != expected) {
    Error error = Damaged(path, "its checksum is wrong");
    error.expected_crc = expected;
    error.found_crc = found;
    return std::unexpected(std::move(error));
  }
  return std::move(*inner);
}

}  // namespace

Result<Manifest> ParseManifest(std::string_view text, const std::string& path) {
  const auto inner = Unwrap(text, path);
  if (!inner) return std::unexpected(inner.error());
  std::string wrong;
  // Before all else: in a newer manifest nothing but this need be as it is here.
  const std::uint32_t needed = Reader(*inner, "", wrong).Number32("reader_version");
  if (needed > kReaderVersion) {
    return std::unexpected(
        Error{.code = ErrorCode::kUnsupportedFile,
              .operation = "read the manifest",
              .path = path,
              .detail = fmt::format("it was written by a newer version: it needs a reader of "
                                    "version {}, and this one has version {}",
                                    needed, kReaderVersion),
              .advice = "upgrade fastpersist to read this checkpoint"});
  }
  Manifest manifest = ReadManifest(*inner, wrong);
  if (!wrong.empty()) return std::unexpected(Damaged(path, std::move(wrong)));
  return manifest;
}

Result<void> CheckManifest(const Manifest& manifest) {
  // Reading it back is the check: what is committed can be restored.
  const auto parsed = ParseManifest(ToJson(manifest), "");
  if (parsed && parsed->metadata == manifest.metadata) return {};
  // Text that is not UTF-8 was replaced on the way.
  Error error = parsed ? Damaged("", "metadata is no UTF-8 text") : parsed.error();
  error.code = ErrorCode::kInvalidArgument;
  error.operation = "write the manifest";
  error.advice.clear();
  return std::unexpected(std::move(error));
}

}  // namespace fastpersist::commit
