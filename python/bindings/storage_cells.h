// SPDX-License-Identifier: Apache-2.0
// Where torch keeps the address and the size of a storage, so that a thread without the GIL sees at
// once when one is freed or moved under a strong reference (resize_(0), share_memory_()). torch
// promises no layout: it is learnt from a few storages of known address and size, and not used
// where that does not work.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace fastpersist::python {

struct KnownStorage {
  std::uintptr_t identity = 0;  ///< torch's _cdata: the StorageImpl.
  std::uintptr_t address = 0;   ///< Of its memory.
  std::uint64_t size = 0;       ///< In bytes.
};

/// Offsets in a StorageImpl, in bytes.
struct StorageLayout {
  std::size_t address = 0;
  std::size_t size = 0;
};

/// What fits all of the known storages, whose addresses and sizes must differ; nullopt if nothing
/// does.
[[nodiscard]] std::optional<StorageLayout> LearnStorageLayout(std::span<const KnownStorage> known);

}  // namespace fastpersist::python
