// SPDX-License-Identifier: Apache-2.0
// Where the readers of layout get bytes from: a file, memory, or what a test makes up. Readers ask
// for small pieces (directories, headers, the pickle); tensors take the road of pipeline/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "fastpersist/error.h"

namespace fastpersist::layout {

/// Implementations are immutable and thread-safe.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  /// For messages: the file as the user named it.
  [[nodiscard]] virtual const std::string& name() const = 0;
  [[nodiscard]] virtual std::uint64_t size() const = 0;
  /// Fills out completely from the bytes at offset. kStorage when the system fails; kCorrupt when
  /// the source ends before (it was size() bytes long a moment ago: it shrank).
  [[nodiscard]] virtual Result<void> Read(std::uint64_t offset, std::span<std::byte> out) const = 0;
};

}  // namespace fastpersist::layout
