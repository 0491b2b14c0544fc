// SPDX-License-Identifier: Apache-2.0
#include "commit/generation.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "commit/generation_files.h"
#include "commit/small_file.h"
#include "commit/target.h"
#include "fastpersist/version.h"

namespace fastpersist::commit {
namespace {

constexpr int kMaxTries = 100;
constexpr unsigned kSuffixDigits = 8;

}  // namespace

Generation::Generation(const Root& root, std::uint64_t step, const file::FileOps& files)
    : root_(&root), files_(&files), owner_(::getpid()), step_(step) {}

Generation::Generation(Generation&& other) noexcept
    : root_(other.root_),
      files_(other.files_),
      owner_(other.owner_),
      step_(other.step_),
      name_(std::exchange(other.name_, {})),
      path_(std::move(other.path_)),
      warning_(std::move(other.warning_)),
      directory_(std::move(other.directory_)),
      committing_(other.committing_),
      committed_(other.committed_),
      uncertain_(other.uncertain_) {}

// A child that was forked meanwhile unwinds its copy; the directory is the parent's.
Generation::~Generation() {
  if (::getpid() == owner_) Abandon();
}

Error Generation::Failed(std::string operation, int negative_errno, std::string detail) const {
  return StorageError(std::move(operation), path_, -negative_errno, std::move(detail));
}

Result<Generation> Generation::Begin(const Root& root, std::uint64_t step,
                                     const file::FileOps& files) {
  Generation generation(root, step, files);
  if (root.access() != Root::Access::kWrite || step > kMaxNumber) {
    return std::unexpected(Error{
        .code = ErrorCode::kInvalidArgument,
        .operation = "begin a checkpoint",
        .path = root.path(),
        .detail = step > kMaxNumber ? "the step is too large" : "it was opened for reading only"});
  }
  if (auto made = generation.MakeDirectory(); !made) return std::unexpected(made.error());
  if (auto written = generation.WriteOwner(); !written) return std::unexpected(written.error());
  return generation;
}

Result<void> Generation::MakeDirectory() {
  std::string name = fmt::format("step-{:08}", step_);
  const std::string plain = name;
  int made = -EEXIST;
  for (int i = 0; i < kMaxTries && made == -EEXIST; ++i) {
    if (i > 0) name = fmt::format("{}.g{}", plain, RandomHex(kSuffixDigits));
    path_ = root_->path() + '/' + name;
    // Before it is there: whoever cleans up may look at any moment.
    root_->NoteActive(name);
    made = files_->MakeDirectory(root_->fd(), name.c_str(), 0777);
    if (made < 0) root_->NoteEnded(name);
  }
  if (made < 0) return std::unexpected(Failed("make directory", made));
  name_ = name;
  directory_.Reset(OpenGeneration(*root_, name_, *files_));
  if (directory_.valid()) return {};
  const int failed = directory_.get();
  // Abandon needs the descriptor; it is empty still.
  (void)files_->RemoveDirectory(root_->fd(), name_.c_str());
  return std::unexpected(Failed("open directory", failed));
}

Result<void> Generation::WriteOwner() {
  const std::string text =
      OwnerText({.job = root_->job(), .generation = name_, .root = root_->id()});
  auto made = MakeSmallFile(fd(), kOwnerName, path_ + '/' + kOwnerName, text, *files_);
  if (!made) return made;
  if (auto synced = Sync(fd(), ""); !synced) return synced;
  return Sync(root_->fd(), "");
}

Result<void> Generation::Sync(int directory, const std::string& detail) {
  const int synced = SyncDirectoryIfPossible(directory, warning_, *files_);
  if (synced < 0) return std::unexpected(Failed("sync the directory", synced, detail));
  return {};
}

Result<void> Generation::WriteManifest(const std::string& text) {
  auto made =
      MakeSmallFile(fd(), kManifestTemporary, path_ + '/' + kManifestTemporary, text, *files_);
  if (!made) return made;
  const int renamed = files_->Rename(fd(), kManifestTemporary, kManifestName);
  if (renamed < 0) return AfterFailedRename(renamed);
  return {};
}

// A server may have renamed it, and its answer been lost. Nobody else writes here, so what is there
// is ours.
Result<void> Generation::AfterFailedRename(int renamed) {
  struct stat info{};
  const int found = files_->StatLink(fd(), kManifestName, &info);
  if (found >= 0) return {};
  if (found == -ENOENT) return std::unexpected(Failed("rename", renamed));
  uncertain_ = true;
  return std::unexpected(Failed("rename", renamed, "whether it took place is unknown"));
}

Result<std::uint64_t> Generation::Commit(Manifest manifest) {
  if (name_.empty() || committing_) {
    return std::unexpected(
        Error{.code = ErrorCode::kInvalidArgument,
              .operation = "commit",
              .path = path_,
              .detail = "this attempt has ended",
              .advice = "a sync that failed proves nothing when it is repeated: begin anew"});
  }
  const auto sequence = root_->NextSequence(*files_);
  if (!sequence) return std::unexpected(sequence.error());
  manifest.generation = name_;
  manifest.step = step_;
  manifest.sequence = *sequence;
  manifest.job = root_->job();
  if (manifest.created.empty()) manifest.created = UtcNow();
  if (manifest.library.empty()) manifest.library = "fastpersist " FASTPERSIST_VERSION_STRING;
  if (auto good = CheckManifest(manifest); !good) return std::unexpected(good.error());
  committing_ = true;
  if (auto synced = Sync(fd(), ""); !synced) return std::unexpected(synced.error());
  root_->NoteSequence(*sequence);  // used up, whatever comes
  if (auto written = WriteManifest(ToJson(manifest)); !written) {
    return std::unexpected(written.error());
  }
  committed_ = true;
  root_->NoteEnded(name_);
  const std::string detail = "the checkpoint is in place, its durability is unknown";
  if (auto synced = Sync(fd(), detail); !synced) return std::unexpected(synced.error());
  if (auto synced = Sync(root_->fd(), detail); !synced) return std::unexpected(synced.error());
  return *sequence;
}

void Generation::Abandon() {
  if (name_.empty() || committed_) return;
  if (directory_.valid() && !uncertain_) {
    // What stays is an unfinished generation, which the next start removes.
    (void)RemoveFiles(*root_, name_, fd(), {}, *files_);
  }
  root_->NoteEnded(name_);
  name_.clear();
}

}  // namespace fastpersist::commit
