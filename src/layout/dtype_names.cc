// SPDX-License-Identifier: Apache-2.0
#include "layout/dtype_names.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

namespace fastpersist {
namespace {

constexpr auto kNames = std::to_array<std::pair<DType, std::string_view>>({
    {DType::kBool, "bool"},
    {DType::kUint8, "uint8"},
    {DType::kInt8, "int8"},
    {DType::kInt16, "int16"},
    {DType::kInt32, "int32"},
    {DType::kInt64, "int64"},
    {DType::kFloat16, "float16"},
    {DType::kBfloat16, "bfloat16"},
    {DType::kFloat32, "float32"},
    {DType::kFloat64, "float64"},
    {DType::kComplex64, "complex64"},
    {DType::kComplex128, "complex128"},
});

constexpr bool InOrder() {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (static_cast<std::size_t>(kNames[i].first) != i) return false;
  }
  return true;
}
static_assert(InOrder(), "kNames is indexed by DType");

}  // namespace

inline namespace v0 {
std::size_t ItemSize(DType dtype) { return layout::ElementTypeOf(dtype)->item_size; }
}  // namespace v0

namespace layout {

std::string_view TorchName(DType dtype) {
  return kNames.at(static_cast<std::size_t>(dtype)).second;
}

const FileDtype* ElementTypeOf(DType dtype) { return FindTorchDtype(TorchName(dtype)); }

std::string_view TorchStorageName(DType dtype) { return ElementTypeOf(dtype)->storage; }

std::string_view SafetensorsName(DType dtype) {
  // What is written there is refused, with this name in the message.
  return dtype == DType::kComplex128 ? "C128" : ElementTypeOf(dtype)->safetensors;
}

std::optional<DType> DTypeOfName(std::string_view torch_name) {
  const auto* at =
      std::ranges::find(kNames, torch_name, &std::pair<DType, std::string_view>::second);
  if (at == kNames.end()) return std::nullopt;
  return at->first;
}

}  // namespace layout

}  // namespace fastpersist
