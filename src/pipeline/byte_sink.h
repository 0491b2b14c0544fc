// SPDX-License-Identifier: Apache-2.0
// Who takes the bytes of a file as they arrive: the end of the road that the filler begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fastpersist::pipeline {

/// Used by one thread at a time.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  /// Forgets everything: the read begins anew, with another engine.
  virtual void Restart() = 0;
  /// Takes the bytes of the file from offset on. Calls come in ascending order of offset; between
  /// them may be gaps that nobody wanted. The bytes may lie in their final memory already. False:
  /// no more is needed.
  [[nodiscard]] virtual bool Accept(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
};

}  // namespace fastpersist::pipeline
