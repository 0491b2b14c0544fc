// SPDX-License-Identifier: Apache-2.0
// What a path means before anything is written: the directory and name that a rename will hit, what
// is there already, and whether it can be replaced at all.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "base/unique_fd.h"
#include "fastpersist/error.h"
#include "file/file_ops.h"

namespace fastpersist::commit {

/// Mode and group of the file that will be replaced; the new file takes them over.
struct Replaced {
  mode_t mode = 0;
  gid_t group = 0;
};

struct Target {
  std::string path;  ///< As the user gave it; for messages, and for opening what is not regular.
  /// A device, a FIFO, or a descriptor under /proc: written in place, in order, without rename.
  bool special = false;
  base::UniqueFd directory;  ///< Of the file, links followed; invalid when special.
  std::string name;          ///< In that directory.
  std::optional<Replaced> replaced;
  /// In a directory that nobody else has: made under its final name, which must not exist. The
  /// directory's owner syncs it.
  bool fresh = false;
  bool mounted = false;  ///< A mount point (a bind-mounted file); it cannot be renamed over.
};

/// Follows symbolic links (a dangling one names the file that will be made) and looks at what is
/// there. Touches nothing. Errors: kStorage, with the errno that open(2) for writing would give.
[[nodiscard]] Result<Target> ResolveTarget(const std::string& path, const file::FileOps& files);

/// A kStorage error on a path, with the advice for its errno.
[[nodiscard]] Error StorageError(std::string operation, const std::string& path, int system_errno,
                                 std::string detail = "");

}  // namespace fastpersist::commit
