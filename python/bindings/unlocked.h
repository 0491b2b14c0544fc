// SPDX-License-Identifier: Apache-2.0
// Calls that may take long happen without the GIL.
#pragma once

#include <nanobind/nanobind.h>

namespace fastpersist::python {

/// What function returns, called without the GIL. It must not touch Python objects.
template <class Function>
auto Unlocked(Function function) {
  const nanobind::gil_scoped_release unlocked;
  return function();
}

}  // namespace fastpersist::python
