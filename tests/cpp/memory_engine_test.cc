// SPDX-License-Identifier: Apache-2.0
// The fakes are tested too: a fake device that forgives, or an injected fault that does not happen,
// would make every test above it worthless.
#include "testing/memory_engine.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "testing/aligned_memory.h"

namespace fastpersist::testing {
namespace {

using engine::IoCompletion;
using engine::Submitted;

struct Misfit {
  std::uint32_t memory_align = 0;
  std::uint32_t offset_align = 0;
  std::size_t address = 0;  // residue
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  bool fits = false;
};

std::int64_t ResultOf(const Misfit& misfit, bool expected) {
  const MemoryFile file;
  const AlignedMemory memory(kLargestAlignment, misfit.address);
  MemoryEngine engine({.limits = {.memory_align = misfit.memory_align,
                                  .offset_align = misfit.offset_align,
                                  .direct = true},
                       .misalignment_is_expected = expected});
  IoCompletion completion;
  EXPECT_EQ(engine.Submit({.fd = file.fd(),
                           .data = memory.data(),
                           .length = misfit.length,
                           .offset = misfit.offset},
                          &completion),
            Submitted::kQueued);
  EXPECT_EQ(engine.Reap({&completion, 1}), 1U);
  return completion.result;
}

TEST(MemoryEngine, RefusesExactlyWhatIsMisaligned) {
  const std::vector<Misfit> cases{
      {512, 512, 0, 0, 512, true},
      {512, 512, 0, 512, 1024, true},
      {512, 512, 511, 0, 512, false},
      {512, 512, 256, 0, 512, false},
      {512, 512, 0, 511, 512, false},
      {512, 512, 0, 0, 511, false},
      {512, 512, 0, 0, 1, false},
      {4, 4096, 4, 4096, 4096, true},
      {4, 4096, 2, 4096, 4096, false},
      {4, 4096, 4, 512, 4096, false},
      {4, 4096, 4, 4096, 512, false},
      {16384, 512, 16384, 512, 512, true},
      {16384, 512, 4096, 512, 512, false},
      {65536, 65536, 0, 65536, 65536, true},
      {65536, 65536, 0, 65536, 4096, false},
      {1, 1, 3, 7, 5, true},
  };
  for (const Misfit& misfit : cases) {
    EXPECT_EQ(ResultOf(misfit, /*expected=*/true),
              misfit.fits ? static_cast<std::int64_t>(misfit.length) : -EINVAL)
        << misfit.memory_align << ' ' << misfit.offset_align << ' ' << misfit.address << ' '
        << misfit.offset << ' ' << misfit.length;
  }
}

TEST(MemoryEngine, FailsTheTestWhenMisalignmentIsNotExpected) {
  EXPECT_NONFATAL_FAILURE((void)ResultOf({512, 512, 1, 0, 512}, /*expected=*/false), "misaligned");
}

TEST(MemoryEngine, FinishesOutOfOrderAndUsesTheMemoryLate) {
  const MemoryFile file;
  const AlignedMemory memory(512);
  constexpr unsigned kDepth = 8;
  bool was_out_of_order = false;
  unsigned late = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    MemoryEngine engine({.depth = kDepth, .seed = seed});
    std::vector<IoCompletion> completions(kDepth);
    std::ranges::fill(memory.bytes(), std::byte{0});
    for (std::uint64_t tag = 0; tag < kDepth; ++tag) {
      ASSERT_EQ(engine.Submit({.fd = file.fd(),
                               .data = memory.data(),
                               .length = 512,
                               .offset = tag * 512,
                               .tag = tag},
                              completions.data()),
                Submitted::kQueued);
    }
    std::ranges::fill(memory.bytes(), std::byte{1});
    std::vector<std::uint64_t> order;
    while (order.size() < kDepth) {
      const auto count = engine.Reap(completions);
      ASSERT_TRUE(count);
      for (std::size_t i = 0; i < *count; ++i) order.push_back(completions[i].tag);
    }
    was_out_of_order = was_out_of_order || !std::ranges::is_sorted(order);
    for (const std::byte byte : file.Bytes()) late += byte == std::byte{1} ? 1 : 0;
  }
  EXPECT_TRUE(was_out_of_order);
  EXPECT_GT(late, 0U);
  EXPECT_LT(late, 20 * kDepth * 512);
}

TEST(MemoryEngine, ReapingWithNothingInFlightIsAnError) {
  MemoryEngine engine({});
  IoCompletion completion;
  EXPECT_FALSE(engine.Reap({&completion, 1}));
}

TEST(MemoryFile, HoldsWhatWasWrittenAndNoMore) {
  const MemoryFile file(3);
  EXPECT_EQ(file.Bytes(), std::vector<std::byte>(3));
  file.Truncate(1);
  EXPECT_EQ(file.Bytes().size(), 1U);
}

}  // namespace
}  // namespace fastpersist::testing
