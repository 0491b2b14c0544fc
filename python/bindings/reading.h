// SPDX-License-Identifier: Apache-2.0
// Opened files for Python: what is in them, their small records, and the ways to read their data.
#pragma once

#include <nanobind/nanobind.h>

namespace fastpersist::python {

/// The class File with what it returns, and TorchMakers.
void BindReading(nanobind::module_& m);

}  // namespace fastpersist::python
