// SPDX-License-Identifier: Apache-2.0
// Fuzzes ReadZipDirectory and what follows it, with whole archives.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "contents_walk.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fastpersist;  // NOLINT(google-build-using-namespace): the whole program
  const testing::MemorySource source(std::string_view(reinterpret_cast<const char*>(data), size),
                                     "fuzzed.pt");
  auto archive = layout::ReadZipDirectory(source);
  if (!archive) {
    fuzz::WalkError(archive.error());
    return 0;
  }
  fuzz::WalkArchive(source, *archive);
  if (auto located = layout::LocateBodies(source, *archive); !located) {
    fuzz::WalkError(located.error());
  } else {
    fuzz::WalkArchive(source, *archive);
  }
  return 0;
}
