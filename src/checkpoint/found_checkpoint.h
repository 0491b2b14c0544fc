// SPDX-License-Identifier: Apache-2.0
// Which checkpoint of a directory is opened: the newest that is good, or that of a step.
#pragma once

#include <cstdint>
#include <optional>

#include "commit/root.h"
#include "fastpersist/checkpointer.h"
#include "fastpersist/error.h"
#include "file/file_ops.h"

namespace fastpersist::checkpoint {

/// As fastpersist::OpenCheckpoint; the root may be open for reading or writing. Thread-safe.
[[nodiscard]] Result<Checkpoint> FindCheckpoint(const commit::Root& root,
                                                std::optional<std::uint64_t> step,
                                                const file::FileOps& files);

}  // namespace fastpersist::checkpoint
