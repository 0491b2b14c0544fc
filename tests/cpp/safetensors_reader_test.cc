// SPDX-License-Identifier: Apache-2.0
// What is taken and what is refused was compared with the safetensors package, version 0.8, which
// takes all that is taken here.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "layout/contents.h"
#include "layout/safetensors.h"
#include "testing/memory_source.h"
#include "testing/streams.h"

namespace fastpersist::layout {
namespace {

using fastpersist::testing::MemorySource;
using fastpersist::testing::RenderPlainly;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

std::string Length(std::uint64_t length) {
  std::string field;
  for (unsigned i = 0; i < 8; ++i) field.push_back(static_cast<char>(length >> (8 * i)));
  return field;
}

Result<Contents> ReadBytes(const std::string& bytes) {
  return ReadSafetensorsFile(MemorySource(bytes, "m.safetensors"));
}
Result<Contents> Read(const std::string& header, std::size_t data) {
  return ReadBytes(Length(header.size()) + header + std::string(data, 'd'));
}

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets, const std::string& more = "") {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{}]{}}})", name, dtype,
                     shape, offsets, more);
}

std::string Object(const std::vector<std::string>& members) {
  return fmt::format("{{{}}}", fmt::join(members, ","));
}

std::string Detail(const Result<Contents>& contents) {
  if (contents) {
    ADD_FAILURE() << "was read";
    return {};
  }
  EXPECT_EQ(contents.error().code, ErrorCode::kCorrupt) << contents.error().Message();
  EXPECT_EQ(contents.error().operation, "read");
  EXPECT_EQ(contents.error().path, "m.safetensors");
  return contents.error().detail;
}

TEST(SafetensorsReader, ReadsWhatTheWriterWrites) {
  const std::vector<float> floats{1, 2, 3, 4, 5, 6};
  const std::vector<std::uint8_t> bytes{1, 2, 3};
  const auto stream = LayOutSafetensors(
      {{.name = "b", .dtype = "U8", .shape = {3}, .body = std::as_bytes(std::span(bytes))},
       {.name = "w", .dtype = "F32", .shape = {2, 3}, .body = std::as_bytes(std::span(floats))},
       {.name = "none", .dtype = "U8", .shape = {0, 4}, .body = {}}},
      {{"format", "pt"}});
  ASSERT_TRUE(stream);
  const auto file = RenderPlainly(*stream).bytes;
  const auto read = ReadSafetensorsFile(MemorySource(file));
  ASSERT_TRUE(read) << read.error().Message();
  EXPECT_EQ(read->kind, Contents::Kind::kSafetensors);
  EXPECT_THAT(read->metadata, ElementsAre(Pair("format", "pt")));
  ASSERT_EQ(read->tensors.size(), 3U);
  const StoredTensor& w = read->tensors[0];
  EXPECT_EQ(w.name, "w");
  EXPECT_EQ(w.dtype, "float32");
  EXPECT_EQ(w.item_size, 4U);
  EXPECT_THAT(w.shape, ElementsAre(2, 3));
  EXPECT_THAT(w.strides, ElementsAre(3, 1));
  EXPECT_EQ(w.bytes, 24U);
  EXPECT_EQ(w.offset, 0U);
  const StoredStorage& storage = read->storages[w.storage];
  EXPECT_EQ(storage.name, "w");
  EXPECT_EQ(storage.size, 24U);
  EXPECT_EQ(storage.offset, file.size() - 27);
  EXPECT_FALSE(storage.crc);
  EXPECT_EQ(storage.record, UINT32_MAX);
  EXPECT_EQ(read->tensors[2].name, "none");
  EXPECT_EQ(read->tensors[2].bytes, 0U);
}

TEST(SafetensorsReader, KeepsTheOrderOfTheHeaderAndStoragesInThatOfTheFile) {
  const auto read =
      Read(Object({Entry("late", "U8", "1", "1,2"), Entry("early", "U8", "1", "0,1")}), 2);
  ASSERT_TRUE(read) << read.error().Message();
  EXPECT_EQ(read->tensors[0].name, "late");
  EXPECT_EQ(read->storages[0].name, "early");
  EXPECT_EQ(read->tensors[0].storage, 1U);
  EXPECT_EQ(read->tensors[1].storage, 0U);
}

TEST(SafetensorsReader, TakesWhatThePackageTakes) {
  EXPECT_TRUE(Read("{}", 0));
  EXPECT_TRUE(Read("{} \n ", 0));
  EXPECT_TRUE(Read(R"({"__metadata__":null})", 0));
  EXPECT_TRUE(Read(Object({Entry("", "F64", "", "0,8")}), 8));
  EXPECT_TRUE(Read(Object({Entry("a", "U8", "0", "0,0"), Entry("b", "U8", "1", "0,1"),
                           Entry("c", "U8", "0,7", "1,1")}),
                   1));
  const auto extra = Read(
      Object({Entry("a", "U8", "1", "0,1", R"(,"more":[{"x":[1,null,"t",true,-1,0.5]}])")}), 1);
  EXPECT_TRUE(extra) << extra.error().Message();
}

TEST(SafetensorsReader, ElementsBelowAByteAreCountedInBits) {
  const auto four = Read(Object({Entry("a", "F4", "2,8", "0,8")}), 8);
  ASSERT_TRUE(four) << four.error().Message();
  EXPECT_EQ(four->tensors[0].dtype, "float4_e2m1fn_x2");
  EXPECT_THAT(four->tensors[0].shape, ElementsAre(2, 4));
  EXPECT_THAT(four->tensors[0].strides, ElementsAre(4, 1));
  EXPECT_EQ(four->tensors[0].item_size, 1U);
  const auto odd = Read(Object({Entry("a", "F4", "2,3", "0,3")}), 3);
  ASSERT_TRUE(odd) << odd.error().Message();
  EXPECT_EQ(odd->tensors[0].dtype, "F4");
  EXPECT_EQ(odd->tensors[0].item_size, 0U);
  EXPECT_EQ(odd->tensors[0].bytes, 3U);
  const auto six = Read(Object({Entry("a", "F6_E2M3", "4", "0,3")}), 3);
  ASSERT_TRUE(six) << six.error().Message();
  EXPECT_EQ(six->tensors[0].dtype, "F6_E2M3");
  EXPECT_EQ(six->tensors[0].bytes, 3U);
  EXPECT_THAT(Detail(Read(Object({Entry("a", "F4", "1", "0,1")}), 1)), HasSubstr("4 bits"));
}

TEST(SafetensorsReader, TensorsMustCoverTheDataExactly) {
  EXPECT_THAT(
      Detail(Read(Object({Entry("a", "U8", "1", "0,1"), Entry("b", "U8", "1", "2,3")}), 3)),
      HasSubstr("tensor 'b' leaves a hole behind the tensor before it: data_offsets [2, 3] where "
                "1 is expected"));
  EXPECT_THAT(Detail(Read(Object({Entry("a", "U8", "2", "0,2"), Entry("b", "U8", "2", "1,3")}), 3)),
              HasSubstr("tensor 'b' overlaps the tensor before it: data_offsets [1, 3]"));
  EXPECT_THAT(Detail(Read(Object({Entry("a", "U8", "1", "0,1")}), 2)),
              HasSubstr("has 2 bytes of data, of which the tensors in its header cover only 1"));
  EXPECT_THAT(Detail(Read(Object({Entry("a", "U8", "3", "0,3")}), 2)),
              HasSubstr("tensor 'a' lies beyond the end of the file: data_offsets [0, 3] in 2"));
  EXPECT_THAT(Detail(Read(Object({Entry("a", "U8", "1", "1,0")}), 1)),
              HasSubstr("ends before it begins"));
  EXPECT_THAT(Detail(Read(Object({Entry("a", "U8", "1", "0,9223372036854775807")}), 1)),
              HasSubstr("beyond the end"));
}

TEST(SafetensorsReader, ShapesMustAgreeWithOffsets) {
  EXPECT_THAT(Detail(Read(Object({Entry("a", "F32", "2", "0,4")}), 4)),
              HasSubstr("tensor 'a' of type F32 has 64 bits by its shape, and 4 bytes by its "
                        "data_offsets [0, 4]"));
  const std::string huge = "9223372036854775807,9223372036854775807,9223372036854775807";
  EXPECT_THAT(Detail(Read(Object({Entry("a", "U8", huge, "0,0")}), 0)), HasSubstr("large shape"));
  EXPECT_THAT(Detail(Read(Object({Entry("a", "U8", huge + ",0", "0,0")}), 0)),
              HasSubstr("large shape"));
  EXPECT_THAT(Detail(Read(Object({Entry("a", "U8", "0," + huge, "0,0")}), 0)),
              HasSubstr("large shape"));
}

TEST(SafetensorsReader, NothingMayBeNamedTwice) {
  const std::string a = Entry("a", "U8", "1", "0,1");
  const auto twice = Read(Object({a, a}), 1);
  EXPECT_THAT(Detail(twice), HasSubstr("its header names tensor 'a' twice"));
  EXPECT_EQ(twice.error().entry, "a");
  EXPECT_THAT(Detail(Read(Object({Entry("a", "U8", "1", "0,1", R"(,"dtype":"U8")")}), 1)),
              HasSubstr("has dtype twice"));
  EXPECT_THAT(Detail(Read(R"({"__metadata__":{"k":"1","k":"2"}})", 0)),
              HasSubstr("its header names metadata entry 'k' twice"));
  EXPECT_THAT(Detail(Read(R"({"__metadata__":{},"__metadata__":{}})", 0)), HasSubstr("twice"));
}

TEST(SafetensorsReader, MembersMustBeOfTheirTypes) {
  const auto entry = [](const std::string& members) {
    return Detail(Read(R"({"a":{)" + members + "}}", 1));
  };
  EXPECT_THAT(entry(R"("dtype":"U8","shape":[1])"), HasSubstr("lacks"));
  EXPECT_THAT(entry(R"("dtype":1)"), HasSubstr("has the number 1 as dtype"));
  EXPECT_THAT(entry(R"("dtype":null)"), HasSubstr("has null as dtype"));
  EXPECT_THAT(entry(R"("shape":{})"), HasSubstr("has an object as shape"));
  EXPECT_THAT(entry(R"("shape":[[1]])"), HasSubstr("has a list in its shape"));
  EXPECT_THAT(entry(R"("shape":[1.0])"), HasSubstr("has the number 1.0 in its shape"));
  EXPECT_THAT(entry(R"("shape":[-1])"), HasSubstr("negative number -1 in its shape"));
  EXPECT_THAT(entry(R"("shape":[9223372036854775808])"), HasSubstr("9223372036854775808"));
  EXPECT_THAT(entry(R"("data_offsets":[1])"), HasSubstr("has one data offset"));
  EXPECT_THAT(entry(R"("data_offsets":[1,2,3])"), HasSubstr("two offsets belong"));
  EXPECT_THAT(Detail(Read(Object({Entry("a", "C128", "1", "0,16")}), 16)),
              HasSubstr("tensor 'a' has type 'C128', which safetensors files do not have"));
  EXPECT_THAT(Detail(Read(R"({"a":[]})", 0)), HasSubstr("has a list for 'a'"));
  EXPECT_THAT(Detail(Read(R"({"__metadata__":{"k":1}})", 0)),
              HasSubstr("its metadata entry 'k' is the number 1, not a text"));
}

TEST(SafetensorsReader, HeadersMustBeJsonToTheirEnd) {
  const auto cut = Read(R"({"a":)", 0);
  EXPECT_THAT(Detail(cut), HasSubstr("not JSON"));
  EXPECT_EQ(cut.error().offset, 8U + 6U);
  EXPECT_THAT(Detail(Read("{}{}", 0)), HasSubstr("not JSON"));
  EXPECT_THAT(Detail(Read(std::string("{}\0x", 4), 0)), HasSubstr("zero byte"));
  EXPECT_THAT(Detail(Read("{\"\xff\":1}", 0)), HasSubstr("not JSON"));
  EXPECT_THAT(Detail(Read(" {}", 0)), HasSubstr("does not begin with {"));
  const std::string deep(100'000, '[');
  EXPECT_THAT(Detail(Read(R"({"a":{"x":)" + deep, 0)), HasSubstr("too deeply"));
}

TEST(SafetensorsReader, TheLengthOfTheHeaderMustBePossible) {
  EXPECT_THAT(Detail(ReadBytes("1234567")), HasSubstr("it has 7 bytes"));
  EXPECT_THAT(Detail(ReadBytes(Length(3) + "{}")),
              HasSubstr("its header should have 3 bytes, and after the length of the header 2"));
  EXPECT_THAT(Detail(ReadBytes(Length(100'000'001) + "{}")),
              HasSubstr("100000001 bytes; at most 100000000"));
  EXPECT_THAT(Detail(ReadBytes(Length(UINT64_MAX) + "{}")), HasSubstr("18446744073709551615"));
}

TEST(SafetensorsReader, EveryShorterFileIsRefused) {
  const std::string header = Object({Entry("a", "F32", "2,2", "0,16")});
  const std::string whole = Length(header.size()) + header + std::string(16, 'd');
  ASSERT_TRUE(ReadBytes(whole));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(Detail(ReadBytes(whole.substr(0, size))).empty()) << size;
  }
}

}  // namespace
}  // namespace fastpersist::layout
