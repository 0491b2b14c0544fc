// SPDX-License-Identifier: Apache-2.0
#include "commit/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <span>
#include <utility>

#include "base/crc32.h"
#include "commit/manifest_json.h"

namespace fastpersist::commit {
namespace {

constexpr std::size_t kMaxName = 255;  // NAME_MAX of every file system in use
// A damaged number may have any value, and must not use the numbers up.
constexpr std::uint64_t kMaxFoundSequence = 1'000'000'000'000'000;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// Takes the digits at the front of text: how many there were.
std::size_t TakeDigits(std::string_view& text) {
  const auto* end = std::ranges::find_if_not(text, &IsDigit);
  const auto count = static_cast<std::size_t>(end - text.begin());
  text.remove_prefix(count);
  return count;
}

bool Take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

std::string Hex(std::uint32_t crc) { return fmt::format("{:08x}", crc); }

Json PartJson(const Part& part) {
  return {{"root", part.root},
          {"file", part.file},
          {"offset", part.offset},
          {"length", part.length},
          {"crc32", Hex(part.crc)}};
}

Json StreamJson(const ManifestStream& stream) {
  Json json{{"name", stream.name},
            {"format", stream.format},
            {"size", stream.size},
            {"crc32", Hex(stream.crc)}};
  Json& crcs = json["record_crc32s"] = Json::array();
  for (const std::uint32_t crc : stream.record_crcs) crcs.push_back(Hex(crc));
  Json& parts = json["parts"] = Json::array();
  for (const Part& part : stream.parts) parts.push_back(PartJson(part));
  return json;
}

// One member on a line, so that a person can read it; streams with all their records on one line.
void AppendMember(std::string& text, std::string_view key, std::string_view value) {
  text += fmt::format("{}\n  \"{}\": {}", text.ends_with('{') ? "" : ",", key, value);
}

}  // namespace

std::string CanonicalText(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::uint32_t CanonicalCrc(const Json& json) {
  const std::string text = CanonicalText(json);
  return base::Crc32(std::as_bytes(std::span(text)));
}

std::string ToJson(const Manifest& manifest) {
  // The sequence number comes before everything that a user can write: FindSequence takes the first
  // that it sees. The metadata are a string, so that nothing of them is lost: numbers of any size
  // and the order of keys.
  std::vector<std::pair<std::string, Json>> members{{"version", manifest.version},
                                                    {"reader_version", manifest.reader_version},
                                                    {"step", manifest.step},
                                                    {"sequence", manifest.sequence},
                                                    {"world_size", manifest.world_size},
                                                    {"generation", manifest.generation},
                                                    {"job", manifest.job},
                                                    {"created", manifest.created},
                                                    {"library", manifest.library},
                                                    {"metadata", manifest.metadata},
                                                    {"streams", Json::array()}};
  for (const ManifestStream& stream : manifest.streams) {
    members.back().second.push_back(StreamJson(stream));
  }
  std::string inner = "{";
  Json all = Json::object();
  for (auto& [key, value] : members) {
    AppendMember(inner, key, CanonicalText(value));
    all[key] = std::move(value);
  }
  return fmt::format("{{\"crc32\": \"{}\", \"manifest\": {}\n}}}}\n", Hex(CanonicalCrc(all)),
                     inner);
}

std::optional<std::uint64_t> FindSequence(std::string_view text) {
  constexpr std::string_view kKey = "\"sequence\":";
  const std::size_t at = text.find(kKey);
  if (at == std::string_view::npos) return std::nullopt;
  text.remove_prefix(at + kKey.size());
  while (text.starts_with(' ')) text.remove_prefix(1);
  std::uint64_t sequence = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), sequence);
  // A number that the text ends with may have lost digits.
  if (error != std::errc() || end == text.data() + text.size()) return std::nullopt;
  if (sequence > kMaxFoundSequence) return std::nullopt;
  return sequence;
}

bool IsPlainName(std::string_view name) {
  if (name.empty() || name.size() > kMaxName || name == "." || name == "..") return false;
  return std::ranges::none_of(name, [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return c == '/' || byte < 0x20 || byte == 0x7F;
  });
}

bool IsPartName(std::string_view name) {
  if (Take(name, "state-g") || Take(name, "rank-")) {
    if (TakeDigits(name) == 0) return false;
  } else if (!Take(name, "state")) {
    return false;
  }
  if (!Take(name, ".pt")) return false;
  if (name.empty()) return true;
  return Take(name, ".part-") && TakeDigits(name) >= 3 && Take(name, "-of-") &&
         TakeDigits(name) >= 3 && name.empty();
}

}  // namespace fastpersist::commit
