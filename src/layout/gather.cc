// SPDX-License-Identifier: Apache-2.0
#include "layout/gather.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace fastpersist::layout {
namespace {

bool IsEmpty(std::span<const std::int64_t> shape) {
  return std::ranges::find(shape, 0) != shape.end();
}

}  // namespace

bool IsRowMajor(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides) {
  if (IsEmpty(shape)) return true;
  std::int64_t expected = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

std::uint64_t SpanBytes(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
                        std::uint32_t item_size) {
  if (IsEmpty(shape)) return 0;
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    last += static_cast<std::uint64_t>(shape[i] - 1) * static_cast<std::uint64_t>(strides[i]);
  }
  return (last + 1) * item_size;
}

void Gather(const std::byte* source, std::span<const std::int64_t> shape,
            std::span<const std::int64_t> strides, std::uint32_t item_size,
            std::span<std::byte> destination) {
  if (destination.empty()) return;
  // The innermost dimensions that lie together are copied at once.
  std::size_t outer = shape.size();
  std::int64_t together = 1;
  while (outer > 0 && (shape[outer - 1] == 1 || strides[outer - 1] == together)) {
    together *= shape[--outer];
  }
  const std::size_t length = static_cast<std::size_t>(together) * item_size;
  std::vector<std::int64_t> index(outer, 0);
  std::int64_t at = 0;  // in elements
  for (std::byte* out = destination.data(); out < destination.data() + destination.size();
       out += length) {
    std::memcpy(out, source + at * static_cast<std::int64_t>(item_size), length);
    for (std::size_t d = outer; d-- > 0;) {
      if (shape[d] == 1) continue;  // its stride may be anything
      at += strides[d];
      if (++index[d] < shape[d]) break;
      at -= strides[d] * shape[d];
      index[d] = 0;
    }
  }
}

}  // namespace fastpersist::layout
