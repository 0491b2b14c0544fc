// SPDX-License-Identifier: Apache-2.0
// Shows that the fuzzing can fail: like contents_fuzz, with a read out of bounds that only a file
// reaches which was read successfully and has what no seed has. `make fuzz-canary` succeeds only if
// the fuzzer finds it.
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
  const std::unique_ptr<int[]> numbers(new int[4]());
  for (const layout::StoredTensor& tensor : contents->tensors) {
    // Seeds have up to 3 dimensions.
    if (tensor.shape.size() <= 3) continue;
    volatile int past_the_end = numbers[tensor.shape.size()];
    (void)past_the_end;
  }
  return 0;
}
