// SPDX-License-Identifier: Apache-2.0
// What alignment direct I/O needs on an open file: asked of the kernel (statx(2), STATX_DIOALIGN,
// Linux 6.1), else tried on the file, else 4096. Never taken from the sector size: several file
// systems need more.
#pragma once

#include "plan/write_plan.h"

namespace fastpersist::file {

/// Preconditions: O_DIRECT is set on fd; the file is the caller's own and its first block may be
/// overwritten. Returns limits with direct = false when the file takes no direct I/O at all.
[[nodiscard]] plan::DeviceLimits ProbeLimits(int fd);

/// The same for a file that is read only: where the kernel does not say, reads are tried.
/// Precondition: O_DIRECT is set on fd.
[[nodiscard]] plan::DeviceLimits ProbeReadLimits(int fd);

}  // namespace fastpersist::file
