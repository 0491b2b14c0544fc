// SPDX-License-Identifier: Apache-2.0
// The element types that files may hold, under each of their names: what torch calls them, which
// storage class a pickle names, and what a safetensors header says. More than the types of State:
// a file is read whatever wrote it. Pure.
//
// Source: torch/storage.py (_dtype_to_storage_type_map), the enumeration Dtype of the safetensors
// crate, and the table of safetensors/torch.py.
#pragma once

#include <cstdint>
#include <string_view>

namespace fastpersist::layout {

struct FileDtype {
  std::string_view torch;        ///< "float32"; what only safetensors has keeps its name there.
  std::string_view storage;      ///< "FloatStorage"; empty where torch has no such class.
  std::string_view safetensors;  ///< "F32"; empty where the format has none.
  std::uint32_t item_size = 0;   ///< Bytes of torch's element; 0 when torch has no such type.
  /// Bits of an element as safetensors counts them: two F4 make one element of torch's type.
  std::uint32_t bits = 0;
};

/// Each returns null for a name that is not known.
[[nodiscard]] const FileDtype* FindTorchDtype(std::string_view name);
[[nodiscard]] const FileDtype* FindSafetensorsDtype(std::string_view name);
/// The class without its module: whichever module a pickle names, torch looks at the class alone.
/// An UntypedStorage counts bytes, so it is one of uint8.
[[nodiscard]] const FileDtype* FindTorchStorage(std::string_view class_name);

}  // namespace fastpersist::layout
