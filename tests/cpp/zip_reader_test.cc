// SPDX-License-Identifier: Apache-2.0
// Archives of our own writer, of Python's zipfile (as hexadecimal digits), and damaged ones. What
// single fields may claim is tested in zip_fields_test.cc.
#include "layout/zip_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "testing/archives.h"
#include "testing/memory_source.h"
#include "testing/seed.h"

namespace fastpersist::layout {
namespace {

using fastpersist::testing::ArchiveOf;
using fastpersist::testing::Body;
using fastpersist::testing::FromHex;
using fastpersist::testing::Little;
using fastpersist::testing::MemorySource;
using fastpersist::testing::ReadBodies;
using ::testing::AnyOf;
using ::testing::HasSubstr;

const std::vector<Body> kSmall{{"data.pkl", "a pickle"}, {"data/0", "zeroth"}, {"data/1", ""}};

Error ErrorOf(std::string_view archive) {
  const auto directory = ReadZipDirectory(MemorySource(archive));
  EXPECT_FALSE(directory);
  return directory ? Error{} : directory.error();
}

std::string DetailOf(std::string_view archive) { return ErrorOf(archive).detail; }

TEST(ZipReader, ReadsWhatOurWriterWrites) {
  for (const std::uint64_t alignment : {1U, 64U, 4096U, 32768U}) {
    const MemorySource source(ArchiveOf(kSmall, alignment));
    const auto directory = ReadZipDirectory(source);
    ASSERT_TRUE(directory) << directory.error().Message();
    ASSERT_EQ(directory->records.size(), 6U);
    EXPECT_EQ(directory->records[1].name, "archive/data/0");
    EXPECT_EQ(directory->records[1].flags, 0x0808);
    EXPECT_EQ(directory->records[2].flags, 0x0800);
    std::uint64_t at = 0;
    for (const ArchiveRecord& record : directory->records) {
      EXPECT_EQ(record.header_offset, at);
      EXPECT_EQ(record.body_offset % alignment, 0U) << record.name;
      EXPECT_FALSE(record.zip64);
      at = record.end;
    }
    EXPECT_EQ(at, directory->directory_offset);
    EXPECT_EQ(at + directory->directory_length + 98, source.size());
    // Nothing had to be located: SaysOtherBody was false throughout.
    ZipDirectory located = *directory;
    ASSERT_TRUE(LocateBodies(source, located));
    for (std::size_t i = 0; i < located.records.size(); ++i) {
      EXPECT_EQ(located.records[i].body_offset, directory->records[i].body_offset);
    }
  }
}

TEST(ZipReader, ReadsSeventyThousandEntries) {
  std::vector<Body> bodies;
  for (int i = 0; i < 70'000; ++i)
    bodies.push_back({"data/" + std::to_string(i), std::to_string(i)});
  const auto read = ReadBodies(MemorySource(ArchiveOf(bodies, 1)));
  ASSERT_TRUE(read) << read.error().Message();
  ASSERT_EQ(read->size(), bodies.size() + 3);
  EXPECT_EQ((*read)[69'999].name, "archive/data/69999");
  EXPECT_EQ((*read)[69'999].bytes, "69999");
}

// Made by CPython 3.11: ZipFile.writestr into a seekable file (two entries, no descriptors), into
// one that cannot seek, the same with force_zip64 and a comment, and force_zip64 in a seekable one;
// compressed.
constexpr std::string_view kSeekable =
    "504b03041400000000000000210086a61036050000000500000003000000612f7868656c6c6f504b0304"
    "1400000000000000210000000000000000000000000003000000612f65504b0102140314000000000000"
    "00210086a610360500000005000000030000000000000000000000800100000000612f78504b01021403"
    "14000000000000002100000000000000000000000000030000000000000000000000800126000000612f"
    "65504b0506000000000200020062000000470000000000";
constexpr std::string_view kStreamed =
    "504b03041400080000000000210000000000000000000000000003000000612f7868656c6c6f504b0708"
    "86a610360500000005000000504b010214031400080000000000210086a6103605000000050000000300"
    "00000000000000000000800100000000612f78504b0506000000000100010031000000360000000000";
constexpr std::string_view kStreamedLong =
    "504b03042d00080000000000210000000000ffffffffffffffff03001400612f78010010000000000000"
    "000000000000000000000068656c6c6f504b070886a6103605000000000000000500000000000000504b"
    "03042d00080000000000210000000000ffffffffffffffff03001400612f790100100000000000000000"
    "000000000000000000776f726c64504b07084311773a05000000000000000500000000000000504b0102"
    "2d032d00080000000000210086a610360500000005000000030000000000000000000000800100000000"
    "612f78504b01022d032d0008000000000021004311773a05000000050000000300000000000000000000"
    "00800152000000612f79504b0506000000000200020062000000a400000002006869";
constexpr std::string_view kSeekableLong =
    "504b03042d00000000000000210086a61036ffffffffffffffff03001400612f78010010000500000000"
    "000000050000000000000068656c6c6f504b01022d032d00000000000000210086a61036050000000500"
    "0000030000000000000000000000800100000000612f78504b05060000000001000100310000003a0000"
    "000000";
constexpr std::string_view kDeflated =
    "504b030414000000080000002100f5dc937f0a0000002d00000003000000612f78cb48cdc9c9cf209200"
    "00504b0102140314000000080000002100f5dc937f0a0000002d00000003000000000000000000000080"
    "0100000000612f78504b05060000000001000100310000002b0000000000";

TEST(ZipReader, ReadsArchivesOfPythonUnlessTheyAreCompressed) {
  const auto read = [](std::string_view hex) {
    const auto bodies = ReadBodies(MemorySource(FromHex(hex)));
    EXPECT_TRUE(bodies) << bodies.error().Message();
    return bodies.value_or(std::vector<Body>{});
  };
  const Body hello{"a/x", "hello"};
  EXPECT_EQ(read(kSeekable), (std::vector<Body>{hello, {"a/e", ""}}));
  EXPECT_EQ(read(kStreamed), std::vector<Body>{hello});
  EXPECT_EQ(read(kStreamedLong), (std::vector<Body>{hello, {"a/y", "world"}}));
  EXPECT_EQ(read(kSeekableLong), std::vector<Body>{hello});
  const Error deflated = ErrorOf(FromHex(kDeflated));
  EXPECT_EQ(deflated.code, ErrorCode::kUnsupportedFile);
  EXPECT_EQ(deflated.detail, "'a/x' is compressed (deflate)");
  EXPECT_EQ(deflated.entry, "a/x");
}

TEST(ZipReader, RecordsNeedNotLieBackToBack) {
  constexpr std::uint32_t kDirectory = 0x3a;
  for (const std::uint32_t gap : {1U, 16U, 65'535U, 65'536U, 1'000'000U}) {
    std::string wide = FromHex(kSeekableLong);
    wide.insert(kDirectory, gap, 'x');
    wide.replace(wide.size() - 6, 4, Little(kDirectory + gap));
    const MemorySource source(wide);
    const auto directory = ReadZipDirectory(source);
    ASSERT_TRUE(directory) << directory.error().Message();
    const ArchiveRecord& record = directory->records.front();
    EXPECT_TRUE(SaysOtherBody(
        record, source.bytes().subspan(0, static_cast<std::size_t>(record.body_offset))));
    EXPECT_LE(record.body_offset, 33U + 65'535);
    const auto bodies = ReadBodies(source);
    ASSERT_TRUE(bodies) << bodies.error().Message();
    EXPECT_EQ(bodies->front().bytes, "hello");
  }
}

TEST(ZipReader, EveryFlippedBitIsReportedOrMeansNothing) {
  for (std::string archive : {ArchiveOf(kSmall, 64), FromHex(kSeekable), FromHex(kStreamedLong)}) {
    const auto intact = ReadBodies(MemorySource(archive));
    ASSERT_TRUE(intact);
    std::size_t unchanged = 0;
    for (std::size_t bit = 0; bit < archive.size() * 8; ++bit) {
      archive[bit / 8] = static_cast<char>(archive[bit / 8] ^ (1 << bit % 8));
      const auto read = ReadBodies(MemorySource(archive));
      archive[bit / 8] = static_cast<char>(archive[bit / 8] ^ (1 << bit % 8));
      if (!read) {
        EXPECT_THAT(read.error().code, AnyOf(ErrorCode::kCorrupt, ErrorCode::kUnsupportedFile));
        EXPECT_FALSE(read.error().detail.empty());
        EXPECT_EQ(read.error().path, "memory");
        continue;
      }
      ++unchanged;
      ASSERT_EQ(*read, *intact) << "bit " << bit % 8 << " of byte " << bit / 8;
    }
    EXPECT_LT(unchanged, archive.size() * 8 / 2);  // paddings, times, versions, attributes
  }
}

TEST(ZipReader, EveryTruncationIsCalledOne) {
  const std::string archive = ArchiveOf(kSmall, 64);
  for (std::size_t length = 0; length < archive.size(); ++length) {
    const Error error = ErrorOf(std::string_view(archive).substr(0, length));
    EXPECT_EQ(error.code, ErrorCode::kCorrupt);
    EXPECT_THAT(error.detail, HasSubstr(length == 0  ? "no checkpoint: it is empty"
                                        : length < 4 ? "no checkpoint: it "
                                                     : "it is truncated"))
        << length;
  }
  std::string hole = archive.substr(0, 200) + std::string(100'000, '\0');
  EXPECT_THAT(DetailOf(hole), HasSubstr("its last 65633 bytes are zeros"));
  // Within the comment.
  const std::string commented = FromHex(kStreamedLong);
  EXPECT_THAT(DetailOf(commented.substr(0, commented.size() - 1)), HasSubstr("1 bytes beyond"));
}

TEST(ZipReader, RandomDamageIsNoReasonToCrash) {
  const fastpersist::testing::Seed seed;
  fastpersist::testing::Random random(seed.value());
  const std::string archive = ArchiveOf(kSmall, 1);
  for (int round = 0; round < 20'000; ++round) {
    std::string damaged = archive;
    for (std::uint64_t i = fastpersist::testing::Between(random, 1, 4); i-- > 0;) {
      const std::size_t at = fastpersist::testing::Between(random, 0, damaged.size() - 1);
      if (fastpersist::testing::OnceIn(random, 20)) {
        damaged.erase(at, fastpersist::testing::Between(random, 1, 50));
        damaged.append("PK\x05\x06");
      } else {
        damaged[at] =
            fastpersist::testing::OnceIn(random, 2) ? '\xFF' : static_cast<char>(random());
      }
    }
    const auto read = ReadBodies(MemorySource(damaged));
    EXPECT_TRUE(read || !read.error().detail.empty());
  }
}

TEST(ZipReader, BytesBehindTheEndAreRefused) {
  const std::string archive = ArchiveOf(kSmall, 64);
  const Error padded = ErrorOf(archive + std::string(100, '\0'));
  EXPECT_EQ(padded.detail, "100 bytes follow the end of the archive, all of them zeros");
  EXPECT_EQ(padded.offset, archive.size());
  EXPECT_THAT(padded.advice, HasSubstr("truncate -s " + std::to_string(archive.size())));
  EXPECT_EQ(DetailOf(archive + "x"), "1 bytes follow the end of the archive");
}

TEST(ZipReader, BytesElsewhereAreRefused) {
  const std::string archive = ArchiveOf(kSmall, 64);
  EXPECT_THAT(DetailOf("MZ" + archive), HasSubstr("zip64 end record is said to be at"));
  EXPECT_THAT(DetailOf("MZ" + FromHex(kSeekable)), HasSubstr("2 bytes lie between the directory"));
  std::string sfx = "MZ" + FromHex(kStreamed);
  sfx[sfx.size() - 6] = 0x38;          // the directory
  sfx[sfx.size() - 22 - 49 + 42] = 2;  // the entry
  EXPECT_THAT(DetailOf(sfx), HasSubstr("2 bytes precede the first entry"));
  std::string empty = "PK\x05\x06" + std::string(18, '\0');
  EXPECT_TRUE(ReadZipDirectory(MemorySource(empty)));
  EXPECT_FALSE(ReadZipDirectory(MemorySource("MZ" + empty)));
}

TEST(ZipReader, EscapesWithoutZip64AreOrdinaryNumbers) {
  // 65,535 entries and no zip64 record: what Python writes.
  std::vector<Body> bodies;
  for (int i = 0; i < 65'532; ++i) bodies.push_back({std::to_string(i), ""});
  std::string archive = ArchiveOf(bodies, 1);
  archive.erase(archive.size() - 98, 76);
  const auto directory = ReadZipDirectory(MemorySource(archive));
  ASSERT_TRUE(directory) << directory.error().Message();
  EXPECT_EQ(directory->records.size(), 65'535U);
}

}  // namespace
}  // namespace fastpersist::layout
