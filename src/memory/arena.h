// SPDX-License-Identifier: Apache-2.0
// An Arena is private memory that mirrors a file: what a record of the file holds at byte i goes to
// byte i of the arena. What lies between the records may be there too, or not.
// Storages are views into it. Its address is a multiple of every alignment a device may ask for, so
// that what is copied there begins as it lies in the staging buffer. Huge pages where the kernel
// gives them: fewer faults.
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
  /// Memory for that many bytes; zeroes. Pages are taken when first touched. kStorage with ENOMEM.
  [[nodiscard]] static Result<Arena> Create(std::uint64_t bytes);

  Arena() = default;
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  [[nodiscard]] std::span<std::byte> memory() const { return {base_, size_}; }
  /// Gives the whole pages within [offset, offset + length) back to the kernel. Nobody may look at
  /// these bytes afterwards.
  void Release(std::uint64_t offset, std::uint64_t length) const;

 private:
  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
  std::size_t mapped_ = 0;
};

}  // namespace fastpersist::memory
