// SPDX-License-Identifier: Apache-2.0
// What a finished save reports: how much was written, by which engine and why that one, and where
// the time went.
#pragma once

#include <cstdint>
#include <string>

#include "fastpersist/options.h"
#include "fastpersist/version.h"

namespace fastpersist {
inline namespace v0 {

/// Where the time of one save went, in seconds. fill and write overlap; write is the time the
/// caller spent waiting for the device, so plan + fill + write + sync + commit is close to total.
struct SaveSeconds {
  double plan = 0;    ///< Layout, plan, opening and preallocating the file.
  double fill = 0;    ///< Copying into staging memory and computing checksums.
  double write = 0;   ///< Submitting writes and waiting for them.
  double sync = 0;    ///< Truncation to the exact size and fdatasync.
  double commit = 0;  ///< Rename and directory sync.
  double total = 0;   ///< From the call to its return.
};

/// A plain value describing one finished save.
struct SaveInfo {
  std::string path;                   ///< As the caller gave it.
  std::uint64_t bytes = 0;            ///< Size of the file.
  std::uint64_t staged_bytes = 0;     ///< Bytes copied through staging memory.
  std::uint64_t in_place_bytes = 0;   ///< Bytes written straight from tensor memory.
  SaveSeconds seconds;                ///< Where the time went.
  Engine engine = Engine::kBuffered;  ///< The engine that finished the file.
  std::string engine_reason;          ///< Why this engine, in a sentence.
  bool direct = false;                ///< True when the page cache was bypassed to the end.
  std::string warning;                ///< Something the user should know once; mostly empty.
};

}  // namespace v0
}  // namespace fastpersist
