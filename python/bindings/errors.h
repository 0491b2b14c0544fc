// SPDX-License-Identifier: Apache-2.0
// From Error values to Python exceptions: the Python package registers a factory that makes them.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "fastpersist/error.h"

namespace fastpersist::python {

/// set_error_factory, and letting go of it before the interpreter does.
void BindErrors(nanobind::module_& m);

/// Raises what the factory makes of the error.
[[noreturn]] void Raise(const Error& error);

[[nodiscard]] inline nanobind::bytes ToBytes(const std::string& text) {
  return nanobind::bytes(text.data(), text.size());
}

template <class T>
T Unwrap(Result<T> result) {
  if (!result) Raise(result.error());
  return *std::move(result);
}

}  // namespace fastpersist::python
