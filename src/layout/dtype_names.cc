// SPDX-License-Identifier: Apache-2.0
#include "layout/dtype_names.h"

#include <array>
#include <cstddef>

namespace fastpersist {
namespace {

struct Names {
  DType dtype;
  std::size_t item_size;
  std::string_view torch_storage;
  std::string_view safetensors;
};

constexpr std::array<Names, 12> kNames{{
    {DType::kBool, 1, "BoolStorage", "BOOL"},
    {DType::kUint8, 1, "ByteStorage", "U8"},
    {DType::kInt8, 1, "CharStorage", "I8"},
    {DType::kInt16, 2, "ShortStorage", "I16"},
    {DType::kInt32, 4, "IntStorage", "I32"},
    {DType::kInt64, 8, "LongStorage", "I64"},
    {DType::kFloat16, 2, "HalfStorage", "F16"},
    {DType::kBfloat16, 2, "BFloat16Storage", "BF16"},
    {DType::kFloat32, 4, "FloatStorage", "F32"},
    {DType::kFloat64, 8, "DoubleStorage", "F64"},
    {DType::kComplex64, 8, "ComplexFloatStorage", "C64"},
    {DType::kComplex128, 16, "ComplexDoubleStorage", "C128"},
}};

constexpr bool InOrder() {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (static_cast<std::size_t>(kNames[i].dtype) != i) return false;
  }
  return true;
}
static_assert(InOrder(), "kNames is indexed by DType");

const Names& NamesOf(DType dtype) { return kNames.at(static_cast<std::size_t>(dtype)); }

}  // namespace

inline namespace v0 {
std::size_t ItemSize(DType dtype) { return NamesOf(dtype).item_size; }
}  // namespace v0

namespace layout {
std::string_view TorchStorageName(DType dtype) { return NamesOf(dtype).torch_storage; }
std::string_view SafetensorsName(DType dtype) { return NamesOf(dtype).safetensors; }
}  // namespace layout

}  // namespace fastpersist
