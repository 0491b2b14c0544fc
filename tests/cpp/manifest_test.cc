// SPDX-License-Identifier: Apache-2.0
// Manifests: what is written is read back, damage is found, and nothing hostile is believed.
#include "commit/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "commit/manifest_json.h"
#include "fmt/format.h"
#include "testing/seed.h"

namespace fastpersist::commit {
namespace {

using ::testing::HasSubstr;

Manifest Example() {
  return {
      .library = "fastpersist test",
      .created = "2025-01-31T12:00:00Z",
      .job = "0123",
      .generation = "step-00000200",
      .step = 200,
      .sequence = 7,
      .streams =
          {{.name = "state.pt",
            .format = "torch",
            .size = 300,
            .crc = 0x89abcdef,
            .record_crcs = {1, 0xffffffff},
            .parts = {{.root = "aa", .file = "state.pt.part-000-of-002", .length = 100, .crc = 5},
                      {.root = "bb",
                       .file = "state.pt.part-001-of-002",
                       .offset = 100,
                       .length = 200,
                       .crc = 6}}},
           {.name = "rank-00000.pt",
            .format = "torch",
            .crc = 0,
            .parts = {{.root = "aa", .file = "rank-00000.pt"}}}},
      .metadata = R"({"z": 1.5, "a": 123456789012345678901234567890, "ü": [null]})"};
}

// The text around an inner object, with the checksum that it needs.
std::string Wrapped(const Json& inner) {
  return fmt::format(R"({{"crc32": "{:08x}", "manifest": {}}})", CanonicalCrc(inner), inner.dump());
}

Json Inner(const Manifest& manifest) { return Json::parse(ToJson(manifest))["manifest"]; }

// Why a manifest is refused that was changed in this way, its checksum made to fit.
std::string Refusal(const std::function<void(Json&)>& change) {
  Json inner = Inner(Example());
  change(inner);
  const auto parsed = ParseManifest(Wrapped(inner), "/m/manifest.json");
  if (parsed) return "accepted";
  EXPECT_EQ(parsed.error().code, ErrorCode::kCorrupt);
  EXPECT_EQ(parsed.error().path, "/m/manifest.json");
  return parsed.error().detail;
}

TEST(ManifestTest, EverythingIsReadBack) {
  const Manifest written = Example();
  ASSERT_TRUE(CheckManifest(written));
  const auto read = ParseManifest(ToJson(written), "");
  ASSERT_TRUE(read) << read.error().Message();
  EXPECT_EQ(ToJson(*read), ToJson(written));
  EXPECT_EQ(read->metadata, written.metadata);
  EXPECT_EQ(read->sequence, 7U);
  EXPECT_EQ(read->step, 200U);
  ASSERT_EQ(read->streams.size(), 2U);
  EXPECT_EQ(read->streams[0].crc, 0x89abcdefU);
  EXPECT_THAT(read->streams[0].record_crcs, ::testing::ElementsAre(1U, 0xffffffffU));
  EXPECT_EQ(read->streams[0].parts[1].root, "bb");
  EXPECT_EQ(read->streams[0].parts[1].offset, 100U);
}

TEST(ManifestTest, ItIsJsonThatAPersonCanRead) {
  const std::string text = ToJson(Example());
  EXPECT_TRUE(Json::accept(text));
  EXPECT_THAT(text, HasSubstr("\n  \"step\": 200,\n"));
  EXPECT_THAT(text, HasSubstr("\"crc32\":\"89abcdef\""));
}

TEST(ManifestTest, EveryTruncationIsDamage) {
  const std::string text = ToJson(Example());
  // The last byte is the newline.
  for (std::size_t length = 0; length + 1 < text.size(); ++length) {
    const auto parsed = ParseManifest(text.substr(0, length), "");
    ASSERT_FALSE(parsed) << length;
    ASSERT_EQ(parsed.error().code, ErrorCode::kCorrupt) << length;
  }
}

TEST(ManifestTest, NoFlippedBitChangesWhatIsRead) {
  const std::string text = ToJson(Example());
  const std::string meaning = ToJson(*ParseManifest(text, ""));
  for (std::size_t at = 0; at < text.size(); ++at) {
    for (unsigned bit = 0; bit < 8; ++bit) {
      std::string flipped = text;
      flipped[at] = static_cast<char>(static_cast<unsigned char>(flipped[at]) ^ (1U << bit));
      const auto parsed = ParseManifest(flipped, "");
      // White space may become other white space, and a hexadecimal digit upper case.
      if (parsed) {
        ASSERT_EQ(ToJson(*parsed), meaning) << at << " bit " << bit;
      }
    }
  }
}

TEST(ManifestTest, RandomBytesAreDamageAndNothingElse) {
  const testing::Seed seed;
  testing::Random random(seed.value());
  const std::string text = ToJson(Example());
  for (int i = 0; i < 3000; ++i) {
    std::string mutated = text;
    for (int j = 0; j < 4; ++j) {
      const auto at = testing::Between(random, 0, mutated.size() - 1);
      if (testing::OnceIn(random, 2)) {
        mutated[at] = static_cast<char>(testing::Between(random, 0, 255));
      } else {
        mutated.insert(at, mutated.substr(testing::Between(random, 0, mutated.size() - 1), 9));
      }
    }
    const auto parsed = ParseManifest(mutated, "");
    if (parsed) {
      ASSERT_EQ(ToJson(*parsed), text);
    }
  }
}

TEST(ManifestTest, ANewerManifestIsNotCalledDamaged) {
  Json inner = Json::object();
  inner["reader_version"] = kReaderVersion + 1;  // and nothing else is as it is here
  const auto parsed = ParseManifest(Wrapped(inner), "");
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().code, ErrorCode::kUnsupportedFile);
  EXPECT_THAT(parsed.error().Message(), HasSubstr("newer version"));
  EXPECT_THAT(parsed.error().advice, HasSubstr("upgrade"));
}

TEST(ManifestTest, ANewerWriterThatOldReadersUnderstandIsRead) {
  Json inner = Inner(Example());
  inner["version"] = 9;
  inner["colour"] = "blue";
  inner["streams"][0]["parts"][0]["mirror"] = true;
  const auto parsed = ParseManifest(Wrapped(inner), "");
  ASSERT_TRUE(parsed) << parsed.error().Message();
  EXPECT_EQ(parsed->version, 9U);
}

TEST(ManifestTest, NamesThatLeadElsewhereAreRefused) {
  const std::vector<std::string> names{"/etc/passwd",
                                       "..",
                                       ".",
                                       "",
                                       "a/b",
                                       "../state.pt",
                                       "a\n",
                                       "a\x7f",
                                       std::string("a\0b", 3),
                                       std::string(256, 'a')};
  for (const std::string& name : names) {
    EXPECT_FALSE(IsPlainName(name));
    EXPECT_THAT(Refusal([&](Json& m) { m["streams"][0]["parts"][0]["file"] = name; }),
                HasSubstr("streams[0].parts[0].file"));
    EXPECT_THAT(Refusal([&](Json& m) { m["streams"][0]["name"] = name; }),
                HasSubstr("streams[0].name"));
    EXPECT_THAT(Refusal([&](Json& m) { m["generation"] = name; }), HasSubstr("generation"));
    if (!name.empty()) {
      EXPECT_THAT(Refusal([&](Json& m) { m["streams"][0]["parts"][0]["root"] = name; }),
                  HasSubstr("root"));
    }
  }
  for (const char* name : {"owner.json", "manifest.json", "retired.json", "manifest.json.tmp"}) {
    EXPECT_THAT(Refusal([&](Json& m) { m["streams"][0]["parts"][0]["file"] = name; }),
                HasSubstr("taken"));
  }
}

TEST(ManifestTest, PartsMustMakeUpTheStream) {
  const auto part = [](Json& m, std::size_t i) -> Json& { return m["streams"][0]["parts"][i]; };
  const std::string gaps = "without gaps";
  EXPECT_THAT(Refusal([&](Json& m) { part(m, 0)["length"] = 99; }), HasSubstr(gaps));
  EXPECT_THAT(Refusal([&](Json& m) { part(m, 0)["length"] = 101; }), HasSubstr(gaps));
  EXPECT_THAT(Refusal([&](Json& m) { part(m, 0)["offset"] = 1; }), HasSubstr(gaps));
  EXPECT_THAT(Refusal([&](Json& m) { m["streams"][0]["size"] = 301; }), HasSubstr(gaps));
  EXPECT_THAT(Refusal([&](Json& m) { m["streams"][0]["parts"] = Json::array(); }), HasSubstr(gaps));
  EXPECT_THAT(Refusal([&](Json& m) { std::swap(part(m, 0), part(m, 1)); }), HasSubstr(gaps));
  // Sums that wrap around a 64-bit number.
  EXPECT_THAT(Refusal([&](Json& m) {
                part(m, 0)["length"] = kMaxNumber;
                part(m, 1)["offset"] = kMaxNumber;
                part(m, 1)["length"] = kMaxNumber;
              }),
              HasSubstr(gaps));
  EXPECT_THAT(
      Refusal([&](Json& m) { part(m, 1)["file"] = part(m, 0)["file"], part(m, 1)["root"] = "aa"; }),
      HasSubstr("twice"));
  EXPECT_THAT(Refusal([&](Json& m) { m["streams"][1]["name"] = "state.pt"; }), HasSubstr("twice"));
  EXPECT_THAT(Refusal([&](Json& m) { m["streams"][1]["crc32"] = "00000001"; }),
              HasSubstr("only part"));
}

TEST(ManifestTest, ValuesOfTheWrongKindAreRefused) {
  const std::vector<Json> wrong{nullptr,       -1, 1.5, "1", true, Json::array(), Json::object(),
                                kMaxNumber + 1};
  for (const char* key : {"step", "sequence", "world_size", "version", "reader_version"}) {
    EXPECT_THAT(Refusal([&](Json& m) { m.erase(key); }), HasSubstr(key));
    for (const Json& value : wrong) {
      EXPECT_THAT(Refusal([&](Json& m) { m[key] = value; }), HasSubstr(key)) << value;
    }
  }
  for (const char* key : {"library", "created", "job", "generation", "metadata", "streams"}) {
    EXPECT_THAT(Refusal([&](Json& m) { m.erase(key); }), HasSubstr(key));
    EXPECT_THAT(Refusal([&](Json& m) { m[key] = 3; }), HasSubstr(key));
  }
  for (const char* crc : {"", "123", "0123456g", "0x123456", "-1234567", "123456789"}) {
    EXPECT_THAT(Refusal([&](Json& m) { m["streams"][0]["crc32"] = crc; }), HasSubstr("checksum"));
    EXPECT_THAT(Refusal([&](Json& m) { m["streams"][0]["record_crc32s"][1] = crc; }),
                HasSubstr("checksum"));
  }
}

TEST(ManifestTest, MetadataAreAnObjectOrRefused) {
  for (const char* text : {"", "3", "[]", "{", "{\"a\": NaN}", "null", "{} {}", "\"{}\""}) {
    EXPECT_THAT(Refusal([&](Json& m) { m["metadata"] = text; }), HasSubstr("metadata")) << text;
  }
  Manifest manifest = Example();
  manifest.metadata = "{\"a\": \"\xff\"}";  // no UTF-8
  const auto checked = CheckManifest(manifest);
  ASSERT_FALSE(checked);
  EXPECT_EQ(checked.error().code, ErrorCode::kInvalidArgument);
  manifest.metadata = " \n{\"a\": 1}\n";
  EXPECT_TRUE(CheckManifest(manifest));
}

TEST(ManifestTest, DepthAndSizeAreBoundedBeforeAnythingIsBuilt) {
  const std::string deep(1'000'000, '[');
  EXPECT_FALSE(ParseManifest(deep, ""));
  EXPECT_FALSE(ParseManifest("{\"manifest\": " + deep, ""));
  Manifest manifest = Example();
  manifest.metadata = "{\"a\": " + std::string(100'000, '[') + std::string(100'000, ']') + "}";
  EXPECT_FALSE(CheckManifest(manifest));
  std::string wide = "{\"crc32\": \"00000000\", \"manifest\": {\"a\": [0";
  for (int i = 0; i < 5'000'000; ++i) wide += ",0";
  EXPECT_FALSE(ParseManifest(wide + "]}}", ""));
}

TEST(ManifestTest, AHundredThousandRecordsAreNoProblem) {
  Manifest manifest = Example();
  manifest.streams[0].record_crcs.assign(100'000, 0xdeadbeef);
  const auto parsed = ParseManifest(ToJson(manifest), "");
  ASSERT_TRUE(parsed) << parsed.error().Message();
  EXPECT_EQ(parsed->streams[0].record_crcs.size(), 100'000U);
}

TEST(ManifestTest, TheSequenceNumberIsFoundInDamagedText) {
  Manifest manifest = Example();
  manifest.job = R"("sequence": 99,)";  // escaped on disk
  const std::string text = ToJson(manifest);
  EXPECT_EQ(FindSequence(text), 7U);
  EXPECT_EQ(FindSequence(text.substr(0, text.size() / 2)), 7U);
  EXPECT_EQ(FindSequence("..\"sequence\":12}"), 12U);
  EXPECT_EQ(FindSequence("\"sequence\": 12"), std::nullopt) << "digits may be missing";
  EXPECT_EQ(FindSequence("\"sequence\": -1,"), std::nullopt);
  EXPECT_EQ(FindSequence("\"sequence\": 9223372036854775807,"), std::nullopt);
  EXPECT_EQ(FindSequence("\"sequence\": 99999999999999999999999,"), std::nullopt);
  EXPECT_EQ(FindSequence(""), std::nullopt);
}

TEST(ManifestTest, NamesOfPartsAreThoseOfCheckpointsOnly) {
  for (const char* name : {"state.pt", "state-g0.pt", "rank-00003.pt", "state.pt.part-000-of-004",
                           "rank-00003.pt.part-0123-of-1000", "state-g12.pt.part-001-of-002"}) {
    EXPECT_TRUE(IsPartName(name)) << name;
  }
  for (const char* name : {"", "state", "states.pt", "state.pt2", "state.pt.bak", "rank-.pt",
                           "rank-1.pt.part-0-of-1", "state.pt.part-000-of-", "notes.txt",
                           "state-g.pt", "xstate.pt", "state.pt.part-000-of-004x"}) {
    EXPECT_FALSE(IsPartName(name)) << name;
  }
}

}  // namespace
}  // namespace fastpersist::commit
