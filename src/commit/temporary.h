// SPDX-License-Identifier: Apache-2.0
// Temporary files: a save writes beside its target, under a name that nobody else uses, and holds a
// lock on it. A killed process leaves its file behind unlocked; the next save to the same target
// removes it.
//
// Name: ".fp-" + 16 hex digits (hash of the target's name) + "-" + 16 hex digits (random) + ".tmp",
// unique over hosts, processes and threads, and short enough for every NAME_MAX.
#pragma once

#include <string>
#include <string_view>

#include "base/fork_closed.h"
#include "base/unique_fd.h"
#include "commit/target.h"
#include "fastpersist/error.h"
#include "file/file_ops.h"

namespace fastpersist::commit {

struct Temporary {
  base::UniqueFd fd;  ///< Open for writing, locked where the file system has locks.
  base::ForkClosed fork_closed;
  std::string name;  ///< In the target's directory.
};

/// Makes and locks an empty temporary file. Its mode is the replaced file's, or 0666 less the
/// umask.
[[nodiscard]] Result<Temporary> MakeTemporary(const Target& target, const file::FileOps& files);

/// Removes temporaries of this target whose owner is gone. Errors are not worth failing a save.
void RemoveLeftovers(const Target& target, const file::FileOps& files);

/// ".fp-<hash>-": what the temporaries of a target have in common.
[[nodiscard]] std::string TemporaryPrefix(std::string_view name);

}  // namespace fastpersist::commit
