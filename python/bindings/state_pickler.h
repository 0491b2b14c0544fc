// SPDX-License-Identifier: Apache-2.0
// Pickles a state the way CPython's pickler and torch would, opcode for opcode, without their
// detours: exact dicts, lists, tuples, OrderedDicts, numbers and strings, and plain CPU tensors and
// parameters. Whatever else appears ends the attempt, and the caller takes torch's own pickler. The
// Python package compares the bytes with torch's in a self-test before it uses this.
//
// Needs the GIL. Sources: CPython's Modules/_pickle.c for the order of opcodes and the memo,
// torch._tensor.Tensor._reduce_ex_internal and torch.serialization._save for the rest; behaviour
// checked against both.
#pragma once

#include <nanobind/nanobind.h>

namespace fastpersist::python {

/// Everything about the installed torch that the pickler needs, as Python objects.
struct TorchTypes {
  nanobind::object tensor;             ///< torch.Tensor
  nanobind::object parameter;          ///< torch.nn.Parameter
  nanobind::object rebuild_tensor;     ///< torch._utils._rebuild_tensor_v2
  nanobind::object rebuild_parameter;  ///< torch._utils._rebuild_parameter
  nanobind::object strided;            ///< torch.strided
  nanobind::dict storage_kinds;        ///< dtype → (storage class, bytes per element)
};

/// Returns (pickle, records, owners, referenced bytes), or the reason (str) why it cannot.
/// records: [("data/0", (address, size)), ...]; owners: the storages, to be kept alive. compact:
/// only the parts of storages that tensors refer to, each cluster of overlapping ones as one
/// record.
[[nodiscard]] nanobind::object PickleState(nanobind::handle state, const TorchTypes& types,
                                           bool compact);

}  // namespace fastpersist::python
