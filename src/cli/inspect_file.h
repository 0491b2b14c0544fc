// SPDX-License-Identifier: Apache-2.0
// What one file holds, as text for people and as JSON: shown by itself, and as the content of a
// checkpoint in a directory.
#pragma once

#include <cstddef>
#include <string>

#include "checkpoint/opened_file.h"
#include "cli/json_output.h"
#include "layout/contents.h"

namespace fastpersist::cli {

/// At most so many rows of each table; the rest is named by number.
[[nodiscard]] std::string FileText(const checkpoint::OpenedFile& file,
                                   const layout::Contents& contents, std::size_t rows);

/// Adds format, bytes, tensors and so on; the keys are in docs/cli.md.
void AddFile(Json& document, const checkpoint::OpenedFile& file, const layout::Contents& contents);

}  // namespace fastpersist::cli
