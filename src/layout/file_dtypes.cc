// SPDX-License-Identifier: Apache-2.0
#include "layout/file_dtypes.h"

#include <algorithm>
#include <array>

namespace fastpersist::layout {
namespace {

constexpr auto kTypes = std::to_array<FileDtype>({
    {"float32", "FloatStorage", "F32", 4, 32},
    {"bfloat16", "BFloat16Storage", "BF16", 2, 16},
    {"float16", "HalfStorage", "F16", 2, 16},
    {"float64", "DoubleStorage", "F64", 8, 64},
    {"int64", "LongStorage", "I64", 8, 64},
    {"int32", "IntStorage", "I32", 4, 32},
    {"int16", "ShortStorage", "I16", 2, 16},
    {"int8", "CharStorage", "I8", 1, 8},
    {"uint8", "ByteStorage", "U8", 1, 8},
    {"bool", "BoolStorage", "BOOL", 1, 8},
    {"complex64", "ComplexFloatStorage", "C64", 8, 64},
    {"complex128", "ComplexDoubleStorage", "", 16, 128},
    {"complex32", "", "", 4, 32},
    {"uint16", "", "U16", 2, 16},
    {"uint32", "", "U32", 4, 32},
    {"uint64", "", "U64", 8, 64},
    {"float8_e4m3fn", "", "F8_E4M3", 1, 8},
    {"float8_e4m3fnuz", "", "F8_E4M3FNUZ", 1, 8},
    {"float8_e5m2", "", "F8_E5M2", 1, 8},
    {"float8_e5m2fnuz", "", "F8_E5M2FNUZ", 1, 8},
    {"float8_e8m0fnu", "", "F8_E8M0", 1, 8},
    {"float4_e2m1fn_x2", "", "F4", 1, 4},
    {"F6_E2M3", "", "F6_E2M3", 0, 6},
    {"F6_E3M2", "", "F6_E3M2", 0, 6},
    {"quint8", "QUInt8Storage", "", 1, 8},
    {"qint8", "QInt8Storage", "", 1, 8},
    {"qint32", "QInt32Storage", "", 4, 32},
    {"quint4x2", "QUInt4x2Storage", "", 1, 8},
    {"quint2x4", "QUInt2x4Storage", "", 1, 8},
    {"bits1x8", "", "", 1, 8},
    {"bits2x4", "", "", 1, 8},
    {"bits4x2", "", "", 1, 8},
    {"bits8", "", "", 1, 8},
    {"bits16", "", "", 2, 16},
    // Shells of types: torch keeps each element in a byte.
    {"int1", "", "", 1, 8},
    {"int2", "", "", 1, 8},
    {"int3", "", "", 1, 8},
    {"int4", "", "", 1, 8},
    {"int5", "", "", 1, 8},
    {"int6", "", "", 1, 8},
    {"int7", "", "", 1, 8},
    {"uint1", "", "", 1, 8},
    {"uint2", "", "", 1, 8},
    {"uint3", "", "", 1, 8},
    {"uint4", "", "", 1, 8},
    {"uint5", "", "", 1, 8},
    {"uint6", "", "", 1, 8},
    {"uint7", "", "", 1, 8},
});

const FileDtype* Find(std::string_view name, std::string_view FileDtype::* member) {
  if (name.empty()) return nullptr;
  const auto* at = std::ranges::find(kTypes, name, member);
  return at == kTypes.end() ? nullptr : at;
}

}  // namespace

const FileDtype* FindTorchDtype(std::string_view name) { return Find(name, &FileDtype::torch); }

const FileDtype* FindSafetensorsDtype(std::string_view name) {
  return Find(name, &FileDtype::safetensors);
}

const FileDtype* FindTorchStorage(std::string_view class_name) {
  if (class_name == "UntypedStorage") return FindTorchDtype("uint8");
  return Find(class_name, &FileDtype::storage);
}

}  // namespace fastpersist::layout
