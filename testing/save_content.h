// SPDX-License-Identifier: Apache-2.0
// A save of plain bytes, without a format around them.
#pragma once

#include <string>
#include <string_view>

#include "checkpoint/save_stream.h"
#include "testing/generation_file.h"

namespace fastpersist::testing {

[[nodiscard]] inline Result<SaveInfo> SaveContent(std::string_view content, const std::string& path,
                                                  const Options& options = {},
                                                  const checkpoint::Environment& environment = {}) {
  return checkpoint::SaveStream(StreamOf(content), path, options, environment);
}

}  // namespace fastpersist::testing
