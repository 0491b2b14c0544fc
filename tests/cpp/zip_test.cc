// SPDX-License-Identifier: Apache-2.0
// The expected bytes were written by torch 2.13, sparse files of more than 12 GiB included.
#include "layout/zip.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "testing/hex.h"

namespace fastpersist::layout {
namespace {

using fastpersist::testing::ToHex;

constexpr std::uint64_t kFourGiB = std::uint64_t{1} << 32;

struct TorchEntry {
  ZipEntry entry;
  std::uint32_t crc = 0;
  std::string header;  // without name and padding
  std::uint64_t padding = 0;
  std::string descriptor;
  std::string directory;  // without the name
  std::string directory_extra;
};

void PrintTo(const TorchEntry& torch, std::ostream* out) { *out << torch.entry.name; }

class TorchEntryTest : public ::testing::TestWithParam<TorchEntry> {};

TEST_P(TorchEntryTest, HasTorchsLocalHeader) {
  const TorchEntry& torch = GetParam();
  Bytes header;
  AppendLocalHeader(torch.entry, 64, header);
  EXPECT_EQ(header.size(), LocalHeaderLength(torch.entry, 64));
  const std::size_t name = 30;
  const std::size_t extra = name + torch.entry.name.size();
  const std::span bytes(header);
  EXPECT_EQ(
      ToHex(bytes.first(name)) + ToHex(bytes.subspan(extra, header.size() - extra - torch.padding)),
      torch.header);
  EXPECT_EQ(ToHex(bytes.subspan(name, torch.entry.name.size())), ToHex(torch.entry.name));
  for (const std::byte byte : bytes.last(torch.padding)) EXPECT_EQ(byte, std::byte{'Z'});
}

TEST_P(TorchEntryTest, HasTorchsDescriptor) {
  Bytes descriptor;
  AppendDescriptor(GetParam().entry, GetParam().crc, descriptor);
  EXPECT_EQ(ToHex(descriptor), GetParam().descriptor);
  EXPECT_EQ(descriptor.size(), GetParam().entry.DescriptorLength());
}

TEST_P(TorchEntryTest, HasTorchsDirectoryRecord) {
  const TorchEntry& torch = GetParam();
  Bytes record;
  AppendDirectoryRecord(torch.entry, torch.crc, record);
  EXPECT_EQ(ToHex(record), torch.directory + ToHex(torch.entry.name) + torch.directory_extra);
  EXPECT_EQ(record.size(), DirectoryRecordLength(torch.entry));
}

INSTANTIATE_TEST_SUITE_P(
    Torch, TorchEntryTest,
    ::testing::Values(
        TorchEntry{.entry = {.name = "x/data.pkl", .size = 425, .header_offset = 0},
                   .crc = 0x544b2968,
                   .header = "504b0304000008080000000000000000000000000000000000000a001800"
                             "46421400",
                   .padding = 20,
                   .descriptor = "504b070868294b54a9010000a9010000",
                   .directory = "504b010200000000080800000000000068294b54a9010000a90100000a00000000"
                                "00000000000000000000000000",
                   .directory_extra = ""},
        TorchEntry{.entry = {.name = "x/byteorder", .size = 6, .header_offset = 722},
                   .crc = 0x19e33d85,
                   .header = "504b0304000008080000000000000000000000000000000000000b000500"
                             "46420100",
                   .padding = 1,
                   .descriptor = "504b0708853de3190600000006000000",
                   .directory = "504b0102000000000808000000000000853de31906000000060000000b00000000"
                                "000000000000000000d2020000",
                   .directory_extra = ""},
        // The largest size that needs no zip64, and no padding at all.
        TorchEntry{.entry = {.name = "x/data/0", .size = kFourGiB - 2, .header_offset = 790},
                   .crc = 0,
                   .header = "504b03040000080800000000000000000000000000000000000008000400"
                             "46420000",
                   .padding = 0,
                   .descriptor = "504b070800000000fefffffffeffffff",
                   .directory = "504b010200000000080800000000000000000000fefffffffeffffff0800000000"
                                "00000000000000000016030000",
                   .directory_extra = ""},
        // A long size and a long offset.
        TorchEntry{.entry = {.name = "x/data/1", .size = kFourGiB - 1, .header_offset = 4294968142},
                   .crc = 0,
                   .header = "504b03040000080800000000000000000000000000000000000008004c00"
                             "01001800ffffffff0000000000000000000000004e03000001000000"
                             "46422c00",
                   .padding = 44,
                   .descriptor = "504b070800000000ffffffff00000000ffffffff00000000",
                   .directory = "504b010200000000080800000000000000000000ffffffffffffffff08001c0000"
                                "000000000000000000ffffffff",
                   .directory_extra = "01001800ffffffff00000000ffffffff000000004e03000001000000"},
        TorchEntry{.entry = {.name = "x/data/2", .size = kFourGiB, .header_offset = 8589935575},
                   .crc = 0,
                   .header = "504b03040000080800000000000000000000000000000000000008004300"
                             "0100180000000000010000000000000000000000d703000002000000"
                             "46422300",
                   .padding = 35,
                   .descriptor = "504b07080000000000000000010000000000000001000000",
                   .directory = "504b010200000000080800000000000000000000ffffffffffffffff08001c0000"
                                "000000000000000000ffffffff",
                   .directory_extra = "0100180000000000010000000000000001000000d703000002000000"},
        // A long size only.
        TorchEntry{.entry = {.name = "x/data/9", .size = kFourGiB, .header_offset = 598},
                   .crc = 0,
                   .header = "504b03040000080800000000000000000000000000000000000008004400"
                             "0100100000000000010000000000000000000000"
                             "46422c00",
                   .padding = 44,
                   .descriptor = "504b07080000000000000000010000000000000001000000",
                   .directory = "504b010200000000080800000000000000000000ffffffffffffffff0800140000"
                                "00000000000000000056020000",
                   .directory_extra = "0100100000000000010000000000000001000000"},
        // A long offset only.
        TorchEntry{.entry = {.name = "x/data/3", .size = 5, .header_offset = 12884903000},
                   .crc = 0,
                   .header = "504b03040000080800000000000000000000000000000000000008004200"
                             "010008005804000003000000"
                             "46423200",
                   .padding = 50,
                   .descriptor = "504b07080000000005000000000000000500000000000000",
                   .directory = "504b010200000000080800000000000000000000050000000500000008000c0000"
                                "000000000000000000ffffffff",
                   .directory_extra = "010008005804000003000000"},
        // An empty body has no descriptor, wherever it lies.
        TorchEntry{.entry = {.name = "x/data/4", .size = 0, .header_offset = 12884903133},
                   .crc = 0,
                   .header = "504b03040000000800000000000000000000000000000000000008003d00"
                             "01000800dd04000003000000"
                             "46422d00",
                   .padding = 45,
                   .descriptor = "",
                   .directory = "504b010200000000000800000000000000000000000000000000000008000c0000"
                                "000000000000000000ffffffff",
                   .directory_extra = "01000800dd04000003000000"}),
    [](const ::testing::TestParamInfo<TorchEntry>& torch) {
      return "DataAt" + std::to_string(torch.param.entry.header_offset);
    });

TEST(ZipEndRecords, AreTorchsOnes) {
  Bytes end;
  AppendEndRecords(11, 12884903488, 741, end);
  EXPECT_EQ(end.size(), kEndRecordsLength);
  EXPECT_EQ(ToHex(end),
            "504b06062c000000000000001e032d0000000000000000000b000000000000000b00000000000000"
            "e5020000000000004006000003000000"
            "504b060700000000250900000300000001000000"
            "504b0506000000000b000b00e5020000ffffffff0000");
}

TEST(ZipEndRecords, TheShortFieldsStopAtTheirLimits) {
  const auto short_record = [](std::uint64_t entries, std::uint64_t offset, std::uint64_t length) {
    Bytes end;
    AppendEndRecords(entries, offset, length, end);
    return ToHex(std::span(end).last(14));
  };
  EXPECT_EQ(short_record(0xFFFE, 0xFFFFFFFE, 0xFFFFFFFE), "fefffefffefffffffeffffff0000");
  EXPECT_EQ(short_record(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF), "ffffffffffffffffffffffff0000");
  EXPECT_EQ(short_record(0x10000, kFourGiB, kFourGiB), "ffffffffffffffffffffffff0000");
}

TEST(ZipEntry, IsLongFromTheFirstValueThatThirtyTwoBitsReserve) {
  EXPECT_FALSE((ZipEntry{.size = 0xFFFFFFFE}.HasLongSize()));
  EXPECT_TRUE((ZipEntry{.size = 0xFFFFFFFF}.HasLongSize()));
  EXPECT_FALSE((ZipEntry{.header_offset = 0xFFFFFFFE}.HasLongOffset()));
  EXPECT_TRUE((ZipEntry{.header_offset = 0xFFFFFFFF}.HasLongOffset()));
}

class ZipAlignmentTest : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(ZipAlignmentTest, EveryBodyBeginsOnTheAlignment) {
  const std::uint64_t alignment = GetParam();
  for (const std::uint64_t base : {std::uint64_t{0}, kFourGiB - 40, kFourGiB + 1}) {
    for (std::uint64_t offset = base; offset < base + 70; ++offset) {
      for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{1}, kFourGiB}) {
        const ZipEntry entry{.name = "archive/data/17", .size = size, .header_offset = offset};
        Bytes header;
        AppendLocalHeader(entry, alignment, header);
        ASSERT_EQ((offset + header.size()) % alignment, 0U) << offset << ' ' << size;
        ASSERT_EQ(header.size(), LocalHeaderLength(entry, alignment));
        ASSERT_LT(header.size(), 30 + entry.name.size() + 28 + 4 + alignment);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Alignments, ZipAlignmentTest,
                         ::testing::Values(1, 2, 4, 8, 64, 512, 4096, 16384, 32768));

}  // namespace
}  // namespace fastpersist::layout
