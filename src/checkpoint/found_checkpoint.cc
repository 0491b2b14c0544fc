// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/found_checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fork_guard.h"
#include "commit/catalog.h"
#include "commit/manifest.h"
#include "file/input_file.h"
#include "layout/zip_reader.h"

namespace fastpersist::checkpoint {
namespace {

using commit::CatalogEntry;
using commit::GenerationState;

// A file can be whole and of the right size, and still be another step's.
Result<void> CompareWithManifest(const std::string& path, const commit::ManifestStream& stream,
                                 const file::FileOps& files) {
  if (stream.record_crcs.empty()) return {};
  const auto file = file::InputFile::Open(path, files);
  if (!file) return std::unexpected(file.error());
  const auto directory = layout::ReadZipDirectory(*file);
  if (!directory) return std::unexpected(directory.error());
  if (std::ranges::equal(directory->records, stream.record_crcs, {}, &layout::ArchiveRecord::crc)) {
    return {};
  }
  return std::unexpected(Error{.code = ErrorCode::kCorrupt,
                               .operation = "open",
                               .path = path,
                               .detail = "it is not the file that the manifest describes: its "
                                         "records have other checksums"});
}

Result<File> OpenMain(const commit::Root& root, const CatalogEntry& entry,
                      const file::FileOps& files) {
  const commit::ManifestStream& stream = entry.manifest->streams.front();
  if (stream.parts.size() != 1) {
    return std::unexpected(
        Error{.code = ErrorCode::kUnsupportedFile,
              .operation = "open",
              .path = fmt::format("{}/{}", root.path(), entry.name),
              .detail = fmt::format("{} lies in {} parts", stream.name, stream.parts.size()),
              .advice = "put the parts one after the other into one file, and open that"});
  }
  const std::string path =
      fmt::format("{}/{}/{}", root.path(), entry.name, stream.parts.front().file);
  if (auto same = CompareWithManifest(path, stream, files); !same) {
    return std::unexpected(same.error());
  }
  return Open(path);
}

Error NotGood(const commit::Root& root, std::optional<std::uint64_t> step,
              const std::vector<std::string>& skipped) {
  Error error{.code = skipped.empty() ? ErrorCode::kNotFound : ErrorCode::kCorrupt,
              .operation = "open a checkpoint",
              .path = root.path()};
  error.detail = step ? fmt::format("there is no complete checkpoint of step {}", *step)
                      : "there is no complete checkpoint";
  for (const std::string& reason : skipped) error.detail += "; " + reason;
  return error;
}

// A checkpoint that was listed may be retired before it is open; nobody does so again and again.
constexpr int kLooks = 10;
// While the only complete one was looked for, it may have been replaced by one that was not listed.
constexpr int kLooksAtNothing = 3;

bool IsBad(const CatalogEntry& entry) {
  return entry.state == GenerationState::kDamaged || entry.state == GenerationState::kNewer;
}

std::string WhySkipped(const CatalogEntry& entry) {
  return fmt::format("{} was skipped: {}", entry.name, entry.reason);
}

// Two complete checkpoints that claim to be the newest: whoever guesses may go back in time.
std::optional<Error> Ambiguous(const commit::Root& root, const CatalogEntry& entry,
                               std::span<const CatalogEntry> catalog) {
  const auto twins = std::ranges::count_if(catalog, [&](const CatalogEntry& other) {
    return other.state == GenerationState::kComplete && other.sequence == entry.sequence;
  });
  if (twins < 2) return std::nullopt;
  return Error{.code = ErrorCode::kCorrupt,
               .operation = "open a checkpoint",
               .path = fmt::format("{}/{}", root.path(), entry.name),
               .detail = entry.reason,
               .advice = "name the step that is wanted, or remove one of them"};
}

// Why it may be worth to look at the directory again.
enum class Again : std::uint8_t { kNo, kVanished, kNothingComplete };

// One look at the directory.
Result<Checkpoint> Look(const commit::Root& root, std::optional<std::uint64_t> step,
                        const file::FileOps& files, Again& again) {
  again = Again::kNo;
  auto catalog = commit::ReadCatalog(root, files);
  if (!catalog) return std::unexpected(catalog.error());
  if (step) {
    std::erase_if(*catalog, [&](const CatalogEntry& entry) { return entry.step != *step; });
  }
  // Those whose sequence number is lost may be the newest of all.
  std::vector<std::string> skipped;
  for (const CatalogEntry& entry : *catalog) {
    if (IsBad(entry) && !entry.sequence) skipped.push_back(WhySkipped(entry));
  }
  bool complete = false;
  for (const CatalogEntry& entry : *catalog) {
    if (IsBad(entry) && entry.sequence) skipped.push_back(WhySkipped(entry));
    if (entry.state != GenerationState::kComplete) continue;
    complete = true;
    if (auto ambiguous = Ambiguous(root, entry, *catalog)) {
      return std::unexpected(*std::move(ambiguous));
    }
    auto file = OpenMain(root, entry, files);
    if (file) {
      return Checkpoint{.file = *std::move(file),
                        .step = entry.step,
                        .path = fmt::format("{}/{}", root.path(), entry.name),
                        .metadata = entry.manifest->metadata,
                        .skipped = std::move(skipped)};
    }
    if (file.error().code == ErrorCode::kNotFound) again = Again::kVanished;
    // Storage that fails now may hold the newest one all the same: no older one stands in for it.
    if (again != Again::kNo || file.error().code == ErrorCode::kStorage) {
      return std::unexpected(file.error());
    }
    skipped.push_back(fmt::format("{} was skipped: {}", entry.name, file.error().Message()));
  }
  if (!complete) again = Again::kNothingComplete;
  return std::unexpected(NotGood(root, step, skipped));
}

}  // namespace

Result<Checkpoint> FindCheckpoint(const commit::Root& root, std::optional<std::uint64_t> step,
                                  const file::FileOps& files) {
  Again again = Again::kNo;
  auto found = Look(root, step, files, again);
  for (int look = 1; look < kLooks && again != Again::kNo; ++look) {
    if (again == Again::kNothingComplete && look >= kLooksAtNothing) break;
    found = Look(root, step, files, again);
  }
  return found;
}

}  // namespace fastpersist::checkpoint

namespace fastpersist {
inline namespace v0 {

Result<Checkpoint> OpenCheckpoint(const std::filesystem::path& directory,
                                  std::optional<std::uint64_t> step) {
  if (auto alive = base::CheckNotForked(); !alive) return std::unexpected(alive.error());
  const file::FileOps& files = file::RealFileOps();
  const auto root = commit::Root::Open(directory.native(), commit::Root::Access::kRead, files);
  if (!root) return std::unexpected(root.error());
  return checkpoint::FindCheckpoint(**root, step, files);
}

}  // namespace v0
}  // namespace fastpersist
