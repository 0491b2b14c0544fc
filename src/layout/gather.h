// SPDX-License-Identifier: Apache-2.0
// From a strided view to row-major memory. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fastpersist::layout {

/// Whether the elements lie row-major without gaps; dimensions of one element have no say.
[[nodiscard]] bool IsRowMajor(std::span<const std::int64_t> shape,
                              std::span<const std::int64_t> strides);

/// Bytes from the first element to behind the last; 0 when there are no elements.
[[nodiscard]] std::uint64_t SpanBytes(std::span<const std::int64_t> shape,
                                      std::span<const std::int64_t> strides,
                                      std::uint32_t item_size);

/// Copies the elements of a view, whose first element is at source, to destination in row-major
/// order. Preconditions: sizes and strides are not negative and SpanBytes of source is there.
void Gather(const std::byte* source, std::span<const std::int64_t> shape,
            std::span<const std::int64_t> strides, std::uint32_t item_size,
            std::span<std::byte> destination);

}  // namespace fastpersist::layout
