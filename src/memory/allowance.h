// SPDX-License-Identifier: Apache-2.0
// How much memory the control groups of this process still allow. Locked staging memory cannot be
// reclaimed, so taking more than that ends in an OOM kill instead of an error.
//
// Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace fastpersist::memory {

/// Bytes until the tightest limit on the way from this process's group to the root, page cache that
/// can be reclaimed counted as free. nullopt: no limit, or none that can be read. root and self are
/// for tests.
[[nodiscard]] std::optional<std::uint64_t> MemoryAllowance(
    const std::filesystem::path& root = "/sys/fs/cgroup",
    const std::filesystem::path& self = "/proc/self/cgroup");

}  // namespace fastpersist::memory
