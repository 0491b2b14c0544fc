// SPDX-License-Identifier: Apache-2.0
#include "cli/directory.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "cli/terminal.h"
#include "commit/manifest.h"
#include "file/file_ops.h"

namespace fastpersist::cli {
namespace {

namespace fs = std::filesystem;

using commit::CatalogEntry;
using commit::GenerationState;

bool Exists(const std::string& path) {
  struct stat info{};
  return ::lstat(path.c_str(), &info) == 0;
}

bool LooksLikeACheckpoint(const std::string& path) {
  return std::ranges::any_of(
      std::array{commit::kManifestName, commit::kOwnerName, commit::kRetiredName},
      [&](const char* name) { return Exists(path + '/' + name); });
}

// "runs/gpt/step-00000200/" → runs/gpt and step-00000200.
std::pair<std::string, std::string> SplitPath(const std::string& path) {
  fs::path normal = fs::path(path).lexically_normal();
  if (!normal.has_filename()) normal = normal.parent_path();
  std::error_code error;
  if (const auto name = normal.filename(); name.empty() || name == "." || name == "..") {
    normal = fs::canonical(path, error);
  }
  const fs::path parent = normal.parent_path();
  return {parent.empty() ? "." : parent.string(), normal.filename().string()};
}

Error NoCheckpoints(const std::string& path) {
  return {.code = ErrorCode::kUnsupportedFile,
          .operation = "open",
          .path = path,
          .detail = "it is a directory without checkpoints",
          .advice = "name a file, or a directory that a Checkpointer writes to"};
}

Result<Directory> OpenOne(const std::string& path) {
  const auto [parent, name] = SplitPath(path);
  auto root = commit::Root::Open(parent, commit::Root::Access::kRead);
  if (!root) return std::unexpected(root.error());
  auto entry = commit::ReadCatalogEntry(**root, name, file::RealFileOps());
  if (!entry) return std::unexpected(entry.error());
  Directory directory{.root = *std::move(root), .single = true};
  directory.checkpoints.push_back(*std::move(entry));
  return directory;
}

std::string AgeText(std::optional<std::chrono::seconds> age) {
  if (!age) return "-";
  const auto seconds = std::max<std::int64_t>(age->count(), 0);
  constexpr std::int64_t kMinute = 60;
  constexpr std::int64_t kHour = 60 * kMinute;
  constexpr std::int64_t kDay = 24 * kHour;
  if (seconds < 2 * kMinute) return fmt::format("{} s", seconds);
  if (seconds < 2 * kHour) return fmt::format("{} min", seconds / kMinute);
  if (seconds < 2 * kDay) return fmt::format("{} h", seconds / kHour);
  return fmt::format("{} d", seconds / kDay);
}

// Nullopt when it is no time.
std::optional<std::chrono::seconds> SecondsSince(const std::string& created) {
  std::tm time{};
  const char* end = ::strptime(created.c_str(), "%Y-%m-%dT%H:%M:%SZ", &time);
  if (end == nullptr || *end != '\0') return std::nullopt;
  const std::time_t then = ::timegm(&time);
  return std::chrono::seconds(std::time(nullptr) - then);
}

std::optional<std::chrono::seconds> AgeOf(const CatalogEntry& checkpoint) {
  return checkpoint.manifest ? SecondsSince(checkpoint.manifest->created) : std::nullopt;
}

Json StreamJson(const commit::ManifestStream& stream) {
  Json parts = Json::array();
  for (const commit::Part& part : stream.parts) {
    parts.push_back({{"root", part.root},
                     {"file", part.file},
                     {"offset", part.offset},
                     {"bytes", part.length},
                     {"crc32", fmt::format("{:08x}", part.crc)}});
  }
  return {{"name", stream.name},
          {"format", stream.format},
          {"bytes", stream.size},
          {"crc32", fmt::format("{:08x}", stream.crc)},
          {"parts", std::move(parts)}};
}

}  // namespace

const CatalogEntry* Directory::newest() const {
  const auto found =
      std::ranges::find(checkpoints, GenerationState::kComplete, &CatalogEntry::state);
  return found == checkpoints.end() ? nullptr : &*found;
}

std::string Directory::Path(const CatalogEntry& checkpoint, std::string_view file) const {
  return fmt::format("{}/{}/{}", root->path(), checkpoint.name, file);
}

bool IsDirectory(const std::string& path) {
  struct stat info{};
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

Result<Directory> OpenDirectory(const std::string& path) {
  if (LooksLikeACheckpoint(path)) return OpenOne(path);
  auto root = commit::Root::Open(path, commit::Root::Access::kRead);
  if (!root) return std::unexpected(root.error());
  auto checkpoints = commit::ReadCatalog(**root, file::RealFileOps());
  if (!checkpoints) return std::unexpected(checkpoints.error());
  if (checkpoints->empty() && (*root)->id().empty()) return std::unexpected(NoCheckpoints(path));
  return Directory{.root = *std::move(root), .checkpoints = *std::move(checkpoints)};
}

std::string CheckpointsText(const std::vector<CatalogEntry>& checkpoints) {
  Table table("rrrlll");
  table.Add({"STEP", "AGE", "SIZE", "STATE", "NAME", ""});
  for (const CatalogEntry& checkpoint : checkpoints) {
    table.Add({fmt::format("{}", checkpoint.step), AgeText(AgeOf(checkpoint)),
               SizeText(checkpoint.bytes), std::string(StateName(checkpoint.state)),
               Escaped(checkpoint.name), Escaped(checkpoint.reason)});
  }
  return table.Text();
}

Json CheckpointJson(const CatalogEntry& checkpoint) {
  const auto age = AgeOf(checkpoint);
  const bool known = checkpoint.manifest.has_value();
  Json json{{"name", checkpoint.name},
            {"step", checkpoint.step},
            {"state", StateName(checkpoint.state)},
            {"reason", checkpoint.reason},
            {"bytes", checkpoint.bytes},
            {"sequence", checkpoint.sequence ? Json(*checkpoint.sequence) : Json(nullptr)},
            {"created", known ? Json(checkpoint.manifest->created) : Json(nullptr)},
            {"age_seconds", age ? Json(age->count()) : Json(nullptr)},
            {"world_size", known ? Json(checkpoint.manifest->world_size) : Json(nullptr)},
            {"metadata", known ? Json(checkpoint.manifest->metadata) : Json(nullptr)}};
  Json& streams = json["streams"] = Json::array();
  if (known) {
    for (const auto& stream : checkpoint.manifest->streams) streams.push_back(StreamJson(stream));
  }
  return json;
}

}  // namespace fastpersist::cli
