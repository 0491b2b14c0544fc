// SPDX-License-Identifier: Apache-2.0
// What the two formats call our element types.
#pragma once

#include <string_view>

#include "fastpersist/state.h"

namespace fastpersist::layout {

/// The class in module torch that stands for a storage of this type, such as "FloatStorage".
[[nodiscard]] std::string_view TorchStorageName(DType dtype);
/// The name in a safetensors header, such as "F32". The format has none for complex128; layout
/// refuses what stands in its place.
[[nodiscard]] std::string_view SafetensorsName(DType dtype);

}  // namespace fastpersist::layout
