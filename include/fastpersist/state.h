// SPDX-License-Identifier: Apache-2.0
// A state is an ordered list of named views of memory. The library never owns, frees or modifies
// the memory; it must stay valid and unchanged until the save returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "fastpersist/error.h"
#include "fastpersist/version.h"

namespace fastpersist {
inline namespace v0 {

/// Element types, as torch and safetensors name them.
enum class DType : std::uint8_t {
  kBool,
  kUint8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
};

/// Bytes of one element.
[[nodiscard]] FASTPERSIST_EXPORT std::size_t ItemSize(DType dtype);

/// A view of host memory. Strides are in elements; empty means row-major contiguous.
struct TensorView {
  const void* data = nullptr;         ///< Address of the first element; may be null when empty.
  DType dtype = DType::kFloat32;      ///< Type of the elements.
  std::vector<std::int64_t> shape;    ///< Sizes; {} is a scalar. Negative sizes are refused.
  std::vector<std::int64_t> strides;  ///< In elements; must describe row-major contiguous memory.
};

/// An ordered map from name to view. Not thread-safe; cheap to move.
class FASTPERSIST_EXPORT State {
 public:
  /// A name and what it stands for.
  struct Entry {
    std::string name;  ///< UTF-8; unique in the state.
    TensorView view;   ///< As given to Add.
  };

  /// Adds one tensor. kInvalidArgument for a name that is not UTF-8 or already there, or a shape or
  /// stride that is negative, overflows, or is not contiguous.
  [[nodiscard]] Result<void> Add(std::string_view name, TensorView view);

  /// All entries in the order in which they were added; valid until the next Add.
  [[nodiscard]] const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
  std::unordered_set<std::string> names_;
};

/// Number of elements times ItemSize. Precondition: the view was accepted by State::Add.
[[nodiscard]] FASTPERSIST_EXPORT std::uint64_t ByteSize(const TensorView& view);

}  // namespace v0
}  // namespace fastpersist
