// SPDX-License-Identifier: Apache-2.0
#include "commit/retention.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "base/unique_fd.h"
#include "commit/generation_files.h"
#include "commit/manifest.h"
#include "commit/small_file.h"
#include "commit/target.h"

namespace fastpersist::commit {
namespace {

std::unexpected<Error> Refused(const Root& root, const std::string& generation,
                               std::string detail) {
  return std::unexpected(Error{.code = ErrorCode::kInvalidArgument,
                               .operation = "retire",
                               .path = root.path() + '/' + generation,
                               .detail = std::move(detail)});
}

Result<bool> IsThere(int directory, const std::string& path, const char* name,
                     const file::FileOps& files) {
  struct stat info{};
  const int found = files.StatLink(directory, name, &info);
  if (found == -ENOENT) return false;
  if (found < 0) return std::unexpected(StorageError("look at", path + '/' + name, -found));
  return true;
}

// Names of the parts, from a manifest under either of its names; none from a damaged one, whose
// parts are known by how they are called.
Result<std::set<std::string>> PartsOf(int directory, const std::string& path, const char* name,
                                      const file::FileOps& files) {
  std::set<std::string> parts;
  const auto text = ReadSmallFile(directory, name, path + '/' + name, kMaxManifestBytes, files);
  if (!text && text.error().code == ErrorCode::kStorage) return std::unexpected(text.error());
  if (!text) return parts;
  const auto manifest = ParseManifest(*text, path);
  if (!manifest) return parts;
  for (const ManifestStream& stream : manifest->streams) {
    for (const Part& part : stream.parts) parts.insert(part.file);
  }
  return parts;
}

// Step 1.
Result<void> MakeRetired(int directory, const std::string& path, const file::FileOps& files) {
  if (const int renamed = files.Rename(directory, kManifestName, kRetiredName); renamed < 0) {
    return std::unexpected(StorageError("rename", path + '/' + kManifestName, -renamed));
  }
  std::string warning;
  if (const int synced = SyncDirectoryIfPossible(directory, warning, files); synced < 0) {
    return std::unexpected(StorageError("sync the directory", path, -synced));
  }
  return {};
}

bool MayBeChosen(const CatalogEntry& entry) {
  return entry.state == GenerationState::kComplete && entry.owned && entry.reason.empty();
}

// Steps 2 to 4 of one that is unfinished or retired. True: all of it is gone.
Result<bool> RemoveOne(const Root& root, const CatalogEntry& entry, const file::FileOps& files) {
  const std::string path = root.path() + '/' + entry.name;
  const base::UniqueFd directory(OpenGeneration(root, entry.name, files));
  if (directory.get() == -ENOENT) return true;
  if (!directory.valid()) {
    return std::unexpected(StorageError("open directory", path, -directory.get()));
  }
  const auto owner = ReadOwner(directory.get(), path, files);
  if (!owner) return std::unexpected(owner.error());
  if (!*owner || (*owner)->root != root.id()) return false;
  // A thread of this process may have committed it since the catalog was read.
  if (entry.state == GenerationState::kUnfinished) {
    const auto committed = IsThere(directory.get(), path, kManifestName, files);
    if (!committed) return std::unexpected(committed.error());
    if (*committed) return false;
  }
  const auto parts = PartsOf(directory.get(), path, kRetiredName, files);
  if (!parts) return std::unexpected(parts.error());
  const auto removed = RemoveFiles(root, entry.name, directory.get(), *parts, files);
  if (!removed) return std::unexpected(removed.error());
  return !removed->foreign_left;
}

std::string WithReason(const std::string& generation, Error error) {
  error.advice.clear();  // which is for whoever named the file
  return generation + ": " + error.Message();
}

// Removes it if it is a leftover, and writes down what came of it.
void TidyOne(const Root& root, const std::string& name, const file::FileOps& files,
             Leftovers& leftovers) {
  const auto entry = ReadCatalogEntry(root, name, files);
  if (!entry) {
    if (entry.error().code == ErrorCode::kNotFound) return;
    leftovers.kept.push_back(WithReason(name, entry.error()));
    return;
  }
  const GenerationState state = entry->state;
  if (state != GenerationState::kUnfinished && state != GenerationState::kRetired) return;
  if (root.IsActive(name)) return;
  const auto gone = root.locked() ? RemoveOne(root, *entry, files) : Result<bool>(false);
  if (!gone) {
    leftovers.kept.push_back(WithReason(name, gone.error()));
  } else {
    (*gone ? leftovers.removed : leftovers.kept).push_back(name);
  }
}

}  // namespace

std::vector<std::size_t> ChooseRetired(std::span<const CatalogEntry> catalog,
                                       const RetentionPolicy& policy) {
  std::vector<std::size_t> chosen;
  std::set<std::uint64_t> steps;  // of newer complete ones
  std::uint64_t newer = 0;        // complete ones, each step once
  for (std::size_t i = 0; i < catalog.size(); ++i) {
    const CatalogEntry& entry = catalog[i];
    if (entry.state != GenerationState::kComplete) continue;
    const bool newest = steps.empty();
    const bool again = !steps.insert(entry.step).second;
    const std::uint64_t before = newer;
    if (!again) ++newer;
    if (newest || !MayBeChosen(entry)) continue;
    const bool last = !policy.keep_last || before < *policy.keep_last;
    const bool every =
        policy.keep_every && *policy.keep_every > 0 && entry.step % *policy.keep_every == 0;
    if (again || (!last && !every)) chosen.push_back(i);
  }
  std::ranges::reverse(chosen);
  return chosen;
}

Result<void> Retire(const Root& root, const std::string& generation, const file::FileOps& files) {
  const std::string path = root.path() + '/' + generation;
  if (root.access() != Root::Access::kWrite) {
    return Refused(root, generation, "the directory was opened for reading only");
  }
  if (root.IsActive(generation)) return Refused(root, generation, "it is being written");
  const base::UniqueFd directory(OpenGeneration(root, generation, files));
  if (!directory.valid()) {
    Error error = StorageError("retire", path, -directory.get());
    if (directory.get() == -ENOENT) error.code = ErrorCode::kNotFound;
    return std::unexpected(std::move(error));
  }
  const auto owner = ReadOwner(directory.get(), path, files);
  if (!owner) return std::unexpected(owner.error());
  if (!*owner) {
    return Refused(root, generation,
                   "it has no owner.json that says whose it is; remove it by hand");
  }
  const auto manifest = IsThere(directory.get(), path, kManifestName, files);
  if (!manifest) return std::unexpected(manifest.error());
  const auto retired = IsThere(directory.get(), path, kRetiredName, files);
  if (!retired) return std::unexpected(retired.error());
  if (!*manifest && !*retired) {
    return Refused(root, generation, "it has no manifest: it is no checkpoint (yet)");
  }
  const auto parts =
      PartsOf(directory.get(), path, *manifest ? kManifestName : kRetiredName, files);
  if (!parts) return std::unexpected(parts.error());
  if (*manifest) {
    if (auto made = MakeRetired(directory.get(), path, files); !made) return made;
  }
  const auto removed = RemoveFiles(root, generation, directory.get(), *parts, files);
  if (!removed) return std::unexpected(removed.error());
  return {};
}

Result<std::vector<std::string>> Prune(const Root& root, const RetentionPolicy& policy,
                                       bool dry_run, const file::FileOps& files) {
  const auto catalog = ReadCatalog(root, files);
  if (!catalog) return std::unexpected(catalog.error());
  std::vector<std::string> names;
  std::optional<Error> first;
  for (const std::size_t index : ChooseRetired(*catalog, policy)) {
    const std::string& name = (*catalog)[index].name;
    auto retired = dry_run ? Result<void>() : Retire(root, name, files);
    if (retired) {
      names.push_back(name);
    } else if (!first) {
      first = retired.error();
    }
  }
  if (first) return std::unexpected(*std::move(first));
  return names;
}

Result<Leftovers> RemoveLeftovers(const Root& root, const file::FileOps& files) {
  if (root.access() != Root::Access::kWrite) {
    return Refused(root, "", "the directory was opened for reading only");
  }
  std::vector<std::string> names;
  if (const int listed = files.ListDirectory(root.fd(), names); listed < 0) {
    return std::unexpected(StorageError("list directory", root.path(), -listed));
  }
  std::ranges::sort(names);
  Leftovers leftovers;
  for (const std::string& name : names) TidyOne(root, name, files, leftovers);
  return leftovers;
}

}  // namespace fastpersist::commit
