// SPDX-License-Identifier: Apache-2.0
// How one step is written. A generation is one attempt to do so, in a directory that nobody else
// has: whoever was given up and wakes late cannot touch what another attempt committed.
//
//   1  mkdir step-00000200 in the root; step-00000200.g<hex> if that exists
//   2  write owner.json, which says whose it is: fdatasync, sync the directory
//   3  sync the root, so that the directory itself stays
//   4  (writers create files in it, relative to its descriptor, with O_CREAT | O_EXCL; they write,
//      truncate and sync them)
//   5  sync the directory: the names of those files stay
//   6  write manifest.json.tmp, fdatasync
//   7  rename it to manifest.json
//   8  sync the directory, then the root
//
// Step 7 is the commit point. A failure before it leaves nothing behind: the destructor removes the
// directory. A process that ends before it leaves an unfinished generation, known by its owner.json
// (retention.h removes it). A failure in 8 is reported as what it is: the checkpoint is in place,
// its durability unknown. A failed sync is never repeated: a new attempt is a new Generation.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/unique_fd.h"
#include "commit/manifest.h"
#include "commit/root.h"
#include "fastpersist/error.h"
#include "file/file_ops.h"

namespace fastpersist::commit {

/// Used by one thread at a time; files may be written through fd() by others.
class Generation {
 public:
  /// Steps 1 to 3. root (opened for writing) and files must outlive the generation.
  [[nodiscard]] static Result<Generation> Begin(const Root& root, std::uint64_t step,
                                                const file::FileOps& files);
  Generation(Generation&& other) noexcept;
  Generation& operator=(Generation&&) = delete;
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;
  /// Abandons it unless it was committed; not in a forked child.
  ~Generation();

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::uint64_t step() const { return step_; }
  /// Its directory.
  [[nodiscard]] int fd() const { return directory_.get(); }
  /// The directory's path, for messages.
  [[nodiscard]] const std::string& path() const { return path_; }
  /// Something the user should know once; mostly empty.
  [[nodiscard]] const std::string& warning() const { return warning_; }

  /// Steps 5 to 8. Fills in generation, step, sequence and job, and library and created where they
  /// are empty. Returns the sequence number. kInvalidArgument: the manifest makes no sense, or this
  /// was called before. kStorage with committed() true and the operation "sync the directory":
  /// step 8 failed.
  [[nodiscard]] Result<std::uint64_t> Commit(Manifest manifest);
  /// The manifest is in place.
  [[nodiscard]] bool committed() const { return committed_; }

  /// Removes the files of the attempt and its directory, as far as possible. Files under names that
  /// are not ours stay, and the directory with them. Nothing after Commit.
  void Abandon();

 private:
  Generation(const Root& root, std::uint64_t step, const file::FileOps& files);
  [[nodiscard]] Error Failed(std::string operation, int negative_errno,
                             std::string detail = "") const;
  [[nodiscard]] Result<void> MakeDirectory();
  [[nodiscard]] Result<void> WriteOwner();
  [[nodiscard]] Result<void> Sync(int directory, const std::string& detail);
  [[nodiscard]] Result<void> WriteManifest(const std::string& text);
  [[nodiscard]] Result<void> AfterFailedRename(int renamed);

  const Root* root_;
  const file::FileOps* files_;
  pid_t owner_;  // the process that began it
  std::uint64_t step_;
  std::string name_;  // empty when there is nothing to abandon
  std::string path_;
  std::string warning_;
  base::UniqueFd directory_;
  bool committing_ = false;  // steps 5 to 8 are tried once
  bool committed_ = false;
  bool uncertain_ = false;  // a failed rename may have taken place: nothing is removed
};

}  // namespace fastpersist::commit
