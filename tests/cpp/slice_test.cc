// SPDX-License-Identifier: Apache-2.0
// Slices put one after the other are the whole stream, wherever it is cut; and every checksum that
// a manifest needs follows from what the writers of the slices found.
#include "partition/slice.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/crc32.h"
#include "layout/safetensors.h"
#include "layout/torch_container.h"
#include "partition/partition.h"
#include "pipeline/filler.h"
#include "testing/seed.h"

namespace fastpersist::partition {
namespace {

using layout::RecordDigest;
using layout::Stream;
using plan::Range;
using testing::Between;
using testing::OnceIn;
using testing::Random;
using testing::Seed;

using Bytes = std::vector<std::byte>;

struct Filled {
  Bytes bytes;
  std::uint32_t crc = 0;
  std::vector<RecordDigest> digests;
};

// As a writer does it: in blocks.
Filled Fill(const Stream& stream, std::uint64_t block) {
  pipeline::Filler filler(stream, nullptr, /*whole_crc=*/true);
  Filled filled{.bytes = Bytes(stream.size())};
  for (std::uint64_t at = 0; at < stream.size(); at += block) {
    filler.Fill(std::span(filled.bytes).subspan(at, std::min(block, stream.size() - at)));
  }
  filled.crc = filler.crc();
  filled.digests.assign(filler.digests().begin(), filler.digests().end());
  return filled;
}

// A torch file of records of odd sizes: a pickle, tensors, empty ones, and one that begins like a
// data descriptor.
class SliceTest : public ::testing::Test {
 protected:
  Stream Make(std::size_t tensors, std::uint64_t largest, std::uint64_t alignment) {
    bodies_.clear();
    std::vector<layout::Record> records;
    const auto add = [&](std::string name, std::uint64_t size, bool in_memory) {
      Bytes& body = bodies_.emplace_back(size);
      for (auto& byte : body) byte = static_cast<std::byte>(random_());
      if (size >= 4 && OnceIn(random_, 5)) {
        constexpr std::array<unsigned char, 4> kSignature{'P', 'K', 7, 8};
        std::ranges::transform(kSignature, body.begin(),
                               [](unsigned char c) { return static_cast<std::byte>(c); });
      }
      records.push_back({.name = std::move(name), .body = body, .in_memory = in_memory});
    };
    bodies_.reserve(tensors + 2);
    add("data.pkl", Between(random_, 1, largest), false);
    add("byteorder", 6, false);
    for (std::size_t i = 0; i < tensors; ++i) {
      const std::uint64_t size =
          OnceIn(random_, 3) ? Between(random_, 0, 9) : Between(random_, 0, largest);
      add(fmt::format("data/{}", i), size, true);
    }
    auto stream = layout::LayOutTorchContainer(records, {.prefix = "a", .alignment = alignment});
    EXPECT_TRUE(stream) << stream.error().Message();
    return *std::move(stream);
  }

  // Writes every slice, then patches it as its writer would.
  static void ExpectSame(const Stream& whole, std::span<const Range> ranges, std::uint64_t block) {
    const Filled expected = Fill(whole, block);
    std::vector<Slice> slices;
    std::vector<Filled> parts;
    std::vector<std::vector<FragmentDigest>> found;
    for (const Range& range : ranges) {
      slices.push_back(Cut(whole, range));
      ASSERT_EQ(slices.back().stream.size(), range.end - range.begin);
      parts.push_back(Fill(slices.back().stream, block));
      found.push_back(DigestsOf(slices.back(), parts.back().digests));
    }
    auto digests = Combine(whole.record_count(), found);
    Bytes together;
    std::uint32_t crc = 0;
    for (std::size_t i = 0; i < slices.size(); ++i) {
      Filled& part = parts[i];
      for (const Patch& patch : slices[i].patches) {
        const Bytes bytes = RenderPatch(whole, patch, digests);
        ASSERT_EQ(bytes.size(), patch.length);
        std::ranges::copy(bytes, part.bytes.begin() + static_cast<std::ptrdiff_t>(patch.offset));
        part.crc = PatchedCrc(part.crc, part.bytes.size(), patch, bytes);
      }
      ASSERT_EQ(part.crc, base::Crc32(part.bytes)) << "part " << i;
      crc = base::CombineCrc32(crc, part.crc, part.bytes.size());
      together.insert(together.end(), part.bytes.begin(), part.bytes.end());
    }
    ASSERT_TRUE(together == expected.bytes);
    ASSERT_EQ(crc, expected.crc);
    for (std::uint32_t r = 0; r < whole.record_count(); ++r) {
      ASSERT_EQ(digests[r].crc, expected.digests[r].crc) << "record " << r;
      ASSERT_EQ(digests[r].head, expected.digests[r].head) << "record " << r;
    }
  }

  const Seed seed_;
  Random random_{seed_.value()};
  std::vector<Bytes> bodies_;
};

TEST_F(SliceTest, TwoSlicesCutAtAnyByteMakeTheFile) {
  for (const std::uint64_t alignment : {1U, 64U}) {
    const Stream whole = Make(4, 90, alignment);
    for (std::uint64_t at = 0; at <= whole.size(); ++at) {
      const std::vector<Range> ranges{{.begin = 0, .end = at}, {.begin = at, .end = whole.size()}};
      SCOPED_TRACE(at);
      ASSERT_NO_FATAL_FAILURE(ExpectSame(whole, ranges, 4096));
    }
  }
}

TEST_F(SliceTest, AnyNumberOfSlicesCutAnywhereMakesTheFile) {
  for (int round = 0; round < 300; ++round) {
    const Stream whole = Make(Between(random_, 0, 30), OnceIn(random_, 2) ? 100 : 20'000,
                              std::uint64_t{1} << Between(random_, 0, 12));
    std::vector<std::uint64_t> cuts{0, whole.size()};
    for (auto more = Between(random_, 0, 12); more > 0; --more) {
      cuts.push_back(Between(random_, 0, whole.size()));
    }
    std::ranges::sort(cuts);
    std::vector<Range> ranges;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      ranges.push_back({.begin = cuts[i], .end = cuts[i + 1]});
    }
    ASSERT_NO_FATAL_FAILURE(ExpectSame(whole, ranges, Between(random_, 1, 9000)));
  }
}

TEST_F(SliceTest, DividedAmongWritersOnlyTheLastNeedsAllChecksums) {
  for (int round = 0; round < 200; ++round) {
    const Stream whole = Make(Between(random_, 1, 40), 50'000, 64);
    const std::vector<std::uint64_t> weights(Between(random_, 1, 8), 1);
    const auto ranges = Divide(
        {.size = whole.size(), .head_end = whole.head_end(), .tail_begin = whole.tail_begin()},
        weights, 4096);
    ASSERT_NO_FATAL_FAILURE(ExpectSame(whole, ranges, 8192));
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      const Slice slice = Cut(whole, ranges[i]);
      if (i == TailOwner(ranges)) continue;
      // The descriptor of the record that began before, and a piece of the one that is cut.
      ASSERT_LE(slice.patches.size(), 2U);
    }
  }
}

TEST_F(SliceTest, OneSliceIsTheStreamItself) {
  const Stream whole = Make(5, 1000, 64);
  const Slice slice = Cut(whole, {.begin = 0, .end = whole.size()});
  EXPECT_TRUE(slice.patches.empty());
  EXPECT_TRUE(Fill(slice.stream, 512).bytes == Fill(whole, 512).bytes);
}

TEST_F(SliceTest, AnEmptySliceHasNothingWhereverItIs) {
  const Stream whole = Make(5, 300, 64);
  for (std::uint64_t at = 0; at <= whole.size(); ++at) {
    const Slice slice = Cut(whole, {.begin = at, .end = at});
    ASSERT_EQ(slice.stream.size(), 0U) << at;
    ASSERT_TRUE(slice.patches.empty()) << at;
    ASSERT_TRUE(slice.fragments.empty()) << at;
  }
}

}  // namespace
}  // namespace fastpersist::partition
