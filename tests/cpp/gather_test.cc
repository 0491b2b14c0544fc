// SPDX-License-Identifier: Apache-2.0
#include "layout/gather.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "testing/aligned_memory.h"
#include "testing/seed.h"

namespace fastpersist::layout {
namespace {

using fastpersist::testing::Between;
using fastpersist::testing::FillWithNoise;
using fastpersist::testing::OnceIn;
using fastpersist::testing::Random;
using fastpersist::testing::Seed;
using Sizes = std::vector<std::int64_t>;

Sizes RowMajorStrides(const Sizes& shape) {
  Sizes strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

std::uint64_t CountOf(const Sizes& shape) {
  std::uint64_t count = 1;
  for (const std::int64_t size : shape) count *= static_cast<std::uint64_t>(size);
  return count;
}

// Element by element: from its number to its index to its place.
std::vector<std::byte> GatherPlainly(const std::vector<std::byte>& source, const Sizes& shape,
                                     const Sizes& strides, std::uint32_t item_size) {
  std::vector<std::byte> out;
  for (std::uint64_t number = 0; number < CountOf(shape); ++number) {
    std::uint64_t rest = number;
    std::uint64_t at = 0;
    for (std::size_t d = shape.size(); d-- > 0;) {
      const auto size = static_cast<std::uint64_t>(shape[d]);
      at += rest % size * static_cast<std::uint64_t>(strides[d]);
      rest /= size;
    }
    const auto* from = source.data() + at * item_size;
    out.insert(out.end(), from, from + item_size);
  }
  return out;
}

TEST(GatherTest, RowMajorIsSeenWhateverTheStridesOfSingleElementsSay) {
  EXPECT_TRUE(IsRowMajor({}, {}));
  EXPECT_TRUE(IsRowMajor(Sizes{2, 3}, Sizes{3, 1}));
  EXPECT_TRUE(IsRowMajor(Sizes{2, 1, 3}, Sizes{3, 99, 1}));
  EXPECT_TRUE(IsRowMajor(Sizes{1}, Sizes{0}));
  EXPECT_TRUE(IsRowMajor(Sizes{0, 3}, Sizes{7, 2})) << "no elements, no order";
  EXPECT_FALSE(IsRowMajor(Sizes{2, 3}, Sizes{1, 2})) << "transposed";
  EXPECT_FALSE(IsRowMajor(Sizes{2, 3}, Sizes{4, 1})) << "gaps between the rows";
  EXPECT_FALSE(IsRowMajor(Sizes{4}, Sizes{0})) << "expanded";
}

TEST(GatherTest, TheSpanGoesFromTheFirstElementBehindTheLast) {
  EXPECT_EQ(SpanBytes({}, {}, 8), 8U);
  EXPECT_EQ(SpanBytes(Sizes{2, 3}, Sizes{3, 1}, 4), 24U);
  EXPECT_EQ(SpanBytes(Sizes{2, 3}, Sizes{10, 2}, 4), 4U * (10 + 4 + 1));
  EXPECT_EQ(SpanBytes(Sizes{1000, 3}, Sizes{0, 1}, 4), 12U) << "expanded";
  EXPECT_EQ(SpanBytes(Sizes{5, 0}, Sizes{100, 1}, 4), 0U);
}

TEST(GatherTest, EveryPermutationOfThreeDimensionsIsGathered) {
  const Sizes shape{2, 3, 5};
  const Sizes strides = RowMajorStrides(shape);
  std::vector<std::byte> source(30 * 4);
  Random random(1);
  FillWithNoise(source, random);
  std::vector<std::size_t> order{0, 1, 2};
  do {
    Sizes permuted_shape;
    Sizes permuted_strides;
    for (const std::size_t d : order) {
      permuted_shape.push_back(shape[d]);
      permuted_strides.push_back(strides[d]);
    }
    std::vector<std::byte> out(source.size());
    Gather(source.data(), permuted_shape, permuted_strides, 4, out);
    EXPECT_EQ(out, GatherPlainly(source, permuted_shape, permuted_strides, 4));
  } while (std::ranges::next_permutation(order).found);
}

TEST(GatherTest, RandomViewsComeOutAsElementByElement) {
  const Seed seed;
  Random random(seed.value());
  for (int round = 0; round < 300; ++round) {
    Sizes shape;
    Sizes strides;
    const std::uint64_t dimensions = Between(random, 0, 5);
    for (std::uint64_t d = 0; d < dimensions; ++d) {
      shape.push_back(static_cast<std::int64_t>(Between(random, OnceIn(random, 9) ? 0 : 1, 4)));
      strides.push_back(static_cast<std::int64_t>(Between(random, 0, 20)));
    }
    if (OnceIn(random, 2)) {  // rows that lie together
      const Sizes whole = RowMajorStrides(shape);
      for (std::size_t d = Between(random, 0, dimensions); d < dimensions; ++d) {
        strides[d] = whole[d];
      }
    }
    const auto item_size = static_cast<std::uint32_t>(Between(random, 1, 16));
    std::vector<std::byte> source(SpanBytes(shape, strides, item_size));
    FillWithNoise(source, random);
    std::vector<std::byte> out(CountOf(shape) * item_size);
    Gather(source.data(), shape, strides, item_size, out);
    ASSERT_EQ(out, GatherPlainly(source, shape, strides, item_size)) << "round " << round;
  }
}

}  // namespace
}  // namespace fastpersist::layout
