// SPDX-License-Identifier: Apache-2.0
// How one file is published. At every instant the target's name leads to one complete file: the old
// one before step 8, the new one after it.
//
//   1  remove what killed saves left beside the target
//   2  make a temporary file in the target's directory and lock it
//   3  preallocate its whole size, so that a full disk shows before a byte is written
//   4  (the pipeline writes every byte through the descriptor of step 2)
//   5  truncate to the exact size
//   6  fdatasync through that same descriptor: it was open before the first write, so no write
//   error
//      can have been reported to somebody else
//   7  flush as close(2) would, where network file systems report errors
//   8  rename over the target
//   9  sync the directory
//
// A failure up to 8 removes the temporary; the old file is untouched. A failure in 9 is reported as
// what it is: the new file is in place, its durability unknown. A failed sync is never repeated on
// the same file (Linux reports such an error once and then forgets it): a new attempt is a new
// Publication.
//
// Targets that are no regular files, and atomic=false, are written in place: steps 4 to 7 only. A
// fresh target is made under its final name: steps 2 to 7, and it is removed unless it got that
// far.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/fork_closed.h"
#include "base/unique_fd.h"
#include "commit/target.h"
#include "fastpersist/error.h"
#include "fastpersist/options.h"
#include "file/file_ops.h"

namespace fastpersist::commit {

class Publication {
 public:
  /// Steps 1 and 2, or opens the target in place. The target must outlive the publication.
  [[nodiscard]] static Result<Publication> Begin(const Target& target, const Options& options,
                                                 const file::FileOps& files);
  Publication(Publication&& other) noexcept;
  Publication& operator=(Publication&&) = delete;
  Publication(const Publication&) = delete;
  Publication& operator=(const Publication&) = delete;
  /// Removes the temporary unless it was published.
  ~Publication();

  [[nodiscard]] int fd() const { return fd_.get(); }
  /// False when the bytes must arrive in order and without padding (pipes, devices).
  [[nodiscard]] bool regular() const { return regular_; }

  /// Step 3: padded_size covers the last block with its padding.
  [[nodiscard]] Result<void> Preallocate(std::uint64_t size, std::uint64_t padded_size);
  /// Steps 5 to 7.
  [[nodiscard]] Result<void> Seal(std::uint64_t size);
  /// Steps 8 and 9. warning receives what the user should know once.
  [[nodiscard]] Result<void> Publish(std::string& warning);

 private:
  Publication(const Target& target, const Options& options, const file::FileOps& files);
  [[nodiscard]] Error Failed(std::string operation, int negative_errno,
                             std::string detail = "") const;
  [[nodiscard]] Result<void> OpenInPlace();
  [[nodiscard]] Result<void> OpenFresh();

  const Target& target_;
  const Options& options_;
  const file::FileOps& files_;
  pid_t owner_;  // the process that began it
  base::UniqueFd fd_;
  bool regular_ = true;
  base::ForkClosed fork_closed_;  // after fd_: unregistered before the descriptor is closed
  std::string temporary_;         // name; empty when there is none (any more)
};

}  // namespace fastpersist::commit
