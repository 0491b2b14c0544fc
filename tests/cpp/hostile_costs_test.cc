// SPDX-License-Identifier: Apache-2.0
// Files that are small and would cost much: what is used again and again must not be copied or
// compared each time, and extents that no memory holds must not overflow. A slow way is not told
// from a fast one by a clock here: it would take minutes, and the limit of the test run ends it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "layout/contents.h"
#include "layout/gather.h"
#include "pipeline/range_checker.h"
#include "testing/archives.h"
#include "testing/memory_source.h"
#include "testing/seed.h"
#include "testing/streams.h"

namespace fastpersist {
namespace {

using testing::ArchiveOf;
using testing::FillWithNoise;
using testing::Little;
using testing::MemorySource;
using testing::PlainCrc32;
using testing::Random;
using testing::Seed;
using ::testing::SizeIs;
using Sizes = std::vector<std::int64_t>;

std::string Times(std::size_t count, std::string_view program) {
  std::string all;
  all.reserve(count * program.size());
  for (std::size_t i = 0; i < count; ++i) all += program;
  return all;
}

Result<layout::Contents> ReadPickle(const std::string& program) {
  return layout::ReadContents(MemorySource(ArchiveOf({{.name = "data.pkl", .bytes = program}})));
}

// --- Pickles ---

TEST(HostilePickles, OneLongKeyMayBeThatOfManyDicts) {
  const std::string key(std::size_t{256} << 10, 'k');
  for (const std::size_t dicts : {2U, 4000U}) {
    // The key is put into the memo, and each dict is {key: None}.
    const auto contents =
        ReadPickle("\x80\x02X" + Little(static_cast<std::uint32_t>(key.size())) + key +
                   std::string("q\0", 2) + "0](" + Times(dicts, std::string("}h\0Ns", 5)) + "e.");
    ASSERT_TRUE(contents) << contents.error().Message();
    ASSERT_THAT(contents->values, SizeIs(dicts));
    EXPECT_EQ(contents->values.back().text, "None");
    EXPECT_NE(contents->values.front().name, contents->values.back().name);
    EXPECT_LT(contents->values.back().name.size(), key.size()) << "no copy of the key for each";
  }
}

TEST(HostilePickles, OneLongCallableMayMakeManyObjects) {
  const std::string name(std::size_t{1} << 20, 'f');
  for (const std::size_t objects : {2U, 2000U}) {
    // Each object is made by NEWOBJ_EX of the callable, (), {}.
    const auto contents =
        ReadPickle("\x80\x04" + ("cmodule\n" + name) + "\n" + std::string("q\0", 2) + "0](" +
                   Times(objects, std::string("h\0)}\x92", 5)) + "e.");
    ASSERT_TRUE(contents) << contents.error().Message();
    std::size_t text = 0;
    for (const auto& node : contents->tree.nodes) {
      if (node.kind == layout::PickleNode::Kind::kOpaque) text += node.text.size();
    }
    EXPECT_GT(text, 100 * objects);
    EXPECT_LT(text, 1000 * objects);
  }
}

// --- Deliveries ---

TEST(HostileDeliveries, OneLongAndManyShortOnesWithinIt) {
  constexpr std::size_t kShort = 10'000;
  const Seed seed;
  Random random{seed.value()};
  std::vector<std::byte> file(4 << 20);
  FillWithNoise(file, random);
  std::vector<std::byte> whole(file.size());
  std::vector<std::byte> parts(kShort * 10);
  pipeline::RangeChecker::Plan plan;
  plan.ranges.push_back({.range = {.begin = 0, .end = file.size()}, .crc = PlainCrc32(file)});
  plan.deliveries.push_back({.range = {.begin = 0, .end = file.size()}, .memory = whole.data()});
  const auto begin_of = [&](std::size_t i) { return i * (file.size() - 10) / kShort; };
  for (std::size_t i = 0; i < kShort; ++i) {
    plan.deliveries.push_back({.range = {.begin = begin_of(i), .end = begin_of(i) + 10},
                               .memory = parts.data() + 10 * i});
  }
  for (const std::size_t piece : {std::size_t{4099}, std::size_t{1} << 20, file.size()}) {
    std::ranges::fill(whole, std::byte{0});
    std::ranges::fill(parts, std::byte{0});
    pipeline::RangeChecker checker(plan);
    for (std::size_t at = 0; at < file.size(); at += piece) {
      const auto length = std::min(piece, file.size() - at);
      const bool more = checker.Accept(at, std::span(file).subspan(at, length));
      EXPECT_EQ(more, at + length < file.size());
    }
    EXPECT_EQ(checker.compared(), 1U);
    EXPECT_TRUE(checker.damages().empty());
    EXPECT_TRUE(whole == file);
    for (std::size_t i = 0; i < kShort; ++i) {
      ASSERT_TRUE(std::ranges::equal(std::span(parts).subspan(10 * i, 10),
                                     std::span(file).subspan(begin_of(i), 10)))
          << "delivery " << i << ", pieces of " << piece;
    }
  }
}

// --- Extents ---

constexpr std::int64_t kHuge = std::int64_t{1} << 40;
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

TEST(HostileExtents, AnEmptyViewIsRowMajorHoweverLargeItsOtherDimensions) {
  const Sizes zeros(3, 0);
  EXPECT_TRUE(layout::IsRowMajor(Sizes{0, kHuge, kHuge}, zeros));
  EXPECT_TRUE(layout::IsRowMajor(Sizes{0, kHuge, kHuge}, Sizes{kMost, kHuge, 1}));
  EXPECT_TRUE(layout::IsRowMajor(Sizes{kHuge, 0, kHuge}, Sizes{kMost, kHuge, 1}));
  EXPECT_TRUE(layout::IsRowMajor(Sizes{kHuge, kHuge, 0}, Sizes{kMost, kMost, kMost}));
  EXPECT_EQ(layout::SpanBytes(Sizes{0, kHuge, kHuge}, Sizes{kMost, kHuge, 1}, 8), 0U);
  layout::Gather(nullptr, Sizes{0, kHuge, kHuge}, Sizes{kMost, kHuge, 1}, 8, {});
}

TEST(HostileExtents, TheStrideOfOneElementMayBeAnything) {
  const std::vector<std::byte> source{std::byte{1}, std::byte{2}, std::byte{3},
                                      std::byte{4}, std::byte{5}, std::byte{6}};
  EXPECT_TRUE(layout::IsRowMajor(Sizes{1, 6, 1}, Sizes{kMost, 1, kMost}));
  EXPECT_FALSE(layout::IsRowMajor(Sizes{1, 3, 1}, Sizes{kMost, 2, kMost}));
  EXPECT_EQ(layout::SpanBytes(Sizes{1, 3, 1}, Sizes{kMost, 2, kMost}, 1), 5U);
  for (const Sizes& shape : {Sizes{1, 3, 1}, Sizes{1, 1, 3}, Sizes{3, 1, 1}}) {
    Sizes strides(3, kMost);
    for (std::size_t d = 0; d < 3; ++d) {
      if (shape[d] != 1) strides[d] = 2;
    }
    std::vector<std::byte> out(3);
    layout::Gather(source.data(), shape, strides, 1, out);
    EXPECT_EQ(out, (std::vector<std::byte>{std::byte{1}, std::byte{3}, std::byte{5}}));
  }
}

}  // namespace
}  // namespace fastpersist
