// SPDX-License-Identifier: Apache-2.0
// The expected ids were written by torch 2.13.
#include "layout/serialization_id.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "testing/streams.h"

namespace fastpersist::layout {
namespace {

RecordDigest DigestOf(std::string_view body) {
  const auto bytes = std::as_bytes(std::span(body));
  RecordDigest digest{.crc = fastpersist::testing::PlainCrc32(bytes)};
  for (std::size_t i = 0; i < std::min(bytes.size(), digest.head.size()); ++i) {
    digest.head[i] = bytes[i];
  }
  return digest;
}

std::uint64_t HashOf(const std::vector<std::string_view>& bodies) {
  ChecksumHash hash;
  for (const std::string_view body : bodies) hash.Add(body.size(), DigestOf(body));
  return hash.value();
}

TEST(SerializationId, HasFortyDigits) {
  EXPECT_EQ(FormatSerializationId(0, 0), std::string(40, '0'));
  EXPECT_EQ(FormatSerializationId(~std::uint64_t{0}, 1),
            "1844674407370955161500000000000000000001");
  EXPECT_EQ(FormatSerializationId(1, 2).size(), kSerializationIdLength);
}

TEST(SerializationId, HashesTheNamesAsTorchDoes) {
  EXPECT_EQ(HashRecordNames(std::vector<std::string_view>{
                "data.pkl", ".format_version", ".storage_alignment", "byteorder", "version"}),
            2908468677762923104U);
  EXPECT_EQ(
      HashRecordNames(std::vector<std::string_view>{
          "data.pkl", ".format_version", ".storage_alignment", "byteorder", "data/0", "version"}),
      15728199511854643026U);
  std::vector<std::string> many{"data.pkl", ".format_version", ".storage_alignment", "byteorder"};
  for (int i = 0; i < 13; ++i) many.push_back("data/" + std::to_string(i));
  many.emplace_back("version");
  EXPECT_EQ(HashRecordNames(std::vector<std::string_view>(many.begin(), many.end())),
            6903490997831443750U);
}

TEST(SerializationId, HashesTheChecksumsAsTorchDoes) {
  // The file of torch.save({}, ...).
  const std::string_view pickle("\x80\x02}q\0.", 6);
  EXPECT_EQ(HashOf({pickle, "1", "64", "little", "3\n"}), 103495851195097541U);
}

TEST(SerializationId, TakesABodyThatBeginsLikeADescriptorForOne) {
  const auto combine = [](std::uint64_t seed, std::uint64_t value) {
    return seed ^ (value + 0x9e3779b9U + (seed << 6U) + (seed >> 2U));
  };
  const auto crc = [](std::string_view body) { return DigestOf(body).crc; };
  EXPECT_EQ(HashOf({"PK\x07\x08"
                    "abcdefgh"}),
            combine(combine(0, 0x64636261), crc("PK\x07\x08"
                                                "abcdefgh")));
  EXPECT_EQ(HashOf({"PK\x07\x08"
                    "abcd"}),
            combine(combine(0, 0x64636261), crc("PK\x07\x08"
                                                "abcd")));
  EXPECT_EQ(HashOf({"PK\x07\x08"
                    "abc"}),
            combine(0, crc("PK\x07\x08"
                           "abc")))
      << "too short";
  EXPECT_EQ(HashOf({"PK\x07\x09"
                    "abcd"}),
            combine(0, crc("PK\x07\x09"
                           "abcd")));
}

}  // namespace
}  // namespace fastpersist::layout
