// SPDX-License-Identifier: Apache-2.0
// Where the time of a save went, for Python.
#pragma once

#include <nanobind/nanobind.h>

#include "fastpersist/save_info.h"

namespace fastpersist::python {

/// The fields of SaveSeconds under their names.
[[nodiscard]] inline nanobind::dict SecondsDict(const SaveInfo& info) {
  nanobind::dict seconds;
  seconds["plan"] = info.seconds.plan;
  seconds["fill"] = info.seconds.fill;
  seconds["write"] = info.seconds.write;
  seconds["sync"] = info.seconds.sync;
  seconds["commit"] = info.seconds.commit;
  seconds["total"] = info.seconds.total;
  return seconds;
}

}  // namespace fastpersist::python
