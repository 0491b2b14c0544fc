// SPDX-License-Identifier: Apache-2.0
// Archives in which single fields lie, and sizes and offsets beyond 32 bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "layout/torch_container.h"
#include "layout/zip_reader.h"
#include "testing/archives.h"
#include "testing/forbidden_memory.h"
#include "testing/memory_source.h"

namespace fastpersist::layout {
namespace {

using fastpersist::testing::ArchiveOf;
using fastpersist::testing::Body;
using fastpersist::testing::Little;
using fastpersist::testing::MemorySource;
using fastpersist::testing::ReadBodies;
using ::testing::HasSubstr;

std::string U16(std::uint16_t value) { return Little(value); }
std::string U32(std::uint32_t value) { return Little(value); }
std::string U64(std::uint64_t value) { return Little(value); }
constexpr std::uint64_t kMax64 = ~std::uint64_t{0};

// The parts of an archive with the records data.pkl (8 bytes), data/0 (6), data/1 (0) and torch's.
enum class Part : std::uint8_t {
  kHeader,
  kExtra,  // of that header
  kDescriptor,
  kRecord,
  kSecondRecord,
  kZip64End,
  kLocator,
  kEnd
};

struct Patch {
  Part part;
  std::uint64_t at;
  std::string bytes;
};

struct Lie {
  std::string name;
  std::vector<Patch> patches;
  std::string detail;
  ErrorCode code = ErrorCode::kCorrupt;
};

void PrintTo(const Lie& lie, std::ostream* out) { *out << lie.name; }

class ZipLieTest : public ::testing::TestWithParam<Lie> {
 protected:
  const std::string archive_ =
      ArchiveOf({{"data.pkl", "a pickle"}, {"data/0", "zeroth"}, {"data/1", ""}});
  const ZipDirectory directory_ = ReadZipDirectory(MemorySource(archive_)).value();

  [[nodiscard]] std::uint64_t OffsetOf(Part part) const {
    const ArchiveRecord& first = directory_.records.front();
    switch (part) {
      case Part::kHeader:
        return 0;
      case Part::kExtra:
        return 30 + first.name.size();
      case Part::kDescriptor:
        return first.body_end();
      case Part::kRecord:
        return directory_.directory_offset;
      case Part::kSecondRecord:
        return directory_.directory_offset + 46 + first.name.size();
      case Part::kZip64End:
        return archive_.size() - 98;
      case Part::kLocator:
        return archive_.size() - 42;
      case Part::kEnd:
        return archive_.size() - 22;
    }
    return 0;
  }
};

TEST_P(ZipLieTest, IsFoundOut) {
  const Lie& lie = GetParam();
  std::string archive = archive_;
  for (const Patch& patch : lie.patches) {
    archive.replace(OffsetOf(patch.part) + patch.at, patch.bytes.size(), patch.bytes);
  }
  ASSERT_NE(archive, archive_);
  ASSERT_EQ(archive.size(), archive_.size());
  const auto read = ReadBodies(MemorySource(archive, "some.pt"));
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, lie.code) << read.error().Message();
  EXPECT_THAT(read.error().detail, HasSubstr(lie.detail));
  EXPECT_EQ(read.error().operation, "read");
  EXPECT_EQ(read.error().path, "some.pt");
  // Frames are reported where the wrong field lies.
  const Patch& first = lie.patches.front();
  if (first.part == Part::kHeader || first.part == Part::kDescriptor) {
    EXPECT_EQ(read.error().offset, OffsetOf(first.part) + first.at);
    EXPECT_EQ(read.error().entry, "archive/data.pkl");
  }
}

std::string NameOf(const ::testing::TestParamInfo<Lie>& lie) { return lie.param.name; }

constexpr auto kUnsupported = ErrorCode::kUnsupportedFile;

INSTANTIATE_TEST_SUITE_P(
    EndRecords, ZipLieTest,
    ::testing::Values(
        Lie{"Disk", {{Part::kEnd, 4, U16(1)}}, "the end records disagree: 1 here, 0 in zip64's"},
        Lie{"Entries", {{Part::kEnd, 10, U16(5)}}, "the end records disagree: 5 here, 6"},
        Lie{"Length", {{Part::kEnd, 12, U32(0)}}, "the end records disagree: 0 here"},
        Lie{"Offset", {{Part::kEnd, 16, U32(1)}}, "the end records disagree: 1 here"},
        Lie{"BothDisks",
            {{Part::kZip64End, 16, U32(1)}, {Part::kEnd, 4, U16(1)}},
            "several volumes",
            kUnsupported},
        Lie{"BothDirectoryDisks",
            {{Part::kZip64End, 20, U32(1)}, {Part::kEnd, 6, U16(0xFFFF)}},
            "several volumes",
            kUnsupported},
        Lie{"Disks", {{Part::kLocator, 16, U32(2)}}, "several volumes", kUnsupported},
        Lie{"EntriesHere",
            {{Part::kZip64End, 24, U64(5)}, {Part::kEnd, 8, U16(5)}},
            "several volumes",
            kUnsupported},
        Lie{"NoZip64End",
            {{Part::kLocator, 8, U64(kMax64)}},
            "is said to be at 18446744073709551615"},
        Lie{"Zip64EndElsewhere", {{Part::kLocator, 8, U64(0)}}, "is said to be at 0"},
        Lie{"Zip64EndSignature", {{Part::kZip64End, 0, U32(1)}}, "has no signature"},
        Lie{"Zip64EndLength", {{Part::kZip64End, 4, U64(kMax64)}}, "claims 18446744073709551615"},
        Lie{"AbsurdCount",
            {{Part::kZip64End, 24, U64(std::uint64_t{1} << 60) + U64(std::uint64_t{1} << 60)},
             {Part::kEnd, 8, U32(kMax64 & 0xFFFFFFFF)}},
            "to hold 1152921504606846976 entries"},
        Lie{"AbsurdLength",
            {{Part::kZip64End, 40, U64(std::uint64_t{1} << 62)}, {Part::kEnd, 12, U32(0xFFFFFFFF)}},
            "reach beyond its end record"},
        Lie{"AbsurdOffset",
            {{Part::kZip64End, 48, U64(kMax64)}, {Part::kEnd, 16, U32(0xFFFFFFFF)}},
            "reach beyond its end record"},
        Lie{"WrappingLength",
            {{Part::kZip64End, 40, U64(kMax64 - 10)}, {Part::kEnd, 12, U32(0xFFFFFFFF)}},
            "reach beyond its end record"},
        Lie{"OneEntryLess",
            {{Part::kZip64End, 24, U64(5) + U64(5)}, {Part::kEnd, 8, U16(5) + U16(5)}},
            "follow the last of the 5 records"},
        Lie{"OneEntryMore",
            {{Part::kZip64End, 24, U64(7) + U64(7)}, {Part::kEnd, 8, U16(7) + U16(7)}},
            "the directory ends before its last record"}),
    NameOf);

INSTANTIATE_TEST_SUITE_P(
    Directory, ZipLieTest,
    ::testing::Values(
        Lie{"Signature", {{Part::kRecord, 0, U32(0)}}, "has no signature"},
        Lie{"Encrypted", {{Part::kRecord, 8, U16(0x0809)}}, "is encrypted", kUnsupported},
        Lie{"StronglyEncrypted", {{Part::kRecord, 8, U16(0x0848)}}, "is encrypted", kUnsupported},
        Lie{"Deflated",
            {{Part::kRecord, 10, U16(8)}},
            "'archive/data.pkl' is compressed (deflate)",
            kUnsupported},
        Lie{"UnknownMethod", {{Part::kRecord, 10, U16(777)}}, "(method 777)", kUnsupported},
        Lie{"Crc", {{Part::kRecord, 16, U32(7)}}, "the directory has 00000007"},
        Lie{"StoredSize", {{Part::kRecord, 20, U32(9)}}, "says that 8 bytes are stored as 9"},
        Lie{"Size", {{Part::kRecord, 20, U32(9) + U32(9)}}, ""},
        Lie{"LargeSize", {{Part::kRecord, 20, U32(999) + U32(999)}}, "overlaps 'archive/data/0'"},
        Lie{"LongSize",
            {{Part::kRecord, 20, U32(0xFFFFFFFF) + U32(0xFFFFFFFF)}},
            "lacks a value in its zip64 field"},
        Lie{"LongName", {{Part::kRecord, 28, U16(0xFFFF)}}, "reaches beyond its end"},
        Lie{"NoName", {{Part::kRecord, 28, U16(0) + U16(16)}}, "is named '', which is empty"},
        Lie{"NameBecomesExtra", {{Part::kRecord, 28, U16(8) + U16(8)}}, "overrun their length"},
        Lie{"Volume", {{Part::kRecord, 34, U16(1)}}, "lies in volume 2", kUnsupported},
        Lie{"Offset", {{Part::kRecord, 42, U32(1)}}, "1 bytes precede the first entry"},
        Lie{"OffsetOfTheDirectory", {{Part::kSecondRecord, 42, U32(0x7FFFFFFF)}}, "overlaps"},
        Lie{"TwoAtOneOffset", {{Part::kSecondRecord, 42, U32(0)}}, "overlaps"},
        Lie{"ZeroInName",
            {{Part::kRecord, 50, std::string(1, '\0')}},
            "'arch\\x00ve/data.pkl', which contains a zero byte"},
        Lie{"NoUtf8", {{Part::kRecord, 50, "\xFF"}}, "'arch\\xffve/data.pkl', which is not UTF-8"},
        Lie{"Slash", {{Part::kRecord, 46, "/"}}, "which begins with a slash"},
        Lie{"OtherName", {{Part::kRecord, 50, "I"}}, "has another name than the directory"},
        Lie{"TwoOfOneName",
            {{Part::kSecondRecord, 46 + 14 + 46 + 13, "0"}},
            "two entries are named 'archive/data/0'"}),
    NameOf);

INSTANTIATE_TEST_SUITE_P(
    Frames, ZipLieTest,
    ::testing::Values(
        Lie{"Signature", {{Part::kHeader, 0, U32(0)}}, "'archive/data.pkl' has no signature"},
        Lie{"Flags", {{Part::kHeader, 6, U16(0)}}, "the flags 0x0000, the directory has 0x0808"},
        Lie{"Method", {{Part::kHeader, 8, U16(8)}}, "the method 8"},
        Lie{"Crc", {{Part::kHeader, 14, U32(7)}}, "the CRC-32 00000007"},
        Lie{"StoredSize", {{Part::kHeader, 18, U32(7)}}, "the size 7, the directory has 8"},
        Lie{"Size", {{Part::kHeader, 22, U32(7)}}, "the size 7, the directory has 8"},
        Lie{"LongSize", {{Part::kHeader, 22, U32(0xFFFFFFFF)}}, "no zip64 field for it"},
        Lie{"NameLength", {{Part::kHeader, 26, U16(15)}}, "a name of 15 bytes"},
        Lie{"ExtraLength", {{Part::kHeader, 28, U16(0xFFFF)}}, "leaves no room for the body"},
        Lie{"Name", {{Part::kHeader, 30, "A"}}, "another name than the directory"},
        Lie{"ExtraFields", {{Part::kExtra, 2, U16(0xFFFF)}}, "do not end where they must"},
        Lie{"Zip64Field", {{Part::kExtra, 0, U16(1)}}, "has a wrong zip64 field"},
        Lie{"DescriptorSignature", {{Part::kDescriptor, 0, U32(0)}}, "has no signature"},
        Lie{"DescriptorCrc", {{Part::kDescriptor, 4, U32(7)}}, "has the CRC-32 00000007"},
        Lie{"DescriptorSize", {{Part::kDescriptor, 8, U32(7)}}, "other than the 8 bytes"}),
    NameOf);

// A record of 5 bytes whose descriptor lies at 38.
ArchiveRecord Described() {
  ArchiveRecord record;
  record.name = "a/x";
  record.body_offset = 33;
  record.size = 5;
  record.crc = 0x12345678;
  record.flags = 0x0008;
  return record;
}

TEST(ZipDescriptor, IsReadInEachOfItsForms) {
  const ArchiveRecord record = Described();
  const std::string signature = U32(0x08074b50);
  const std::string small = U32(record.crc) + U32(5) + U32(5);
  const std::string large = U32(record.crc) + U64(5) + U64(5);
  const auto check = [&](const std::string& bytes) {
    return CheckDescriptor(record, std::as_bytes(std::span(bytes)), "f");
  };
  for (const std::string& form : {small, large, signature + small, signature + large}) {
    EXPECT_TRUE(check(form));
    EXPECT_TRUE(check(form + "something else"));
    for (std::size_t length = 0; length < form.size(); ++length) {
      // The short form is no beginning of the long one: the size is followed by a zero there.
      EXPECT_FALSE(check(form.substr(0, length))) << length;
    }
    for (std::size_t at = 0; at < form.size(); ++at) {
      std::string wrong = form;
      wrong[at] = static_cast<char>(wrong[at] ^ 1);
      EXPECT_FALSE(check(wrong)) << at;
    }
  }
}

TEST(ZipDescriptor, IsNotDemandedWithoutItsFlag) {
  ArchiveRecord record = Described();
  record.flags = 0x0800;
  EXPECT_TRUE(CheckDescriptor(record, {}, "f"));
}

TEST(ZipLocalHeader, CutShortIsNoHeader) {
  const ArchiveRecord record = Described();
  const std::vector<std::byte> bytes(32);
  EXPECT_FALSE(SaysOtherBody(record, bytes));
  EXPECT_FALSE(CheckLocalHeader(record, bytes, "f"));
  EXPECT_FALSE(CheckLocalHeader(record, {}, "f"));
}

// A file of many GiB of which only what is not tensor data exists.
class HollowSource final : public ByteSource {
 public:
  explicit HollowSource(const Stream& stream) : size_(stream.size()) {
    const std::vector<RecordDigest> digests(stream.record_count());
    for (const Extent& extent : stream.extents()) {
      if (extent.kind == Extent::Kind::kMemory) continue;
      std::vector<std::byte> bytes(extent.length);
      if (extent.kind == Extent::Kind::kLate) {
        stream.late()->Render(extent.late_id, digests, bytes);
      } else {
        std::copy_n(extent.bytes, extent.length, bytes.begin());
      }
      pieces_.emplace(extent.offset, std::move(bytes));
    }
  }
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::uint64_t size() const override { return size_; }
  [[nodiscard]] Result<void> Read(std::uint64_t offset, std::span<std::byte> out) const override {
    std::ranges::fill(out, std::byte{0});
    for (const auto& [at, piece] : pieces_) {
      const std::uint64_t begin = std::max(at, offset);
      const std::uint64_t end = std::min(at + piece.size(), offset + out.size());
      if (begin >= end) continue;
      std::copy_n(piece.data() + (begin - at), end - begin, out.data() + (begin - offset));
    }
    return {};
  }

 private:
  std::string name_ = "hollow";
  std::uint64_t size_;
  std::map<std::uint64_t, std::vector<std::byte>> pieces_;
};

TEST(ZipReader, ReadsSizesAndOffsetsBeyondThirtyTwoBits) {
  constexpr std::uint64_t kFourGiB = std::uint64_t{1} << 32;
  const fastpersist::testing::ForbiddenMemory memory(kFourGiB + 1);
  const std::vector<std::uint64_t> sizes{6,        kFourGiB - 2, 0, kFourGiB - 1,
                                         kFourGiB, kFourGiB + 1, 5, 0};
  std::vector<Record> records;
  for (const std::uint64_t size : sizes) {
    Record& record = records.emplace_back();
    record.name = "data/" + std::to_string(records.size());
    record.body = memory.bytes().first(size);
    record.in_memory = true;
  }
  const auto stream = LayOutTorchContainer(records, {});
  ASSERT_TRUE(stream);
  const HollowSource source(*stream);
  const auto directory = ReadZipDirectory(source);
  ASSERT_TRUE(directory) << directory.error().Message();
  ZipDirectory located = *directory;
  ASSERT_TRUE(LocateBodies(source, located));
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const ArchiveRecord& record = directory->records[i];
    EXPECT_EQ(record.size, sizes[i]);
    EXPECT_EQ(record.zip64, i >= 2);
    EXPECT_EQ(record.body_offset, located.records[i].body_offset);
    std::vector<std::byte> header(record.body_offset - record.header_offset);
    ASSERT_TRUE(source.Read(record.header_offset, header));
    const auto good = CheckLocalHeader(record, header, "f");
    EXPECT_TRUE(good) << good.error().Message();
    std::vector<std::byte> descriptor(record.end - record.body_end());
    ASSERT_TRUE(source.Read(record.body_end(), descriptor));
    EXPECT_TRUE(CheckDescriptor(record, descriptor, "f"));
  }
}

}  // namespace
}  // namespace fastpersist::layout
