// SPDX-License-Identifier: Apache-2.0
// The catalog: which checkpoints a root holds, and what is wrong with those that do not count. Only
// structure is looked at: a checkpoint is complete when its manifest can be read and every part is
// there with its size. Checksums are compared by whoever reads the data.
//
// Newest is the highest sequence number, never a step, a name or a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "commit/manifest.h"
#include "commit/root.h"
#include "fastpersist/error.h"
#include "file/file_ops.h"

namespace fastpersist::commit {

enum class GenerationState : std::uint8_t {
  kComplete,
  kUnfinished,  ///< No manifest: being written, or its writer was killed.
  kRetired,     ///< Being removed; never restored.
  kDamaged,     ///< A manifest, but it or a part is missing, short or damaged.
  kNewer,       ///< Written by a newer version of the library.
  kForeign,     ///< Not known to be ours: no owner.json, no manifest.
};

/// "complete", "unfinished", ...
[[nodiscard]] std::string_view StateName(GenerationState state);

struct CatalogEntry {
  std::string name;        ///< Of the directory.
  std::uint64_t step = 0;  ///< By the manifest, else by the name; 0 where neither tells.
  GenerationState state = GenerationState::kForeign;
  /// Why it is not complete, a sentence without a final period. A complete one has a reason when
  /// another has the same sequence number, so that none is the newer one.
  std::string reason;
  std::optional<Manifest> manifest;
  std::uint64_t bytes = 0;  ///< Of the files in its directory.
  /// Of the manifest; of a damaged one if it can still be read.
  std::optional<std::uint64_t> sequence;
  bool owned = true;  ///< Has an owner.json that can be read; others are never removed.
};

/// Newest first: by sequence number, then those without, by step. Entries that vanish meanwhile are
/// left out. Errors: kStorage when a directory cannot be listed or a manifest not be read.
[[nodiscard]] Result<std::vector<CatalogEntry>> ReadCatalog(const Root& root,
                                                            const file::FileOps& files);

/// One generation, by the name of its directory. kNotFound.
[[nodiscard]] Result<CatalogEntry> ReadCatalogEntry(const Root& root, const std::string& generation,
                                                    const file::FileOps& files);

/// The highest sequence number in any manifest, damaged and retired ones included; 0 where there is
/// none. kStorage when one of them cannot be read: its number might be the highest.
[[nodiscard]] Result<std::uint64_t> HighestSequence(const Root& root, const file::FileOps& files);

/// "step-00000200" or "step-00000200.g3f9a" → 200.
[[nodiscard]] std::optional<std::uint64_t> StepOfName(std::string_view name);

}  // namespace fastpersist::commit
