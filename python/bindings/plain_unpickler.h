// SPDX-License-Identifier: Apache-2.0
// From the tree of a restricted pickle reader to the Python objects that torch.load would make:
// plain containers, numbers, text, tensors and parameters. Whatever else appears ends the attempt,
// and the caller takes torch's own unpickler. The Python package compares the objects with torch's
// in a self-test before it uses this.
//
// Needs the GIL. Source: torch._utils for what the rebuild functions do; behaviour checked against
// torch.load.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "arena_memory.h"
#include "layout/contents.h"

namespace fastpersist::python {

/// Everything about the installed torch that the unpickler needs, as Python objects.
struct TorchMakers {
  nanobind::object frombuffer;         ///< torch.frombuffer
  nanobind::object empty;              ///< torch.empty
  nanobind::object untyped_storage;    ///< torch.UntypedStorage
  nanobind::object rebuild_parameter;  ///< torch._utils._rebuild_parameter
  nanobind::object size;               ///< torch.Size
  nanobind::object ordered_dict;       ///< collections.OrderedDict
  nanobind::dict storage_dtypes;       ///< name of a storage class → dtype
  nanobind::object torch;              ///< module torch, for dtypes by name
};

/// Whether UnpicklePlain understands the tree, apart from what shows on the way; cheap.
[[nodiscard]] bool LooksPlain(const layout::PickleTree& tree, bool any_location);

/// The object, its storages being views of the arena; or a str, the reason why it cannot be made.
/// any_location: tensors saved on other devices come to the CPU, as map_location="cpu" asks for.
[[nodiscard]] nanobind::object UnpicklePlain(const layout::Contents& contents,
                                             const std::shared_ptr<const SharedArena>& arena,
                                             const TorchMakers& makers, bool any_location);

}  // namespace fastpersist::python
