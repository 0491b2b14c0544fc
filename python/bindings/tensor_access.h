// SPDX-License-Identifier: Apache-2.0
// Reading a torch tensor through its Python interface, and the verdict whether the compiled pickler
// may write it. All functions need the GIL, and may run Python code (torch function modes, signal
// handlers).
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "state_pickler.h"

namespace fastpersist::python {

/// Ends the attempt: the state holds something that only the real picklers can write.
struct Unusual {
  std::string what;
};

/// Names of attributes and methods, made once per pickle.
struct TensorNames {
  nanobind::str dtype{"dtype"}, layout{"layout"}, is_cpu{"is_cpu"}, is_nested{"is_nested"};
  nanobind::str is_conj{"is_conj"}, is_neg{"is_neg"}, getstate{"__getstate__"}, dict{"__dict__"};
  nanobind::str hooks{"_backward_hooks"}, untyped_storage{"untyped_storage"}, cdata{"_cdata"};
  nanobind::str data_ptr{"data_ptr"}, nbytes{"nbytes"}, storage_offset{"storage_offset"},
      size{"size"};
  nanobind::str has_names{"has_names"}, stride{"stride"}, requires_grad{"requires_grad"},
      data{"data"};
};

/// The result of a method without arguments. Throws nanobind::python_error.
[[nodiscard]] nanobind::object Call(nanobind::handle object, const nanobind::str& method);
[[nodiscard]] bool IsTrue(nanobind::handle object, const nanobind::str& attribute);

/// Throws Unusual unless the tensor is strided, in host memory, and carries nothing but its
/// elements.
void RefuseUnusual(nanobind::handle tensor, const TorchTypes& types, const TensorNames& names);
/// Throws Unusual when Python attributes were set on the tensor.
void RefusePythonState(nanobind::handle tensor, const TensorNames& names);

/// Elements from the first to the last that a tensor of that size and stride (tuples of ints)
/// refers to; 0 when it has none.
[[nodiscard]] std::uint64_t Span(nanobind::handle size, nanobind::handle stride);

}  // namespace fastpersist::python
