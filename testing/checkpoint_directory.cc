// SPDX-License-Identifier: Apache-2.0
#include "testing/checkpoint_directory.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <utility>

#include "base/crc32.h"
#include "base/unique_fd.h"
#include "commit/target.h"
#include "testing/temporary_directory.h"

namespace fastpersist::testing {
namespace {

std::uint32_t CrcOf(const std::string& content) {
  return base::Crc32(std::as_bytes(std::span(content)));
}

bool KeepsItsPromise(const std::string& path, const commit::CatalogEntry& entry) {
  for (const commit::ManifestStream& stream : entry.manifest->streams) {
    for (const commit::Part& part : stream.parts) {
      const std::string content = ReadFile(path + '/' + entry.name + '/' + part.file);
      if (content.size() != part.length || CrcOf(content) != part.crc) return false;
    }
  }
  return true;
}

}  // namespace

const file::FileOps& Unsynced() {
  static const UnsyncedFiles files;
  return files;
}

std::string CheckpointContent(std::uint64_t step) {
  std::string content;
  while (content.size() < 1000 + step % 977) content += fmt::format("step {} ", step);
  return content;
}

commit::Manifest CheckpointManifest(const std::string& root_id, const std::string& content) {
  const std::uint32_t crc = CrcOf(content);
  commit::ManifestStream stream{
      .name = "state.pt", .format = "torch", .size = content.size(), .crc = crc};
  stream.parts.push_back(
      {.root = root_id, .file = "state.pt", .length = content.size(), .crc = crc});
  commit::Manifest manifest;
  manifest.streams.push_back(std::move(stream));
  return manifest;
}

Result<void> WriteState(const commit::Generation& generation, const std::string& content,
                        const file::FileOps& files) {
  const base::UniqueFd fd(
      files.Open(generation.fd(), "state.pt", O_WRONLY | O_CREAT | O_EXCL, 0666));
  if (!fd.valid()) {
    return std::unexpected(commit::StorageError("create", generation.path(), -fd.get()));
  }
  const auto written = files.Write(fd.get(), std::as_bytes(std::span(content)));
  if (written >= 0 && static_cast<std::size_t>(written) < content.size()) std::abort();
  const auto result = written < 0 ? static_cast<int>(written) : files.SyncData(fd.get());
  if (result < 0) return std::unexpected(commit::StorageError("write", generation.path(), -result));
  return {};
}

Result<std::uint64_t> MakeCheckpoint(const commit::Root& root, std::uint64_t step,
                                     const file::FileOps& files) {
  auto generation = commit::Generation::Begin(root, step, files);
  if (!generation) return std::unexpected(generation.error());
  const std::string content = CheckpointContent(step);
  if (auto written = WriteState(*generation, content, files); !written) {
    return std::unexpected(written.error());
  }
  return generation->Commit(CheckpointManifest(root.id(), content));
}

std::unique_ptr<commit::Root> OpenForWriting(const std::string& path) {
  auto root = commit::Root::Open(path, commit::Root::Access::kWrite, Unsynced());
  if (!root) {
    (void)std::fprintf(stderr, "%s\n", root.error().Message().c_str());
    std::abort();
  }
  return *std::move(root);
}

std::vector<std::string> Listing(const std::string& path) {
  const auto root = commit::Root::Open(path, commit::Root::Access::kRead);
  if (!root) return {root.error().Message()};
  const auto catalog = commit::ReadCatalog(**root, file::RealFileOps());
  if (!catalog) return {catalog.error().Message()};
  std::vector<std::string> lines;
  for (const commit::CatalogEntry& entry : *catalog) {
    const bool broken =
        entry.state == commit::GenerationState::kComplete && !KeepsItsPromise(path, entry);
    lines.push_back(fmt::format("{} {} {}",
                                entry.sequence ? fmt::format("{}", *entry.sequence) : "-",
                                entry.name, broken ? "broken promise" : StateName(entry.state)));
  }
  return lines;
}

std::optional<std::uint64_t> NewestStep(const std::string& path) {
  const auto root = commit::Root::Open(path, commit::Root::Access::kRead);
  if (!root) return std::nullopt;
  const auto catalog = commit::ReadCatalog(**root, file::RealFileOps());
  if (!catalog) return std::nullopt;
  for (const commit::CatalogEntry& entry : *catalog) {
    if (entry.state != commit::GenerationState::kComplete) continue;
    if (!KeepsItsPromise(path, entry)) return std::nullopt;
    return entry.step;
  }
  return std::nullopt;
}

}  // namespace fastpersist::testing
