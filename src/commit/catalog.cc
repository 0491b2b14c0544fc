// SPDX-License-Identifier: Apache-2.0
#include "commit/catalog.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <map>
#include <utility>

#include "base/unique_fd.h"
#include "commit/generation_files.h"
#include "commit/small_file.h"
#include "commit/target.h"

namespace fastpersist::commit {
namespace {

constexpr int kMaxLooks = 10;

// Looks at one directory.
class Examiner {
 public:
  Examiner(const Root& root, const std::string& name, const file::FileOps& files)
      : root_(root), files_(files), path_(root.path() + '/' + name) {
    entry_.name = name;
    entry_.step = StepOfName(name).value_or(0);
  }

  // Nullopt: it is no directory, has gone, or has nothing to do with checkpoints.
  Result<std::optional<CatalogEntry>> Examine() {
    auto found = Look();
    if (found || !IsDamage(found.error().system_errno)) return found;
    // The device cannot give it back. That must not stand in the way of the other checkpoints.
    entry_.state = GenerationState::kDamaged;
    entry_.reason = found.error().Message();
    entry_.manifest.reset();
    entry_.owned = false;
    return std::move(entry_);
  }

 private:
  static bool IsDamage(int system_errno) {
    return system_errno == EIO || system_errno == EBADMSG || system_errno == EUCLEAN;
  }

  Result<std::optional<CatalogEntry>> Look() {
    const bool ours_by_name = StepOfName(entry_.name).has_value();
    directory_.Reset(OpenGeneration(root_, entry_.name, files_));
    const int opened = directory_.get();
    if (opened == -ENOENT || opened == -ENOTDIR || opened == -ELOOP) return std::nullopt;
    // What cannot be looked into is somebody else's.
    if (opened < 0 && !ours_by_name) return std::nullopt;
    if (opened < 0) return std::unexpected(StorageError("open directory", path_, -opened));
    // It may be committed or retired at any moment; nobody does so again and again.
    for (int i = 0; i < kMaxLooks; ++i) {
      if (auto listed = List(); !listed) {
        if (listed.error().system_errno == ENOENT) return std::nullopt;
        return std::unexpected(listed.error());
      }
      auto judged = Judge();
      if (!judged && judged.error().code == ErrorCode::kNotFound) continue;
      if (!judged) return std::unexpected(judged.error());
      if (!*judged) return std::nullopt;
      return std::move(entry_);
    }
    return std::unexpected(StorageError("look at", path_, EAGAIN, "it changes all the time"));
  }

  Result<void> List() {
    found_.clear();
    entry_.bytes = 0;
    std::vector<std::string> names;
    if (const int listed = files_.ListDirectory(directory_.get(), names); listed < 0) {
      return std::unexpected(StorageError("list directory", path_, -listed));
    }
    for (std::string& name : names) {
      struct stat info{};
      const int found = files_.StatLink(directory_.get(), name.c_str(), &info);
      if (found == -ENOENT) continue;
      if (found < 0) return std::unexpected(StorageError("look at", Path(name), -found));
      if (S_ISREG(info.st_mode)) entry_.bytes += static_cast<std::uint64_t>(info.st_size);
      found_.emplace(std::move(name), info);
    }
    return {};
  }

  // False: not worth an entry. kNotFound: it has changed since it was listed.
  Result<bool> Judge() {
    auto owner = ReadOwner(directory_.get(), path_, files_);
    if (!owner) return std::unexpected(owner.error());
    entry_.owned = owner->has_value();
    if (found_.contains(kRetiredName)) {
      if (auto read = ReadManifest(kRetiredName); !read) return std::unexpected(read.error());
      entry_.state = GenerationState::kRetired;
      entry_.reason = "it was retired, and its removal did not come to an end";
      entry_.manifest.reset();
      return true;
    }
    if (found_.contains(kManifestName)) {
      if (auto read = ReadManifest(kManifestName); !read) return std::unexpected(read.error());
      if (entry_.manifest) CheckParts(*entry_.manifest);
      return true;
    }
    if (entry_.owned) {
      entry_.state = GenerationState::kUnfinished;
      entry_.reason = found_.contains(kManifestTemporary)
                          ? "its manifest has only its temporary name: the save did not come to "
                            "its end"
                          : "it has no manifest: it is being written, or the save did not come to "
                            "its end";
      return true;
    }
    entry_.reason = "it has neither a manifest nor an owner.json: nothing here touches it";
    return StepOfName(entry_.name).has_value();
  }

  // Damage is in the entry; an error is one of the system.
  Result<void> ReadManifest(const char* name) {
    entry_.state = GenerationState::kDamaged;
    const auto text = ReadSmallFile(directory_.get(), name, Path(name), kMaxManifestBytes, files_);
    if (!text) {
      if (text.error().code != ErrorCode::kCorrupt) return std::unexpected(text.error());
      entry_.reason = fmt::format("{} cannot be read: {}", name, text.error().detail);
      return {};
    }
    auto parsed = ParseManifest(*text, Path(name));
    if (parsed) {
      entry_.step = parsed->step;
      entry_.sequence = parsed->sequence;
      entry_.state = GenerationState::kComplete;
      entry_.manifest = *std::move(parsed);
      return {};
    }
    entry_.sequence = FindSequence(*text);
    if (parsed.error().code == ErrorCode::kUnsupportedFile) {
      entry_.state = GenerationState::kNewer;
      entry_.reason = parsed.error().detail + "; " + parsed.error().advice;
    } else {
      entry_.reason = fmt::format("its manifest is damaged: {}", parsed.error().detail);
    }
    return {};
  }

  void CheckParts(const Manifest& manifest) {
    for (const ManifestStream& stream : manifest.streams) {
      for (const Part& part : stream.parts) {
        std::string wrong = WhatIsWrong(part);
        if (wrong.empty()) continue;
        entry_.state = GenerationState::kDamaged;
        entry_.reason = std::move(wrong);
        return;
      }
    }
  }

  [[nodiscard]] std::string WhatIsWrong(const Part& part) const {
    const auto found = found_.find(part.file);
    if (found == found_.end()) return fmt::format("'{}' is missing", part.file);
    if (!S_ISREG(found->second.st_mode)) return fmt::format("'{}' is no file", part.file);
    const auto size = static_cast<std::uint64_t>(found->second.st_size);
    if (size == part.length) return {};
    return fmt::format("'{}' has {} bytes instead of {}", part.file, size, part.length);
  }

  [[nodiscard]] std::string Path(const std::string& name) const { return path_ + '/' + name; }

  const Root& root_;
  const file::FileOps& files_;
  std::string path_;
  base::UniqueFd directory_;
  std::map<std::string, struct stat> found_;
  CatalogEntry entry_;
};

Result<std::vector<std::string>> NamesIn(const Root& root, const file::FileOps& files) {
  std::vector<std::string> names;
  if (const int listed = files.ListDirectory(root.fd(), names); listed < 0) {
    return std::unexpected(StorageError("list directory", root.path(), -listed));
  }
  return names;
}

bool IsNewer(const CatalogEntry& a, const CatalogEntry& b) {
  if (a.sequence != b.sequence) return a.sequence > b.sequence;  // nullopt is the lowest
  if (a.step != b.step) return a.step > b.step;
  return a.name < b.name;
}

// Sorted: those with one number are neighbours.
void ExplainTwins(std::vector<CatalogEntry>& entries) {
  std::map<std::uint64_t, std::vector<CatalogEntry*>> complete;
  for (CatalogEntry& entry : entries) {
    if (entry.state == GenerationState::kComplete) complete[*entry.sequence].push_back(&entry);
  }
  for (const auto& [sequence, twins] : complete) {
    if (twins.size() < 2) continue;
    for (CatalogEntry* entry : twins) {
      const CatalogEntry* other = entry == twins[0] ? twins[1] : twins[0];
      entry->reason = fmt::format(
          "it has the same sequence number {} as '{}', so that neither is the newer one: choose by "
          "step or by name",
          sequence, other->name);
    }
  }
}

}  // namespace

std::string_view StateName(GenerationState state) {
  switch (state) {
    case GenerationState::kComplete:
      return "complete";
    case GenerationState::kUnfinished:
      return "unfinished";
    case GenerationState::kRetired:
      return "retired";
    case GenerationState::kDamaged:
      return "damaged";
    case GenerationState::kNewer:
      return "newer";
    case GenerationState::kForeign:
      break;
  }
  return "foreign";
}

std::optional<std::uint64_t> StepOfName(std::string_view name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  std::uint64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  if (error != std::errc()) return std::nullopt;
  const auto digits = static_cast<std::size_t>(end - name.data());
  const std::string_view rest = name.substr(digits);
  if (digits < 8 || (!rest.empty() && (!rest.starts_with(".g") || rest.size() == 2))) {
    return std::nullopt;
  }
  const bool hexadecimal = rest.find_first_not_of("0123456789abcdef", 2) == std::string_view::npos;
  return hexadecimal ? std::optional(step) : std::nullopt;
}

Result<std::vector<CatalogEntry>> ReadCatalog(const Root& root, const file::FileOps& files) {
  const auto names = NamesIn(root, files);
  if (!names) return std::unexpected(names.error());
  std::vector<CatalogEntry> entries;
  for (const std::string& name : *names) {
    auto entry = Examiner(root, name, files).Examine();
    if (!entry) return std::unexpected(entry.error());
    if (*entry) entries.push_back(**std::move(entry));
  }
  std::ranges::sort(entries, &IsNewer);
  ExplainTwins(entries);
  return entries;
}

Result<CatalogEntry> ReadCatalogEntry(const Root& root, const std::string& generation,
                                      const file::FileOps& files) {
  auto entry = Examiner(root, generation, files).Examine();
  if (!entry) return std::unexpected(entry.error());
  if (*entry) return **std::move(entry);
  return std::unexpected(Error{.code = ErrorCode::kNotFound,
                               .operation = "look for a checkpoint",
                               .path = root.path() + '/' + generation,
                               .system_errno = ENOENT,
                               .advice = "fastpersist ls lists what is there"});
}

Result<std::uint64_t> HighestSequence(const Root& root, const file::FileOps& files) {
  const auto names = NamesIn(root, files);
  if (!names) return std::unexpected(names.error());
  std::uint64_t highest = 0;
  for (const std::string& name : *names) {
    const base::UniqueFd directory(OpenGeneration(root, name, files));
    if (!directory.valid()) continue;
    for (const char* file : {kManifestName, kRetiredName}) {
      const auto text = ReadSmallFile(directory.get(), file, root.path() + '/' + name + '/' + file,
                                      kMaxManifestBytes, files);
      // Guessing would risk two checkpoints with one number.
      if (!text && text.error().code == ErrorCode::kStorage) return std::unexpected(text.error());
      if (!text) continue;
      const auto manifest = ParseManifest(*text, "");
      const auto sequence = manifest ? manifest->sequence : FindSequence(*text).value_or(0);
      highest = std::max(highest, sequence);
    }
  }
  return highest;
}

}  // namespace fastpersist::commit
