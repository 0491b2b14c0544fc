// SPDX-License-Identifier: Apache-2.0
// Which checkpoints go, and how. A checkpoint that goes is first made one that does not count, so
// that half of it can never be restored:
//
//   1  rename manifest.json to retired.json, sync its directory
//   2  remove the parts
//   3  remove retired.json, sync its directory
//   4  remove owner.json, then the directory, sync the root
//
// A crash after 1 leaves a retired generation, after 3 an unfinished one; RemoveLeftovers goes on
// with both. Files that are not ours are never touched, and then the directory stays with them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "commit/catalog.h"
#include "commit/root.h"
#include "fastpersist/error.h"
#include "file/file_ops.h"

namespace fastpersist::commit {

struct RetentionPolicy {
  std::optional<std::uint64_t> keep_last;   ///< Complete steps, the newest; nullopt keeps all.
  std::optional<std::uint64_t> keep_every;  ///< Besides: steps divisible by it.
};

/// Which entries (indices, oldest first) the policy gives up. Only complete ones that are owned and
/// whose order is certain; never the newest complete one. One that was saved again since (a newer
/// complete one has the same step) always goes. Pure.
[[nodiscard]] std::vector<std::size_t> ChooseRetired(std::span<const CatalogEntry> catalog,
                                                     const RetentionPolicy& policy);

/// Steps 1 to 4; goes on where an earlier attempt stopped. root is open for writing. kNotFound,
/// kInvalidArgument (not ours: no owner.json; nothing to retire: no manifest; being written),
/// kStorage: what cannot be removed now stays retired, and RemoveLeftovers tries again.
[[nodiscard]] Result<void> Retire(const Root& root, const std::string& generation,
                                  const file::FileOps& files);

/// Retires what the policy gives up, oldest first. Returns the names; only these with dry_run, for
/// which the root may be open for reading. kStorage: the first failure, after all others were
/// tried.
[[nodiscard]] Result<std::vector<std::string>> Prune(const Root& root,
                                                     const RetentionPolicy& policy, bool dry_run,
                                                     const file::FileOps& files);

struct Leftovers {
  std::vector<std::string> removed;  ///< Names of generations.
  /// Of leftovers that stay at least in part: the name, and where a call failed ": " and the
  /// reason.
  std::vector<std::string> kept;
};

/// Removes unfinished and retired generations of this root, except those that this process is
/// writing. Keeps all of them while the root has no lock: somebody else may be writing them. Never
/// touches foreign directories and damaged checkpoints. One that cannot be looked at or removed is
/// kept, and the others are tried all the same: it must not stand in the way of good checkpoints.
/// kStorage: the root cannot be listed.
[[nodiscard]] Result<Leftovers> RemoveLeftovers(const Root& root, const file::FileOps& files);

}  // namespace fastpersist::commit
