// SPDX-License-Identifier: Apache-2.0
// How a save is carried out. The defaults are right for most; every field that is not set is chosen
// for the device that holds the target.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "fastpersist/error.h"
#include "fastpersist/version.h"

namespace fastpersist {
inline namespace v0 {

/// Who moves the blocks to the device. kAuto tries them in this order and says why it settled.
enum class Engine : std::uint8_t { kAuto, kUring, kLibaio, kThreads, kBuffered };

/// "auto", "uring", "libaio", "threads" or "buffered".
[[nodiscard]] FASTPERSIST_EXPORT std::string_view EngineName(Engine engine);
/// The inverse of EngineName; nullopt for any other word.
[[nodiscard]] FASTPERSIST_EXPORT std::optional<Engine> ParseEngine(std::string_view name);

/// A plain value; aggregate-initialise the fields that matter.
struct Options {
  Engine engine = Engine::kAuto;  ///< kAuto, or where to start in the order of Engine.
  std::optional<std::uint64_t>
      block_bytes;  ///< Bytes per write; a multiple of 4096. Default 4 MiB.
  /// In flight, 1 to 256. Default 8; 2 when reading where the processor copies (loop devices,
  /// memory used as a disk, no direct I/O).
  std::optional<std::uint32_t> queue_depth;
  /// Page-locked. Default 64 MiB; when reading, one block more than are in flight.
  std::optional<std::uint64_t> staging_bytes;
  bool direct = true;         ///< Bypass the page cache where the file system can.
  bool sync = true;           ///< fdatasync(2) and a directory sync before the save returns.
  bool atomic = true;         ///< Write beside the target and rename; false writes in place.
  std::uint32_t retries = 1;  ///< Whole-file attempts after a storage error (ENOSPC, EIO, a sync).
};

/// Refuses values that cannot work, naming the field (kInvalidArgument).
[[nodiscard]] FASTPERSIST_EXPORT Result<void> Validate(const Options& options);

}  // namespace v0
}  // namespace fastpersist
