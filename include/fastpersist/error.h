// SPDX-License-Identifier: Apache-2.0
// Errors are values. Every fallible call returns Result<T>; an Error says which operation failed,
// on which path and offset, with which errno, and what the caller can do about it.
#pragma once

#include <cstdint>
#include <expected>
#include <optional>
#include <string>

#include "fastpersist/version.h"

namespace fastpersist {
inline namespace v0 {

/// What kind of failure it is; decides the exception type in the Python binding.
enum class ErrorCode : std::uint8_t {
  kInvalidArgument,   ///< The caller's options or names cannot be used; nothing was touched.
  kUnsupportedState,  ///< The format cannot hold this state (the key is named); nothing was
                      ///< touched.
  kStorage,           ///< The operating system refused or failed an operation.
  kForked,            ///< The library was in use before fork(2); the child must not go on with it.
  kCorrupt,           ///< What was read is damaged: a checksum differs, or the structure is broken.
  kUnsupportedFile,   ///< A file of a kind that is recognised and not read here.
  kNotFound,          ///< There is no such file, or no such tensor in it.
  kMismatch,          ///< What the file holds does not fit where it should go; nothing was read.
  kStateChanged,      ///< Memory changed while it was being saved; nothing was committed.
  kAbandoned,         ///< A save was given up before it was complete; nothing was committed.
};

/// One failure. A value type: copyable, no hidden state; safe to pass between threads.
struct FASTPERSIST_EXPORT Error {
  ErrorCode code = ErrorCode::kStorage;  ///< What kind of failure.
  std::string operation;  ///< "open", "preallocate", "write", "fdatasync", "rename", ...
  std::string path;       ///< The file that the caller named; empty where there is none.
  std::optional<std::uint64_t> offset;  ///< Byte offset in the file, for reads and writes.
  int system_errno = 0;                 ///< errno of the failed call; 0 where there is none.
  std::string entry;  ///< The tensor or record concerned; empty where there is none.
  std::optional<std::uint32_t> expected_crc;  ///< kCorrupt: the CRC-32 in the file ...
  std::optional<std::uint32_t> found_crc;     ///< ... and that of the bytes that were read.
  std::string detail;  ///< What happened, in a sentence without a final period.
  std::string advice;  ///< What to do about it, likewise; may be empty.

  /// "write failed on /x/model.pt at offset 4096: No space left on device; free 2 GiB and save
  /// again".
  [[nodiscard]] std::string Message() const;
};

/// The result of a fallible call. Ignoring it is a compile-time warning.
template <class T>
using Result = std::expected<T, Error>;

}  // namespace v0
}  // namespace fastpersist
