// SPDX-License-Identifier: Apache-2.0
// Checkpoint directories on the command line: what the commands on them have in common. A path may
// name a root (all its checkpoints) or the directory of one checkpoint.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli/exit_status.h"
#include "cli/json_output.h"
#include "commit/catalog.h"
#include "commit/root.h"
#include "fastpersist/error.h"
#include "fastpersist/options.h"

namespace fastpersist::cli {

struct Directory {
  std::unique_ptr<commit::Root> root;             ///< Open for reading.
  bool single = false;                            ///< The path names one checkpoint.
  std::vector<commit::CatalogEntry> checkpoints;  ///< Newest first; only that one if single.

  /// The first complete one; null if there is none.
  [[nodiscard]] const commit::CatalogEntry* newest() const;
  /// Of a file in a checkpoint.
  [[nodiscard]] std::string Path(const commit::CatalogEntry& checkpoint,
                                 std::string_view file) const;
};

/// Links are followed.
[[nodiscard]] bool IsDirectory(const std::string& path);

/// kUnsupportedFile for a directory that has to do with checkpoints in no way.
[[nodiscard]] Result<Directory> OpenDirectory(const std::string& path);

/// A table: step, age, size, state, name, and on the right why it is not complete.
[[nodiscard]] std::string CheckpointsText(const std::vector<commit::CatalogEntry>& checkpoints);
/// One of the "checkpoints" in docs/cli.md.
[[nodiscard]] Json CheckpointJson(const commit::CatalogEntry& checkpoint);

/// What `verify` reads with: past the page cache where that is possible, however much of a file is
/// in it, for what is to be checked is the device. The engines after this one follow if it is not
/// to be had.
inline constexpr Options kFromTheDevice{.engine = Engine::kUring};

/// The commands inspect and verify on a directory.
[[nodiscard]] ExitStatus InspectDirectory(const std::string& path, bool json, std::size_t rows);
[[nodiscard]] ExitStatus VerifyDirectory(const std::string& path, bool quick, bool json);

}  // namespace fastpersist::cli
