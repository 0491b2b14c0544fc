// SPDX-License-Identifier: Apache-2.0
#include "tensor_access.h"

namespace fastpersist::python {

namespace nb = nanobind;

nb::object Call(nb::handle object, const nb::str& method) {
  PyObject* arguments[] = {object.ptr()};
  PyObject* result = PyObject_VectorcallMethod(method.ptr(), arguments, 1, nullptr);
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

bool IsTrue(nb::handle object, const nb::str& attribute) {
  return object.attr(attribute).ptr() == Py_True;
}

void RefuseUnusual(nb::handle tensor, const TorchTypes& types, const TensorNames& names) {
  if (!tensor.attr(names.layout).is(types.strided) || IsTrue(tensor, names.is_nested)) {
    throw Unusual{"a tensor that is not strided"};
  }
  if (!IsTrue(tensor, names.is_cpu)) throw Unusual{"a tensor that is not in host memory"};
  if (Call(tensor, names.is_conj).ptr() == Py_True || Call(tensor, names.is_neg).ptr() == Py_True) {
    throw Unusual{"a lazy conjugate or negative view"};
  }
  // torch refuses named tensors, or does not know them any more.
  if (nb::hasattr(tensor, names.has_names) && Call(tensor, names.has_names).ptr() == Py_True) {
    throw Unusual{"a tensor with named dimensions"};
  }
  const nb::object hooks = tensor.attr(names.hooks);
  if (!hooks.is_none() && nb::len(hooks) > 0) throw Unusual{"a tensor with hooks"};
  RefusePythonState(tensor, names);
}

void RefusePythonState(nb::handle tensor, const TensorNames& names) {
  const nb::object state = nb::hasattr(tensor, names.getstate)
                               ? Call(tensor, names.getstate)
                               : nb::object(tensor.attr(names.dict));
  const bool empty = state.is_none() || (PyDict_CheckExact(state.ptr()) && nb::len(state) == 0);
  if (!empty) throw Unusual{"a tensor with Python attributes"};
}

std::uint64_t Span(nb::handle size, nb::handle stride) {
  std::uint64_t span = 1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(size.ptr()); ++i) {
    const auto n = nb::cast<std::uint64_t>(nb::handle(PyTuple_GET_ITEM(size.ptr(), i)));
    if (n == 0) return 0;
    span += (n - 1) * nb::cast<std::uint64_t>(nb::handle(PyTuple_GET_ITEM(stride.ptr(), i)));
  }
  return span;
}

}  // namespace fastpersist::python
