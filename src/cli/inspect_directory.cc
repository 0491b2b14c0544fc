// SPDX-License-Identifier: Apache-2.0
// `fastpersist inspect` on a directory: its checkpoints, and what the newest complete one holds.
#include <fmt/format.h>

#include <string>
#include <utility>

#include "checkpoint/opened_file.h"
#include "cli/directory.h"
#include "cli/inspect_file.h"
#include "cli/terminal.h"
#include "commit/manifest.h"

namespace fastpersist::cli {
namespace {

std::string Title(const std::string& path, const Directory& directory) {
  if (directory.single) return fmt::format("{}: a checkpoint\n", Escaped(path));
  return fmt::format("{}: {}{}\n", Escaped(path),
                     Counted(directory.checkpoints.size(), "checkpoint"),
                     directory.root->id().empty() ? "" : ", root " + directory.root->id());
}

// A stream in one file is looked into; one in several parts is only described.
Result<std::string> StreamText(const Directory& directory, const commit::CatalogEntry& checkpoint,
                               const commit::ManifestStream& stream, std::size_t rows) {
  if (stream.parts.size() != 1) {
    std::string text = fmt::format("{}: {} in {}\n", Escaped(stream.name), SizeText(stream.size),
                                   Counted(stream.parts.size(), "part"));
    for (const commit::Part& part : stream.parts) {
      text += fmt::format("  {} {} from {}\n", Escaped(part.file), SizeText(part.length),
                          Grouped(part.offset));
    }
    return text;
  }
  const auto file =
      checkpoint::OpenedFile::Open(directory.Path(checkpoint, stream.parts.front().file));
  if (!file) return std::unexpected(file.error());
  return FileText(**file, *(*file)->contents(), rows);
}

Result<std::string> NewestText(const Directory& directory, const commit::CatalogEntry& newest,
                               std::size_t rows) {
  const commit::Manifest& manifest = *newest.manifest;
  std::string text = fmt::format(
      "\n{}{}: step {}, saved {} by {}, {}\n", directory.single ? "" : "newest complete ",
      Escaped(newest.name), manifest.step, Escaped(manifest.created), Escaped(manifest.library),
      Counted(manifest.world_size, "process"));
  if (manifest.metadata != "{}") text += fmt::format("metadata: {}\n", Escaped(manifest.metadata));
  for (const commit::ManifestStream& stream : manifest.streams) {
    auto part = StreamText(directory, newest, stream, rows);
    if (!part) return part;
    text += '\n' + *part;
  }
  return text;
}

Result<Json> ContentsJson(const Directory& directory, const commit::CatalogEntry& newest) {
  Json files = Json::array();
  for (const commit::ManifestStream& stream : newest.manifest->streams) {
    if (stream.parts.size() != 1) continue;
    const auto file =
        checkpoint::OpenedFile::Open(directory.Path(newest, stream.parts.front().file));
    if (!file) return std::unexpected(file.error());
    Json content{{"file", (*file)->path()}};
    AddFile(content, **file, *(*file)->contents());
    files.push_back(std::move(content));
  }
  return files;
}

}  // namespace

ExitStatus InspectDirectory(const std::string& path, bool json, std::size_t rows) {
  const auto directory = OpenDirectory(path);
  if (!directory) return Fail(directory.error());
  const commit::CatalogEntry* newest = directory->newest();
  const ExitStatus status = newest == nullptr ? ExitStatus::kDamaged : ExitStatus::kGood;
  if (json) {
    Json document = JsonDocument("inspect");
    document["directory"] = path;
    document["id"] = directory->root->id();
    Json& checkpoints = document["checkpoints"] = Json::array();
    for (const auto& checkpoint : directory->checkpoints) {
      checkpoints.push_back(CheckpointJson(checkpoint));
    }
    document["newest"] = newest == nullptr ? Json(nullptr) : Json(newest->name);
    auto files =
        newest == nullptr ? Result<Json>(Json::array()) : ContentsJson(*directory, *newest);
    if (!files) return Fail(files.error());
    document["files"] = *std::move(files);
    return Print(JsonText(document), status);
  }
  std::string text = Title(path, *directory) + CheckpointsText(directory->checkpoints);
  if (newest == nullptr) return Print(text + "\nnone of them is complete\n", status);
  const auto contents = NewestText(*directory, *newest, rows);
  if (!contents) return Fail(contents.error());
  return Print(text + *contents, status);
}

}  // namespace fastpersist::cli
