// SPDX-License-Identifier: Apache-2.0
// Parts of storages, which no checksum covers: which ranges of the file are read for them and what
// is compared all the same. And archives with holes, which belong to no record.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/opened_file.h"
#include "checkpoint/stored_checks.h"
#include "testing/generation_file.h"
#include "testing/memory_source.h"
#include "testing/temporary_directory.h"
#include "testing/torch_states.h"

namespace fastpersist::checkpoint {
namespace {

using layout::Contents;
using pipeline::CheckedRange;
using pipeline::RangeChecker;
using testing::ArchiveOf;
using testing::GenerationFile;
using ::testing::IsEmpty;
using testing::MemorySource;
using testing::RecordsOfViews;
using testing::TemporaryDirectory;
using testing::WithGaps;
using testing::WriteFile;
using Kind = CheckedRange::Kind;
using Pairs = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

constexpr std::uint64_t kLongestDescriptor = 24;

// The contents of a storage.
std::string Noise(std::uint64_t number, std::size_t bytes) {
  return GenerationFile(number, bytes + 600).substr(0, bytes);
}

// Two storages of one size, so that each could be taken for the other.
std::string TwoStorages(std::size_t bytes) {
  return ArchiveOf(RecordsOfViews(
      {Noise(1, bytes), Noise(2, bytes)},
      {{.name = "a", .shape = {static_cast<std::int64_t>(bytes)}, .strides = {1}},
       {.name = "b", .storage = 1, .shape = {static_cast<std::int64_t>(bytes)}, .strides = {1}}}));
}

Pairs BodiesOf(const RangeChecker::Plan& plan) {
  Pairs bodies;
  for (const CheckedRange& range : plan.ranges) {
    if (range.kind == Kind::kBody) bodies.emplace_back(range.range.begin, range.range.end);
  }
  return bodies;
}

RangeChecker::Plan PlanOf(const std::vector<CheckedRange>& ranges, const Pairs& deliveries) {
  RangeChecker::Plan plan;
  plan.ranges = ranges;
  for (const auto& [begin, end] : deliveries) {
    plan.deliveries.push_back({.range = {.begin = begin, .end = end}});
  }
  OnlyDelivered(plan);
  return plan;
}

TEST(OnlyDelivered, LeavesOfBodiesWhatIsDeliveredOnce) {
  const std::vector<CheckedRange> ranges{
      {.range = {.begin = 0, .end = 50}, .kind = Kind::kHeader},
      {.range = {.begin = 50, .end = 200}, .crc = 7},
      {.range = {.begin = 200, .end = 224}, .kind = Kind::kDescriptor},
      {.range = {.begin = 224, .end = 300}, .kind = Kind::kHeader},
      {.range = {.begin = 300, .end = 400}, .crc = 8},
  };
  EXPECT_EQ(BodiesOf(PlanOf(ranges, {})), Pairs{});
  EXPECT_EQ(BodiesOf(PlanOf(ranges, {{60, 70}, {60, 65}, {68, 80}, {90, 90}, {100, 101}})),
            (Pairs{{60, 70}, {70, 80}, {100, 101}}));
  EXPECT_EQ(BodiesOf(PlanOf(ranges, {{50, 200}, {60, 61}, {199, 200}, {300, 301}, {399, 400}})),
            (Pairs{{50, 200}, {300, 301}, {399, 400}}));
  for (const Pairs& deliveries : {Pairs{}, Pairs{{60, 70}}, Pairs{{50, 200}, {300, 400}}}) {
    const auto plan = PlanOf(ranges, deliveries);
    EXPECT_EQ(plan.ranges.size(), 3 + deliveries.size()) << "headers and descriptors stay";
    for (const CheckedRange& range : plan.ranges) EXPECT_FALSE(range.crc);
  }
}

class UncheckedReadsTest : public ::testing::Test {
 protected:
  // Bytes 10 to 30 of both storages, or the error.
  Result<std::vector<std::string>> ReadParts(const std::string& content) const {
    WriteFile(path_, content);
    auto file = OpenedFile::Open(path_);
    if (!file) return std::unexpected(file.error());
    std::vector<std::string> parts(2, std::string(20, '\0'));
    const auto deliver = [&parts](const Contents& contents) {
      std::vector<plan::Delivery> deliveries;
      for (std::size_t i = 0; i < 2; ++i) {
        // By name: the order of the storages is what a directory may lie about.
        for (const auto& storage : contents.storages) {
          if (storage.name != (i == 0 ? "data/0" : "data/1")) continue;
          deliveries.push_back({.range = {.begin = storage.offset + 10, .end = storage.offset + 30},
                                .memory = reinterpret_cast<std::byte*>(parts[i].data())});
        }
      }
      std::ranges::sort(deliveries, {}, [](const auto& delivery) { return delivery.range.begin; });
      return deliveries;
    };
    auto info = (*file)->ReadUnchecked(std::vector<std::uint32_t>{0, 1}, deliver, {});
    if (!info) return std::unexpected(info.error());
    return parts;
  }

  const TemporaryDirectory directory_;
  const std::string path_ = directory_ / "model.pt";
};

TEST_F(UncheckedReadsTest, EveryFlippedBitOfTheDirectoryIsFoundOrHarmless) {
  std::string content = TwoStorages(100);
  const auto right = ReadParts(content);
  ASSERT_TRUE(right) << right.error().Message();
  EXPECT_EQ(*right,
            (std::vector<std::string>{Noise(1, 100).substr(10, 20), Noise(2, 100).substr(10, 20)}));
  const auto contents = layout::ReadContents(MemorySource(content));
  ASSERT_TRUE(contents);
  const std::uint64_t begin = contents->archive.directory_offset;
  const std::uint64_t end = begin + contents->archive.directory_length;
  std::size_t refused = 0;
  for (std::uint64_t at = begin; at < end; ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      content[at] = static_cast<char>(content[at] ^ (1 << bit));
      const auto parts = ReadParts(content);
      content[at] = static_cast<char>(content[at] ^ (1 << bit));
      if (!parts) {
        ++refused;
        EXPECT_TRUE(parts.error().code == ErrorCode::kCorrupt ||
                    parts.error().code == ErrorCode::kUnsupportedFile)
            << parts.error().Message();
        continue;
      }
      ASSERT_EQ(*parts, *right) << "byte " << at - begin << " of the directory, bit " << bit;
    }
  }
  EXPECT_GT(refused, 1000U) << "most bits of a directory mean something";
}

TEST_F(UncheckedReadsTest, PartsOfArchivesWithGapsAreFound) {
  const std::string content = TwoStorages(5000);
  const auto right = ReadParts(content);
  ASSERT_TRUE(right);
  for (const char* behind : {"", "data.pkl", "data/0", "data/1"}) {
    for (const std::uint64_t gap : {1U, 24U, 100U, 70'000U}) {
      const auto parts = ReadParts(WithGaps(content, gap, behind));
      ASSERT_TRUE(parts) << parts.error().Message();
      EXPECT_EQ(*parts, *right) << gap << " bytes behind " << behind;
    }
  }
}

TEST_F(UncheckedReadsTest, AHoleBehindABodyBelongsToNoDescriptor) {
  constexpr std::uint64_t kHole = std::uint64_t{64} << 20;
  const std::string content = WithGaps(TwoStorages(100), kHole, "data/0");
  const MemorySource source(content);
  auto contents = layout::ReadContents(source);
  ASSERT_TRUE(contents) << contents.error().Message();
  ASSERT_TRUE(layout::LocateBodies(source, contents->archive));
  layout::AdoptBodyOffsets(*contents);
  std::uint64_t wanted = 0;
  std::size_t descriptors = 0;
  for (const CheckedRange& range : ChecksForAll(*contents, "m.pt").ranges) {
    const std::uint64_t length = range.range.end - range.range.begin;
    wanted += length;
    if (range.kind != Kind::kDescriptor) continue;
    ++descriptors;
    EXPECT_LE(length, kLongestDescriptor) << contents->archive.records[range.record].name;
  }
  EXPECT_EQ(descriptors, contents->archive.records.size());
  EXPECT_LT(wanted, content.size() - kHole);
}

TEST_F(UncheckedReadsTest, AFileWithAHoleIsGood) {
  WriteFile(path_, WithGaps(TwoStorages(100), std::uint64_t{64} << 20, "data/0"));
  auto file = OpenedFile::Open(path_);
  ASSERT_TRUE(file) << file.error().Message();
  const auto found = (*file)->Verify({}, {});
  ASSERT_TRUE(found) << found.error().Message();
  EXPECT_THAT(found->damages, IsEmpty());
  EXPECT_EQ(found->unchecked_records, 0U);
  ReadInfo info;
  const auto arena = (*file)->ReadAll({}, info);
  ASSERT_TRUE(arena) << arena.error().Message();
  const auto& storage = (*file)->contents()->storages[1];
  const auto bytes = arena->memory().subspan(storage.offset, storage.size);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), Noise(2, 100));
}

}  // namespace
}  // namespace fastpersist::checkpoint
