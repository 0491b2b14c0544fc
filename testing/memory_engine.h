// SPDX-License-Identifier: Apache-2.0
// A device and its file without a disk, for tests of what stands above the engines. The
// MemoryEngine demands any alignment, keeps several operations in flight, and finishes them late
// and out of order, all from a seed. The MemoryFile is the bytes.
//
// An operation moves its bytes at a moment drawn between submission and completion, so that a
// caller who fills a buffer too late or reuses it too early leaves wrong bytes in the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/unique_fd.h"
#include "engine/io_engine.h"
#include "plan/write_plan.h"
#include "testing/seed.h"

namespace fastpersist::testing {

/// An anonymous file (memfd_create(2)); any engine can write it through its descriptor.
class MemoryFile {
 public:
  explicit MemoryFile(std::uint64_t size = 0);

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] std::vector<std::byte> Bytes() const;
  void Truncate(std::uint64_t size) const;

 private:
  base::UniqueFd fd_;
};

struct MemoryEngineOptions {
  unsigned depth = 4;
  /// What the device demands; direct = false: nothing.
  plan::DeviceLimits limits{.memory_align = 512, .offset_align = 512, .direct = true};
  /// A misaligned request always ends in -EINVAL; it also fails the test, unless the test means it.
  bool misalignment_is_expected = false;
  std::uint64_t seed = 0;
};

class MemoryEngine final : public engine::IoEngine {
 public:
  explicit MemoryEngine(const MemoryEngineOptions& options);

  [[nodiscard]] Engine kind() const override { return Engine::kUring; }
  [[nodiscard]] unsigned depth() const override { return options_.depth; }
  [[nodiscard]] Result<engine::Submitted> Submit(const engine::IoRequest& request,
                                                 engine::IoCompletion* completed) override;
  /// An Error when nothing is in flight: a real engine would wait for ever.
  [[nodiscard]] Result<std::size_t> Reap(std::span<engine::IoCompletion> out) override;

 private:
  struct Operation {
    engine::IoRequest request;
    std::uint64_t due = 0;  // finished in ascending order
    bool moved = false;
    std::int64_t result = 0;
  };

  [[nodiscard]] std::int64_t Move(const engine::IoRequest& request) const;

  MemoryEngineOptions options_;
  Random random_;
  std::uint64_t clock_ = 0;
  std::vector<Operation> in_flight_;
};

}  // namespace fastpersist::testing
