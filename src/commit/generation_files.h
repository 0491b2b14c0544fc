// SPDX-License-Identifier: Apache-2.0
// What lies in a generation's directory besides the parts, and how it is removed. Shared by those
// who write generations and by those who clean up.
#pragma once

#include <optional>
#include <set>
#include <string>

#include "commit/root.h"
#include "fastpersist/error.h"
#include "file/file_ops.h"

namespace fastpersist::commit {

/// owner.json: whose generation it is.
struct Owner {
  std::string job;
  std::string generation;
  std::string root;  ///< Id of the root where it was made.
};

[[nodiscard]] std::string OwnerText(const Owner& owner);

/// directory: of the generation; path: its path, for messages. Nullopt when there is none that can
/// be understood: the directory is foreign. kStorage when it cannot be read.
[[nodiscard]] Result<std::optional<Owner>> ReadOwner(int directory, const std::string& path,
                                                     const file::FileOps& files);

/// A generation's directory, opened; -errno when it is none. Links are not followed.
[[nodiscard]] int OpenGeneration(const Root& root, const std::string& name,
                                 const file::FileOps& files);

/// What RemoveFiles came to.
struct RemovedFiles {
  bool foreign_left = false;  ///< Files that are not ours are still there.
};

/// Removes the parts (names in parts, and all that IsPartName) and the manifest's temporary, then
/// retired.json; syncs the directory; removes owner.json, then the directory unless something else
/// is in it; and syncs the root. A manifest.json is never touched. What is gone already is no
/// error. kStorage: the first failure; owner.json is still there then, unless it came last.
[[nodiscard]] Result<RemovedFiles> RemoveFiles(const Root& root, const std::string& name,
                                               int directory, const std::set<std::string>& parts,
                                               const file::FileOps& files);

}  // namespace fastpersist::commit
