// SPDX-License-Identifier: Apache-2.0
// The PyTorch file: records in a ZIP archive, byte for byte as torch.save writes them. Pure: no
// files, no threads, no clocks.
//
// The caller supplies the records in torch's order (data.pkl, ..., byteorder, data/0, data/1, ...);
// "version", "byteorder" if it is not among them, and ".data/serialization_id" are added here, as
// torch's writer does when it closes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "fastpersist/error.h"
#include "layout/stream.h"

namespace fastpersist::layout {

/// One record of the archive, without the archive prefix in its name.
struct Record {
  std::string name;
  /// The body. It must outlive the stream when in_memory, otherwise it is copied into it.
  std::span<const std::byte> body;
  bool in_memory = false;
  std::optional<PulledBody> pulled;  ///< In place of body.

  [[nodiscard]] std::uint64_t size() const { return pulled ? pulled->length : body.size(); }
};

struct TorchContainerOptions {
  std::string prefix = "archive";  ///< ArchivePrefix(path).
  std::uint64_t alignment = 64;    ///< Of each body; torch's config.save.storage_alignment.
};

/// Lays the records out. Errors: kInvalidArgument for an empty prefix, an alignment that is not a
/// power of two up to 32768, a duplicate record name, or a name that does not fit.
[[nodiscard]] Result<Stream> LayOutTorchContainer(std::span<const Record> given,
                                                  const TorchContainerOptions& options);

/// The archive prefix that torch derives from a path as the user gave it: the base name up to its
/// last dot, or "archive" when the path has a byte outside ASCII. Empty for paths such as "dir/"
/// and
/// ".pt", which torch refuses.
[[nodiscard]] std::string ArchivePrefix(std::string_view path);

}  // namespace fastpersist::layout
