// SPDX-License-Identifier: Apache-2.0
// The expected headers and checksums are those of files that safetensors 0.8 wrote.
#include "layout/safetensors.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32.h"
#include "testing/streams.h"

namespace fastpersist::layout {
namespace {

using fastpersist::testing::RenderPlainly;
using ::testing::HasSubstr;
using Metadata = std::map<std::string, std::string>;

struct File {
  std::string header;
  std::string sum;
};

File FileOf(std::vector<SafetensorsEntry> entries, const Metadata& metadata = {}) {
  const auto stream = LayOutSafetensors(std::move(entries), metadata);
  EXPECT_TRUE(stream) << stream.error().Message();
  const auto bytes = RenderPlainly(*stream).bytes;
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < 8; ++i) {
    length |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  }
  EXPECT_EQ(length % 8, 0U);
  return {.header = {reinterpret_cast<const char*>(bytes.data()) + 8, length},
          .sum = fmt::format("{} bytes, CRC {:08x}", bytes.size(), base::Crc32(bytes))};
}

template <class T>
SafetensorsEntry Entry(const std::string& name, const std::string& dtype,
                       const std::vector<std::int64_t>& shape, const std::vector<T>& values) {
  return {.name = name, .dtype = dtype, .shape = shape, .body = std::as_bytes(std::span(values))};
}

std::string RefusalOf(std::vector<SafetensorsEntry> entries, const Metadata& metadata = {}) {
  const auto stream = LayOutSafetensors(std::move(entries), metadata);
  EXPECT_FALSE(stream);
  if (stream) return "";
  EXPECT_EQ(stream.error().code, ErrorCode::kUnsupportedState);
  return stream.error().Message();
}

TEST(Safetensors, AnEmptyStateIsAnEmptyHeader) {
  EXPECT_EQ(FileOf({}).header, "{}      ");
  EXPECT_EQ(FileOf({}).sum, "16 bytes, CRC 13d52fb1");
}

TEST(Safetensors, MetadataComesFirst) {
  const File file = FileOf({}, {{"format", "pt"}});
  EXPECT_EQ(file.header, R"({"__metadata__":{"format":"pt"}})");
  EXPECT_EQ(file.sum, "40 bytes, CRC 0386fa6a");
}

TEST(Safetensors, TextIsEscapedAsThePackageDoesIt) {
  const std::vector<float> values{0, 1, 2, 3, 4, 5};
  const File one = FileOf({Entry("w", "F32", {2, 3}, values)}, {{"a\"\\\n\x01", "\u00e9/\x7f"}});
  EXPECT_EQ(one.sum, "136 bytes, CRC 64af83e6") << one.header;
  const std::string name("q\"\\/\b\f\n\r\t\0\x1f\x7f\u00e9\U0001F600 ", 19);
  const File escaped = FileOf({Entry(name, "U8", {1}, std::vector<std::uint8_t>{1})});
  EXPECT_EQ(escaped.sum, "97 bytes, CRC c464e84a") << escaped.header;
}

TEST(Safetensors, OrdersByTypeDescendingAndNameAscending) {
  const std::vector<std::uint8_t> ones8(2, 1);
  const std::vector<std::int16_t> ones16(2, 1);
  const std::vector<std::uint16_t> half_ones(2, 0x3C00);
  const std::vector<std::uint16_t> bfloat_ones(2, 0x3F80);
  const std::vector<std::int32_t> ones32(2, 1);
  const std::vector<float> float_ones(2, 1);
  const std::vector<double> double_ones(2, 1);
  const std::vector<std::int64_t> ones64(2, 1);
  const std::vector<float> complex_ones{1, 0, 1, 0};
  const std::vector<float> two{2};
  const std::vector<float> three{3};
  const std::vector<float> four{4};
  std::vector<SafetensorsEntry> entries{
      Entry("bool", "BOOL", {2}, ones8),
      Entry("u8", "U8", {2}, ones8),
      Entry("i8", "I8", {2}, ones8),
      Entry("i16", "I16", {2}, ones16),
      Entry("f16", "F16", {2}, half_ones),
      Entry("bf16", "BF16", {2}, bfloat_ones),
      Entry("i32", "I32", {2}, ones32),
      Entry("f32", "F32", {2}, float_ones),
      Entry("f64", "F64", {2}, double_ones),
      Entry("i64", "I64", {2}, ones64),
      Entry("c64", "C64", {2}, complex_ones),
      Entry("a", "F32", {1}, two),
      Entry("b", "F32", {1}, three),
      Entry("scalar", "F32", {}, four),
      Entry("none", "F32", {0, 3}, std::vector<float>{}),
  };
  EXPECT_EQ(FileOf(entries).sum, "958 bytes, CRC 157aab7e") << FileOf(entries).header;
  std::ranges::reverse(entries);
  EXPECT_EQ(FileOf(entries).sum, "958 bytes, CRC 157aab7e");
}

TEST(Safetensors, SeveralMetadataKeysAreSorted) {
  EXPECT_EQ(FileOf({}, {{"b", "2"}, {"a", "1"}, {"c", "3"}}).header.substr(0, 45),
            R"({"__metadata__":{"a":"1","b":"2","c":"3"}}   )");
}

TEST(Safetensors, BodiesAreReferredToNotCopied) {
  const std::vector<float> values(1000);
  const auto stream = LayOutSafetensors({Entry("w", "F32", {1000}, values)}, {});
  ASSERT_TRUE(stream);
  const Extent& body = stream->extents().back();
  EXPECT_EQ(body.kind, Extent::Kind::kMemory);
  EXPECT_EQ(body.bytes, reinterpret_cast<const std::byte*>(values.data()));
  EXPECT_EQ(stream->record_count(), 1U);
  EXPECT_EQ(stream->late(), nullptr);
}

TEST(Safetensors, RefusesWhatTheFormatCannotHoldAndNamesIt) {
  const std::vector<float> values(1);
  const auto entry = [&](const std::string& name, const std::string& dtype = "F32") {
    return Entry(name, dtype, {1}, values);
  };
  EXPECT_THAT(RefusalOf({entry("ok"), entry("odd", "C128")}), HasSubstr("'odd' has type 'C128'"));
  EXPECT_THAT(RefusalOf({entry("odd", "")}), HasSubstr("'odd'"));
  EXPECT_THAT(RefusalOf({entry("__metadata__")}), HasSubstr("'__metadata__' is reserved"));
  EXPECT_THAT(RefusalOf({entry("a"), entry("b"), entry("a")}), HasSubstr("named 'a'"));
  EXPECT_THAT(RefusalOf({entry("a"), entry("a", "F64")}), HasSubstr("named 'a'"));
  EXPECT_THAT(RefusalOf({entry("\xff")}), HasSubstr("not UTF-8"));
  EXPECT_THAT(RefusalOf({}, {{"key", "\xff"}}), HasSubstr("not UTF-8"));
}

TEST(Safetensors, RefusesAHeaderThatThePackageWouldNotRead) {
  // {"n...n":{"dtype":"F32","shape":[],"data_offsets":[0,0]}} is 52 bytes longer than the name.
  const auto with_name = [](std::size_t length) {
    return LayOutSafetensors({{.name = std::string(length, 'n'), .dtype = "F32"}}, {});
  };
  EXPECT_TRUE(with_name(100'000'000 - 52));
  const auto refused = with_name(100'000'000 - 51);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupportedState);
  EXPECT_THAT(refused.error().Message(), HasSubstr("100000000"));
}

}  // namespace
}  // namespace fastpersist::layout
