// SPDX-License-Identifier: Apache-2.0
// From the pickle of a PyTorch file and the storages found in its archive to the tensors and values
// of contents.h. Every tensor is compared with its storage, every storage with its record. Pure.
//
// Source: torch/serialization.py (_load) and torch/_utils.py, which read the same.
#pragma once

#include <string>

#include "fastpersist/error.h"
#include "layout/contents.h"

namespace fastpersist::layout {

/// Fills tensors and values from tree and storages, whose names are "data/KEY". kCorrupt for a
/// tensor or storage that contradicts the archive; the error names it. file is for the error.
[[nodiscard]] Result<void> ReadStateTensors(Contents& contents, const std::string& file);

}  // namespace fastpersist::layout
