// SPDX-License-Identifier: Apache-2.0
// A real file for the checks of the engine contract: in the working directory, which is on a disk
// (/tmp need not be), and direct where the file system allows it.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/unique_fd.h"

namespace fastpersist::testing {

/// A file without a name, which is gone when the object is.
class ContractFile {
 public:
  /// Nullopt when direct I/O is wanted and refused.
  static std::optional<ContractFile> Create(bool direct);

  [[nodiscard]] int fd() const { return fd_.get(); }
  /// The same file, buffered.
  [[nodiscard]] base::UniqueFd Reopen(int flags) const;
  [[nodiscard]] std::vector<std::byte> Bytes() const;
  void SetBytes(std::span<const std::byte> bytes) const;

 private:
  explicit ContractFile(base::UniqueFd fd) : fd_(std::move(fd)) {}

  base::UniqueFd fd_;
};

}  // namespace fastpersist::testing
