// SPDX-License-Identifier: Apache-2.0
// Whole files are compared with torch's in dict_of_tensors_test.cc and by the Python tests.
#include "layout/torch_container.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "testing/forbidden_memory.h"
#include "testing/streams.h"

namespace fastpersist::layout {
namespace {

using fastpersist::testing::RenderPlainly;
using ::testing::HasSubstr;

std::span<const std::byte> BytesOf(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string DetailOf(const Result<Stream>& stream) {
  EXPECT_FALSE(stream);
  if (stream) return "";
  EXPECT_EQ(stream.error().code, ErrorCode::kInvalidArgument);
  return stream.error().detail;
}

TEST(TorchContainer, RefusesWhatTorchCouldNotRead) {
  const std::vector<Record> one{{.name = "data.pkl", .body = BytesOf("x")}};
  EXPECT_THAT(DetailOf(LayOutTorchContainer(one, {.prefix = ""})), HasSubstr("no base name"));
  for (const std::uint64_t alignment : {0U, 3U, 96U, 65536U}) {
    EXPECT_THAT(DetailOf(LayOutTorchContainer(one, {.alignment = alignment})),
                HasSubstr("storage_alignment " + std::to_string(alignment)));
  }
}

TEST(TorchContainer, RefusesTwoRecordsOfOneName) {
  const auto twice = [](const std::string& name) {
    const std::vector<Record> records{{.name = "data.pkl"}, {.name = name}, {.name = name}};
    return DetailOf(LayOutTorchContainer(records, {}));
  };
  EXPECT_THAT(twice("data/0"), HasSubstr("'data/0'"));
  // Torch's own records, which are added at the end.
  for (const char* own : {"version", ".data/serialization_id"}) {
    const std::vector<Record> records{{.name = own}};
    EXPECT_THAT(DetailOf(LayOutTorchContainer(records, {})), HasSubstr(own));
  }
}

TEST(TorchContainer, RefusesNamesThatSixteenBitsCannotMeasure) {
  const auto with_name = [](std::size_t length) {
    const std::vector<Record> records{{.name = std::string(length, 'n')}};
    return LayOutTorchContainer(records, {.prefix = "x"});
  };
  EXPECT_TRUE(with_name(65'533));
  EXPECT_THAT(DetailOf(with_name(65'534)), HasSubstr("65,535"));
}

TEST(TorchContainer, BodiesInMemoryAreReferredToAndOthersCopied) {
  std::string pickle = "pickle";
  const std::vector<float> tensor(100);
  const std::vector<Record> records{
      {.name = "data.pkl", .body = BytesOf(pickle)},
      {.name = "byteorder", .body = BytesOf("little")},
      {.name = "data/0", .body = std::as_bytes(std::span(tensor)), .in_memory = true}};
  const auto stream = LayOutTorchContainer(records, {});
  ASSERT_TRUE(stream);
  pickle = "------";
  const auto body = [&](std::uint32_t record) {
    return *std::ranges::find(stream->extents(), record, &Extent::body_of);
  };
  EXPECT_EQ(body(0).kind, Extent::Kind::kGenerated);
  EXPECT_EQ(std::memcmp(body(0).bytes, "pickle", 6), 0);
  EXPECT_EQ(body(2).kind, Extent::Kind::kMemory);
  EXPECT_EQ(body(2).bytes, reinterpret_cast<const std::byte*>(tensor.data()));
  EXPECT_EQ(stream->record_count(), 5U);
}

TEST(TorchContainer, ExtentsCoverTheFileWithoutHoles) {
  const std::string big(100'000, 'b');
  std::vector<Record> records{{.name = "data.pkl", .body = BytesOf("p")}, {.name = "empty"}};
  for (std::size_t i = 0; i < 50; ++i) {
    records.push_back({.name = "data/" + std::to_string(i),
                       .body = BytesOf(big).first(1999 * i),
                       .in_memory = true});
  }
  for (const std::uint64_t alignment : {1U, 64U, 4096U, 32768U}) {
    const auto stream = LayOutTorchContainer(records, {.alignment = alignment});
    ASSERT_TRUE(stream);
    std::uint64_t at = 0;
    for (const Extent& extent : stream->extents()) {
      EXPECT_EQ(extent.offset, at);
      EXPECT_GT(extent.length, 0U);
      if (extent.body_of != kNoRecord) {
        EXPECT_EQ(at % alignment, 0U) << "record " << extent.body_of;
      }
      at = extent.end();
    }
    EXPECT_EQ(stream->size(), at);
  }
}

// Bodies of more than 4 GiB: laying out reads none.
TEST(TorchContainer, LaysOutBodiesOfAnySizeWithoutReadingThem) {
  constexpr std::uint64_t kFourGiB = std::uint64_t{1} << 32;
  const testing::ForbiddenMemory memory(kFourGiB + 1);
  std::vector<Record> records{{.name = "data.pkl", .body = BytesOf("p")},
                              {.name = "byteorder", .body = BytesOf("little")}};
  for (const std::uint64_t size :
       {kFourGiB / 2, kFourGiB - 2, kFourGiB - 1, kFourGiB, kFourGiB + 1, std::uint64_t{5}}) {
    records.push_back({.name = "data/" + std::to_string(records.size() - 2),
                       .body = memory.bytes().first(size),
                       .in_memory = true});
  }
  const auto stream = LayOutTorchContainer(records, {.prefix = "x"});
  ASSERT_TRUE(stream);
  // By record: the length of its descriptor, 24 as soon as its size or offset needs 64 bits.
  std::vector<std::uint64_t> descriptors(records.size() + 2);
  std::uint64_t directory = 0;
  for (const Extent& extent : stream->extents()) {
    if (extent.kind != Extent::Kind::kLate) continue;
    if (extent.late_id < descriptors.size()) {
      descriptors[extent.late_id] = extent.length;
    } else {
      directory = extent.length;
    }
  }
  // The second body begins below 4 GiB, all later ones beyond.
  EXPECT_EQ(descriptors, (std::vector<std::uint64_t>{16, 16, 16, 16, 24, 24, 24, 24, 24, 24}));
  EXPECT_GT(stream->size(), 4 * kFourGiB);
  // The directory renders from digests alone; three records have long sizes and offsets, three only
  // long offsets.
  constexpr std::uint64_t kNames = 10 + 11 + 6 * std::uint64_t{8} + 9 + 24;
  EXPECT_EQ(directory, std::uint64_t{10} * 46 + kNames + 84 + 36 + 98);
  std::vector<std::byte> bytes(directory);
  stream->late()->Render(static_cast<std::uint32_t>(descriptors.size() + 1),
                         std::vector<RecordDigest>(descriptors.size()), bytes);
  EXPECT_EQ(bytes[0], std::byte{'P'});
}

TEST(TorchContainer, TheFileWithoutRecordsOfTheCallerIsComplete) {
  const auto stream = LayOutTorchContainer({}, {});
  ASSERT_TRUE(stream);
  const auto bytes = RenderPlainly(*stream).bytes;
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  EXPECT_THAT(text, HasSubstr("archive/version"));
  EXPECT_THAT(text, HasSubstr("archive/.data/serialization_id"));
}

TEST(TorchContainer, TheByteOrderIsAddedLikeTorchDoesItUnlessItIsGiven) {
  // The file of torch.save({}, ..., _disable_byteorder_record=True) with torch 2.13.
  const std::vector<Record> records{
      {.name = "data.pkl", .body = BytesOf(std::string_view("\x80\x02}q\0.", 6))},
      {.name = ".format_version", .body = BytesOf("1")},
      {.name = ".storage_alignment", .body = BytesOf("64")}};
  const auto stream = LayOutTorchContainer(records, {});
  ASSERT_TRUE(stream);
  const auto bytes = RenderPlainly(*stream).bytes;
  EXPECT_EQ(bytes.size(), 1261U);
  EXPECT_EQ(fastpersist::testing::PlainCrc32(bytes), 0x0baff954U);
}

TEST(ArchivePrefix, IsTheBaseNameUpToItsLastDot) {
  EXPECT_EQ(ArchivePrefix("model.pt"), "model");
  EXPECT_EQ(ArchivePrefix("a.b.pt"), "a.b");
  EXPECT_EQ(ArchivePrefix("noext"), "noext");
  EXPECT_EQ(ArchivePrefix("dir.x/file"), "file");
  EXPECT_EQ(ArchivePrefix("/tmp/dir/m.pt"), "m");
  EXPECT_EQ(ArchivePrefix("./m.pt"), "m");
  EXPECT_EQ(ArchivePrefix(".hidden.pt"), ".hidden");
  EXPECT_EQ(ArchivePrefix("..x.pt"), "..x");
  EXPECT_EQ(ArchivePrefix("..."), "..");
  EXPECT_EQ(ArchivePrefix("x."), "x");
  EXPECT_EQ(ArchivePrefix("a b.pt"), "a b");
}

TEST(ArchivePrefix, IsEmptyWhereTorchRefuses) {
  EXPECT_EQ(ArchivePrefix(".pt"), "");
  EXPECT_EQ(ArchivePrefix("dir.x/.pt"), "");
  EXPECT_EQ(ArchivePrefix("dir/"), "");
  EXPECT_EQ(ArchivePrefix(""), "");
}

TEST(ArchivePrefix, IsArchiveForAnyByteOutsideAscii) {
  EXPECT_EQ(ArchivePrefix("\u00fc.pt"), "archive");
  EXPECT_EQ(ArchivePrefix("\u00fc/m.pt"), "archive");
  EXPECT_EQ(ArchivePrefix("\xff/m.pt"), "archive");
  EXPECT_EQ(ArchivePrefix("\x7f.pt"), "\x7f");
}

}  // namespace
}  // namespace fastpersist::layout
