// SPDX-License-Identifier: Apache-2.0
// The checkpoint directory for Python: listing, retiring, cleaning. The root is shared, so that
// whoever writes checkpoints in the background holds the same lock.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "commit/root.h"

namespace fastpersist::python {

/// What _core.Root holds. The GIL guards the pointer; the root itself is thread-safe.
struct SharedRoot {
  std::string path;
  std::shared_ptr<commit::Root> root;  ///< Null once it was closed.

  /// The root; raises when it was closed.
  [[nodiscard]] std::shared_ptr<commit::Root> Opened() const;
};

/// _core.Root.
void BindDirectory(nanobind::module_& m);

}  // namespace fastpersist::python
