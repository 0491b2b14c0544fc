// SPDX-License-Identifier: Apache-2.0
// The small files that describe a checkpoint: read whole into memory, written whole and synced.
// Errors name the path that the caller gives, and the operation. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fastpersist/error.h"
#include "file/file_ops.h"

namespace fastpersist::commit {

/// The whole file. path is for messages. kNotFound; kCorrupt for one of more than limit bytes and
/// for what is no regular file (links are not followed, nothing waits); kStorage.
[[nodiscard]] Result<std::string> ReadSmallFile(int directory, const char* name,
                                                const std::string& path, std::uint64_t limit,
                                                const file::FileOps& files);

/// Makes the file, which must not exist, and syncs its data; the directory is the caller's. After a
/// failure it is removed again if possible. kStorage.
[[nodiscard]] Result<void> MakeSmallFile(int directory, const char* name, const std::string& path,
                                         std::string_view text, const file::FileOps& files);

/// Writes all of the text to the descriptor. 0, or -errno.
[[nodiscard]] int WriteWhole(int fd, std::string_view text, const file::FileOps& files);

/// Sync of a directory on a file system that cannot (EINVAL, EOPNOTSUPP) leaves a sentence in
/// warning. 0, or -errno.
[[nodiscard]] int SyncDirectoryIfPossible(int directory, std::string& warning,
                                          const file::FileOps& files);

/// Lower-case hexadecimal digits that nobody else chose.
[[nodiscard]] std::string RandomHex(unsigned digits);

/// "2025-01-31T12:00:00Z": now.
[[nodiscard]] std::string UtcNow();

}  // namespace fastpersist::commit
