// SPDX-License-Identifier: Apache-2.0
// Fuzzes ReadSafetensorsFile with whole files.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "contents_walk.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fastpersist;  // NOLINT(google-build-using-namespace): the whole program
  const testing::MemorySource source(std::string_view(reinterpret_cast<const char*>(data), size),
                                     "fuzzed.safetensors");
  auto contents = layout::ReadSafetensorsFile(source);
  if (!contents) {
    fuzz::WalkError(contents.error());
  } else {
    fuzz::WalkContents(source, std::move(*contents));
  }
  return 0;
}
