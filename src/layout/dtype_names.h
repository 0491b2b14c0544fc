// SPDX-License-Identifier: Apache-2.0
// What the two formats call our element types; one row of the table in file_dtypes.h each.
#pragma once

#include <optional>
#include <string_view>

#include "fastpersist/state.h"
#include "layout/file_dtypes.h"

namespace fastpersist::layout {

/// The row of this type. Never null.
[[nodiscard]] const FileDtype* ElementTypeOf(DType dtype);
/// The class in module torch that stands for a storage of this type, such as "FloatStorage".
[[nodiscard]] std::string_view TorchStorageName(DType dtype);
/// The name in a safetensors header, such as "F32". The format has none for complex128; layout
/// refuses what stands in its place.
[[nodiscard]] std::string_view SafetensorsName(DType dtype);
/// The attribute of module torch, such as "float32", and back; nullopt for types that DType lacks.
[[nodiscard]] std::string_view TorchName(DType dtype);
[[nodiscard]] std::optional<DType> DTypeOfName(std::string_view torch_name);

}  // namespace fastpersist::layout
