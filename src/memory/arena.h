// SPDX-License-Identifier: Apache-2.0
// An Arena is private memory that mirrors a file: what a record of the file holds at byte i goes to
// byte i of the arena. What lies between the records may be there too, or not.
// Its address is a multiple of every alignment a device may ask for, so whole blocks of the file
// land where they stay, without a copy; storages are views into it. Huge pages where the kernel
// gives them: fewer faults, and the device gets long pieces.
//
// Parts that nobody needs any more go back to the kernel one by one (Release); the rest with the
// arena. Thread-safe, apart from the bytes themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fastpersist/error.h"

namespace fastpersist::memory {

class Arena {
 public:
  /// Memory for bytes, and on to the next multiple of 64 KiB. Not inherited by fork(2) until
  /// AllowFork: a child that shared pages with a read in flight could take the bytes with it. Pages
  /// are taken when first touched. kStorage with ENOMEM.
  [[nodiscard]] static Result<Arena> Create(std::uint64_t bytes);

  Arena() = default;
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  /// The bytes asked for. What follows up to roomy_size() is there too, and means nothing.
  [[nodiscard]] std::span<std::byte> memory() const { return {base_, size_}; }
  [[nodiscard]] std::uint64_t roomy_size() const { return mapped_; }
  /// To be called when no read is in flight: from now on children get copies, as of any memory.
  void AllowFork() const;
  /// Gives the whole pages within [offset, offset + length) back to the kernel. Nobody may look at
  /// these bytes afterwards.
  void Release(std::uint64_t offset, std::uint64_t length) const;

 private:
  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
  std::size_t mapped_ = 0;
};

}  // namespace fastpersist::memory
