// SPDX-License-Identifier: Apache-2.0
// Saving beside the training, for Python: _core.CheckpointWriter and what belongs to it.
#pragma once

#include <nanobind/nanobind.h>

namespace fastpersist::python {

/// Binds CheckpointWriter, CheckpointTicket, CapturePool and learn_storage_layout.
void BindOverlap(nanobind::module_& m);

}  // namespace fastpersist::python
