// SPDX-License-Identifier: Apache-2.0
// The memory of a loaded file as Python sees it: views with the buffer protocol, from which torch
// makes storages without a copy. A view gives its pages back to the kernel when it goes.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "memory/arena.h"

namespace fastpersist::python {

/// An arena that several views share.
struct SharedArena {
  memory::Arena arena;
  /// Set once the file was loaded. Until then views may go, when an attempt fails, whose bytes the
  /// next attempt needs.
  std::atomic<bool> releasable = false;
};

/// A piece of an arena that belongs to one storage alone.
class ArenaView {
 public:
  /// Precondition: the piece lies within the arena, and in no other view.
  ArenaView(std::shared_ptr<const SharedArena> shared, std::uint64_t offset, std::uint64_t size,
            bool owns = true)
      : shared_(std::move(shared)), offset_(offset), size_(size), owns_(owns) {}
  ArenaView(const ArenaView&) = delete;
  ArenaView& operator=(const ArenaView&) = delete;
  ArenaView(ArenaView&&) = delete;
  ArenaView& operator=(ArenaView&&) = delete;
  ~ArenaView() {
    if (owns_ && shared_->releasable) shared_->arena.Release(offset_, size_);
  }

  [[nodiscard]] std::span<std::byte> memory() const {
    return shared_->arena.memory().subspan(offset_, size_);
  }

 private:
  std::shared_ptr<const SharedArena> shared_;
  std::uint64_t offset_;
  std::uint64_t size_;
  bool owns_;  // false: only looks at it, as a view of all does
};

/// ArenaView and Arena.
void BindArena(nanobind::module_& m);

}  // namespace fastpersist::python
