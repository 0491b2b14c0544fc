// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/found_checkpoint.h"

#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "base/fork_guard.h"
#include "commit/catalog.h"

namespace fastpersist::checkpoint {
namespace {

using commit::CatalogEntry;
using commit::GenerationState;

Result<File> OpenMain(const commit::Root& root, const CatalogEntry& entry) {
  const commit::ManifestStream& stream = entry.manifest->streams.front();
  if (stream.parts.size() != 1) {
    return std::unexpected(
        Error{.code = ErrorCode::kUnsupportedFile,
              .operation = "open",
              .path = fmt::format("{}/{}", root.path(), entry.name),
              .detail = fmt::format("{} lies in {} parts", stream.name, stream.parts.size()),
              .advice = "put the parts one after the other into one file, and open that"});
  }
  return Open(fmt::format("{}/{}/{}", root.path(), entry.name, stream.parts.front().file));
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

constexpr int kLooks = 3;

bool IsBad(const CatalogEntry& entry) {
  return entry.state == GenerationState::kDamaged || entry.state == GenerationState::kNewer;
}

std::string WhySkipped(const CatalogEntry& entry) {
  return fmt::format("{} was skipped: {}", entry.name, entry.reason);
}

// Two complete checkpoints that claim to be the newest: whoever guesses may go back in time.
std::optional<Error> Ambiguous(const commit::Root& root, const CatalogEntry& entry) {
  if (entry.reason.empty()) return std::nullopt;
  return Error{.code = ErrorCode::kCorrupt,
               .operation = "open a checkpoint",
               .path = fmt::format("{}/{}", root.path(), entry.name),
               .detail = entry.reason,
               .advice = "name the step that is wanted, or remove one of them"};
}

}  // namespace

namespace {

// One look at the directory. *vanished: a checkpoint was retired meanwhile, so that there may be a
// newer one.
Result<Checkpoint> Look(const commit::Root& root, std::optional<std::uint64_t> step,
                        const file::FileOps& files, bool& vanished) {
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
  for (const CatalogEntry& entry : *catalog) {
    if (IsBad(entry) && entry.sequence) skipped.push_back(WhySkipped(entry));
    if (entry.state != GenerationState::kComplete) continue;
    if (!step) {
      if (auto ambiguous = Ambiguous(root, entry)) return std::unexpected(*std::move(ambiguous));
    }
    auto file = OpenMain(root, entry);
    if (file) {
      return Checkpoint{.file = *std::move(file),
                        .step = entry.step,
                        .path = fmt::format("{}/{}", root.path(), entry.name),
                        .metadata = entry.manifest->metadata,
                        .skipped = std::move(skipped)};
    }
    vanished = file.error().code == ErrorCode::kNotFound;
    // Storage that fails now may hold the newest one all the same: no older one stands in for it.
    if (vanished || file.error().code == ErrorCode::kStorage) return std::unexpected(file.error());
    skipped.push_back(fmt::format("{} was skipped: {}", entry.name, file.error().Message()));
  }
  return std::unexpected(NotGood(root, step, skipped));
}

}  // namespace

Result<Checkpoint> FindCheckpoint(const commit::Root& root, std::optional<std::uint64_t> step,
                                  const file::FileOps& files) {
  bool vanished = false;
  auto found = Look(root, step, files, vanished);
  for (int look = 1; look < kLooks && vanished; ++look) {
    vanished = false;
    found = Look(root, step, files, vanished);
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
