// SPDX-License-Identifier: Apache-2.0
// Shows that the fuzzing can fail: like contents_fuzz, with a read out of bounds that only a file
// reaches which was read successfully and holds what no seed of safetensors holds: a tensor whose
// name begins otherwise, or other metadata. `make fuzz-canary` succeeds only if the fuzzer finds
// it.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "contents_walk.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace fastpersist;  // NOLINT(google-build-using-namespace): the whole program
  const testing::MemorySource source(std::string_view(reinterpret_cast<const char*>(data), size),
                                     "fuzzed.safetensors");
  const auto contents = layout::ReadContents(source);
  if (!contents) return 0;
  std::size_t unlike_seeds = 0;
  for (const layout::StoredTensor& tensor : contents->tensors) {
    const char first = tensor.name.empty() ? 'a' : tensor.name[0];
    if (first < 'a' || first > 'c') unlike_seeds = 1;
  }
  for (const auto& [key, value] : contents->metadata) {
    if (key != "format" || value != "pt") unlike_seeds = 1;
  }
  // volatile, or the compiler does without the memory and there is nothing to find.
  const std::unique_ptr<volatile int[]> numbers(new volatile int[1]());
  const int read = numbers[unlike_seeds];
  (void)read;
  return 0;
}
