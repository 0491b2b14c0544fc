// SPDX-License-Identifier: Apache-2.0
// Small checkpoints for tests of the checkpoint directory: made as a writer makes them, and judged
// by their bytes rather than by what their manifests say.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "commit/catalog.h"
#include "commit/generation.h"
#include "commit/root.h"
#include "fastpersist/error.h"
#include "file/file_ops.h"

namespace fastpersist::testing {

/// Real files that are never synced: what tests of orders and names need, on slow disks too.
class UnsyncedFiles final : public file::FileOps {
 public:
  int SyncData(int /*fd*/) const override { return 0; }
  int SyncDirectory(int /*fd*/) const override { return 0; }
};
[[nodiscard]] const file::FileOps& Unsynced();

/// The content of state.pt for a step: every step has a size of its own.
[[nodiscard]] std::string CheckpointContent(std::uint64_t step);

/// The manifest for a generation whose state.pt holds that content.
[[nodiscard]] commit::Manifest CheckpointManifest(const std::string& root_id,
                                                  const std::string& content);

/// Makes state.pt in the generation, writes and syncs it.
[[nodiscard]] Result<void> WriteState(const commit::Generation& generation,
                                      const std::string& content, const file::FileOps& files);

/// One whole checkpoint; returns the sequence number.
[[nodiscard]] Result<std::uint64_t> MakeCheckpoint(const commit::Root& root, std::uint64_t step,
                                                   const file::FileOps& files = Unsynced());

/// Opens the directory for writing; a failure ends the test program.
[[nodiscard]] std::unique_ptr<commit::Root> OpenForWriting(const std::string& path);

/// "2 step-00000200 complete" with the sequence number (or "-"), in the order of the catalog; reads
/// only. "broken promise" instead of complete when the bytes of its parts are not those that the
/// manifest states, and the error's message alone when the catalog cannot be read.
[[nodiscard]] std::vector<std::string> Listing(const std::string& path);

/// Step of the first complete entry in the catalog, its bytes compared; nullopt: there is none.
[[nodiscard]] std::optional<std::uint64_t> NewestStep(const std::string& path);

}  // namespace fastpersist::testing
