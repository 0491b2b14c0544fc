// SPDX-License-Identifier: Apache-2.0
// The engine of last resort: pwrite(2) and pread(2) in the calling thread, one at a time. Works on
// every file, direct or not, and on what has no offsets (pipes) through write(2).
#pragma once

#include "engine/io_engine.h"

namespace fastpersist::engine {

class BufferedEngine final : public IoEngine {
 public:
  [[nodiscard]] Engine kind() const override { return Engine::kBuffered; }
  [[nodiscard]] unsigned depth() const override { return 1; }
  [[nodiscard]] Result<Submitted> Submit(const IoRequest& request,
                                         IoCompletion* completed) override;
  [[nodiscard]] Result<std::size_t> Reap(std::span<IoCompletion> out) override;
};

/// Carries one request out with pwrite(2) or pread(2): bytes moved, or -errno.
[[nodiscard]] std::int64_t MoveBytes(const IoRequest& request);

}  // namespace fastpersist::engine
