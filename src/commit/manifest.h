// SPDX-License-Identifier: Apache-2.0
// The manifest of a checkpoint: what was saved, in which files, with which checksums. It is written
// last and by a rename, so that a generation's directory with a manifest is a complete checkpoint
// as far as its writer is concerned; readers compare sizes and checksums all the same.
//
// On disk it is JSON, described in docs/format.md:
//
//   {"crc32": "0a1b2c3d", "manifest": {...}}
//
// crc32 is that of the inner object's canonical text (keys sorted, no white space), so that one
// flipped digit is found. Pure functions; thread-safe; they never throw for what is in a file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fastpersist/error.h"

namespace fastpersist::commit {

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr const char* kRetiredName = "retired.json";  // a manifest that counts no more
inline constexpr const char* kOwnerName = "owner.json";
/// What the manifest is called before the rename that commits it.
inline constexpr const char* kManifestTemporary = "manifest.json.tmp";

/// Version of what is written here.
inline constexpr std::uint32_t kManifestVersion = 1;
/// Manifests that demand a newer reader are refused.
inline constexpr std::uint32_t kReaderVersion = 1;
/// Larger files are refused before they are read.
inline constexpr std::uint64_t kMaxManifestBytes = std::uint64_t{256} << 20U;
/// Sizes, steps and sequence numbers end here.
inline constexpr std::uint64_t kMaxNumber = (std::uint64_t{1} << 63U) - 1;

/// A range of a stream, alone in a file of its own.
struct Part {
  std::string root;          ///< Id of the root where it was written; may be empty.
  std::string file;          ///< Its name in the generation's directory.
  std::uint64_t offset = 0;  ///< Where it begins in the stream, in bytes.
  std::uint64_t length = 0;  ///< Bytes: of the range, and of the file.
  std::uint32_t crc = 0;     ///< CRC-32 of these bytes.
};

/// What would be one standard file: its parts, put one after the other.
struct ManifestStream {
  std::string name;                        ///< "state.pt".
  std::string format;                      ///< "torch".
  std::uint64_t size = 0;                  ///< In bytes.
  std::uint32_t crc = 0;                   ///< CRC-32 of all its bytes.
  std::vector<std::uint32_t> record_crcs;  ///< Of the records in file order; may be empty.
  std::vector<Part> parts;                 ///< By offset, without gaps.
};

struct Manifest {
  std::uint32_t version = kManifestVersion;
  std::uint32_t reader_version = kReaderVersion;  ///< The oldest reader that understands it.
  std::string library;                            ///< Who wrote it: "fastpersist 0.1.0".
  std::string created;     ///< UTC, "2025-01-31T12:00:00Z"; for people, nothing is decided by it.
  std::string job;         ///< Id of the run of the writing program.
  std::string generation;  ///< Name of the directory.
  std::uint64_t step = 0;
  std::uint64_t sequence = 0;  ///< Of two checkpoints the newer one has the higher number.
  std::uint32_t world_size = 1;
  std::vector<ManifestStream> streams;
  std::string metadata =
      "{}";  ///< The user's: text of a JSON object, kept character for character.
};

/// kInvalidArgument when ParseManifest would refuse what ToJson makes of it; says why.
[[nodiscard]] Result<void> CheckManifest(const Manifest& manifest);

/// The text of the file. For a manifest that CheckManifest accepts.
[[nodiscard]] std::string ToJson(const Manifest& manifest);

/// path is for messages. kCorrupt for everything that is damaged or does not make sense (names that
/// lead out of the directory, parts that leave gaps, ...), kUnsupportedFile for what a newer
/// version wrote.
[[nodiscard]] Result<Manifest> ParseManifest(std::string_view text, const std::string& path);

/// The sequence number in a manifest too damaged for ParseManifest, if it can still be read.
[[nodiscard]] std::optional<std::uint64_t> FindSequence(std::string_view text);

/// A name of a file that can only lie in the directory at hand: no slash, no "..", no control
/// characters, 255 bytes at most.
[[nodiscard]] bool IsPlainName(std::string_view name);

/// Names under which checkpoints are written, state.pt and its like with their parts: what may be
/// removed where no manifest tells the names.
[[nodiscard]] bool IsPartName(std::string_view name);

}  // namespace fastpersist::commit
