// SPDX-License-Identifier: Apache-2.0
// A ByteSource over bytes in memory, for tests of readers. Immutable and thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fastpersist/error.h"
#include "layout/byte_source.h"

namespace fastpersist::testing {

class MemorySource final : public layout::ByteSource {
 public:
  explicit MemorySource(std::vector<std::byte> bytes, std::string name = "memory")
      : bytes_(std::move(bytes)), name_(std::move(name)) {}
  explicit MemorySource(std::string_view text, std::string name = "memory")
      : name_(std::move(name)) {
    const auto bytes = std::as_bytes(std::span(text));
    bytes_.assign(bytes.begin(), bytes.end());
  }

  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::uint64_t size() const override { return bytes_.size(); }
  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

  /// Whatever reaches beyond the end is refused as a file that shrank.
  [[nodiscard]] Result<void> Read(std::uint64_t offset, std::span<std::byte> out) const override {
    if (offset > bytes_.size() || out.size() > bytes_.size() - offset) {
      return std::unexpected(Error{.code = ErrorCode::kCorrupt,
                                   .operation = "read",
                                   .path = name_,
                                   .offset = offset,
                                   .detail = "the bytes end before those that were asked for"});
    }
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
    return {};
  }

 private:
  std::vector<std::byte> bytes_;
  std::string name_;
};

}  // namespace fastpersist::testing
