// SPDX-License-Identifier: Apache-2.0
#include "errors.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "base/error_code_name.h"

namespace nb = nanobind;

namespace fastpersist::python {
namespace {

// Called with the fields of an Error; returns the exception to raise.
nb::object& ErrorFactory() {
  static nb::object factory;
  return factory;
}

template <class T>
nb::object OrNone(const std::optional<T>& value) {
  return value ? nb::cast(*value) : nb::none();
}

}  // namespace

void BindErrors(nb::module_& m) {
  m.def("set_error_factory", [](nb::object factory) { ErrorFactory() = std::move(factory); });
  // Let go of the factory before the interpreter does.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { ErrorFactory().reset(); }));
}

void Raise(const Error& error) {
  const nb::object exception = ErrorFactory()(
      nb::cast(base::ErrorCodeName(error.code)), error.operation, ToBytes(error.path),
      OrNone(error.offset), error.system_errno, ToBytes(error.Message()), ToBytes(error.entry),
      OrNone(error.expected_crc), OrNone(error.found_crc));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw nb::python_error();
}

}  // namespace fastpersist::python
