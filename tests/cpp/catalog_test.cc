// SPDX-License-Identifier: Apache-2.0
// The catalog: whatever happened to the newest checkpoint, the next one is named as the newest
// complete one, and it is said what is wrong with the other.
#include "commit/catalog.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commit/manifest_json.h"
#include "fmt/format.h"
#include "testing/checkpoint_directory.h"
#include "testing/faulty_files.h"
#include "testing/temporary_directory.h"

namespace fastpersist::commit {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Listing;
using testing::MakeCheckpoint;
using testing::NewestStep;
using testing::OpenForWriting;
using testing::Operation;
using testing::ReadFile;
using testing::TemporaryDirectory;
using testing::WriteFile;

namespace fs = std::filesystem;

std::vector<CatalogEntry> CatalogOf(const std::string& path) {
  const auto root = Root::Open(path, Root::Access::kRead);
  EXPECT_TRUE(root);
  auto catalog = ReadCatalog(**root, file::RealFileOps());
  EXPECT_TRUE(catalog) << catalog.error().Message();
  return *std::move(catalog);
}

// A directory with steps 1 and 2, and something done to step 2.
class DamagedNewest : public ::testing::Test {
 protected:
  DamagedNewest() {
    const auto root = OpenForWriting(directory_.path());
    EXPECT_TRUE(MakeCheckpoint(*root, 1));
    EXPECT_TRUE(MakeCheckpoint(*root, 2));
  }
  [[nodiscard]] std::string In2(const std::string& name) const {
    return directory_ / ("step-00000002/" + name);
  }
  // What the catalog says about step 2 after step 1 was found to be the newest complete one.
  [[nodiscard]] CatalogEntry Judged() const {
    EXPECT_EQ(NewestStep(directory_.path()), 1U);
    for (const CatalogEntry& entry : CatalogOf(directory_.path())) {
      if (entry.name == "step-00000002") return entry;
    }
    ADD_FAILURE() << "step 2 is not listed";
    return {};
  }
  void ExpectDamaged(const std::string& reason) const {
    const CatalogEntry entry = Judged();
    EXPECT_EQ(entry.state, GenerationState::kDamaged);
    EXPECT_THAT(entry.reason, HasSubstr(reason));
    EXPECT_EQ(entry.step, 2U);
  }

  TemporaryDirectory directory_;
};

TEST_F(DamagedNewest, AMissingPartIsNamed) {
  fs::remove(In2("state.pt"));
  ExpectDamaged("'state.pt' is missing");
  EXPECT_THAT(Listing(directory_.path()),
              ElementsAre("2 step-00000002 damaged", "1 step-00000001 complete"));
}

TEST_F(DamagedNewest, AnEmptyPartIsNamed) {
  WriteFile(In2("state.pt"), "");
  ExpectDamaged("'state.pt' has 0 bytes instead of");
}

TEST_F(DamagedNewest, APartThatIsALinkOrADirectoryIsNoPart) {
  fs::rename(In2("state.pt"), In2("elsewhere"));
  fs::create_symlink("elsewhere", In2("state.pt"));
  ExpectDamaged("'state.pt' is no file");
  fs::remove(In2("state.pt"));
  fs::create_directory(In2("state.pt"));
  ExpectDamaged("'state.pt' is no file");
}

TEST_F(DamagedNewest, AMissingManifestMakesItUnfinished) {
  fs::remove(In2("manifest.json"));
  EXPECT_EQ(Judged().state, GenerationState::kUnfinished);
  EXPECT_THAT(Judged().reason, HasSubstr("no manifest"));
}

TEST_F(DamagedNewest, OnlyTemporaryNamesMakeItUnfinished) {
  fs::rename(In2("manifest.json"), In2("manifest.json.tmp"));
  EXPECT_EQ(Judged().state, GenerationState::kUnfinished);
  EXPECT_THAT(Judged().reason, HasSubstr("temporary name"));
}

TEST_F(DamagedNewest, ATruncatedManifestIsDamage) {
  const std::string text = ReadFile(In2("manifest.json"));
  WriteFile(In2("manifest.json"), text.substr(0, text.size() - 10));
  ExpectDamaged("manifest is damaged");
  EXPECT_EQ(Judged().sequence, 2U) << "it can still be read";
  WriteFile(In2("manifest.json"), "");
  ExpectDamaged("manifest is damaged");
  EXPECT_EQ(Judged().sequence, std::nullopt);
}

TEST_F(DamagedNewest, AFlippedBitInTheManifestIsDamage) {
  std::string text = ReadFile(In2("manifest.json"));
  const auto at = text.find("\"world_size\": 1");
  ASSERT_NE(at, std::string::npos);
  text[at + 14] = '3';
  WriteFile(In2("manifest.json"), text);
  ExpectDamaged("checksum is wrong");
}

TEST_F(DamagedNewest, AManifestThatIsNoFileIsDamage) {
  fs::remove(In2("manifest.json"));
  ASSERT_EQ(::mkfifo(In2("manifest.json").c_str(), 0666), 0);  // opening it must not wait
  ExpectDamaged("no regular file");
  fs::remove(In2("manifest.json"));
  fs::create_symlink("/etc/passwd", In2("manifest.json"));
  ExpectDamaged("symbolic link");
}

TEST_F(DamagedNewest, AManifestTooLargeToBeOneIsNotRead) {
  fs::resize_file(In2("manifest.json"), kMaxManifestBytes + 1);  // a hole
  ExpectDamaged("more than");
}

TEST_F(DamagedNewest, ANewerVersionIsNotCalledDamaged) {
  Json inner = Json::parse(ReadFile(In2("manifest.json")))["manifest"];
  inner["reader_version"] = 99;
  WriteFile(In2("manifest.json"), fmt::format(R"({{"crc32": "{:08x}", "manifest": {}}})",
                                              CanonicalCrc(inner), inner.dump()));
  EXPECT_EQ(Judged().state, GenerationState::kNewer);
  EXPECT_THAT(Judged().reason, HasSubstr("upgrade"));
  EXPECT_EQ(Judged().sequence, 2U);
}

TEST_F(DamagedNewest, ARetiredOneIsNeverComplete) {
  fs::copy(In2("manifest.json"), In2("retired.json"));  // the manifest is there as well
  EXPECT_EQ(Judged().state, GenerationState::kRetired);
  fs::remove(In2("owner.json"));
  EXPECT_EQ(Judged().state, GenerationState::kRetired);
}

TEST_F(DamagedNewest, AnUnreadableDiskBlockStandsInNobodysWay) {
  // The newest is not opened first: try every read and look for the one that hits it.
  bool hit = false;
  for (unsigned nth = 1;; ++nth) {
    const testing::FaultyFiles files(
        {{.kind = Operation::Kind::kRead, .system_errno = EIO, .nth = nth}});
    const auto root = Root::Open(directory_.path(), Root::Access::kRead);
    const auto catalog = ReadCatalog(**root, files);
    if (files.calls(Operation::Kind::kRead) < nth) break;
    ASSERT_TRUE(catalog);
    ASSERT_EQ(catalog->size(), 2U);
    unsigned complete = 0;
    for (const CatalogEntry& entry : *catalog) {
      if (entry.state == GenerationState::kComplete) {
        ++complete;
      } else {
        EXPECT_EQ(entry.state, GenerationState::kDamaged);
        EXPECT_THAT(entry.reason, HasSubstr("Input/output error"));
        hit = true;
      }
    }
    EXPECT_EQ(complete, 1U);
  }
  EXPECT_TRUE(hit);
}

TEST_F(DamagedNewest, WhatCannotBeKnownForOtherReasonsIsAnError) {
  // Restoring an older checkpoint because descriptors ran out would be a silent loss.
  const testing::FaultyFiles files(
      {{.kind = Operation::Kind::kOpenLeftover, .system_errno = EMFILE, .from_then_on = true}});
  const auto root = Root::Open(directory_.path(), Root::Access::kRead);
  const auto catalog = ReadCatalog(**root, files);
  ASSERT_FALSE(catalog);
  EXPECT_EQ(catalog.error().system_errno, EMFILE);
}

TEST(CatalogTest, ForeignDirectoriesAreListedOnlyWhenTheyLookLikeOurs) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(MakeCheckpoint(*OpenForWriting(directory.path()), 1));
  fs::create_directory(directory / "logs");
  fs::create_directory(directory / "step-00000009");
  WriteFile(directory / "step-00000009/weights.bin", "mine");
  WriteFile(directory / "step-00000008", "a file");
  fs::create_symlink("step-00000001", directory / "step-00000007");
  EXPECT_THAT(Listing(directory.path()),
              ElementsAre("1 step-00000001 complete", "- step-00000009 foreign"));
  WriteFile(directory / "step-00000009/owner.json", "{}");
  EXPECT_THAT(Listing(directory.path())[1], HasSubstr("foreign")) << "it does not say whose it is";
}

TEST(CatalogTest, ACopyUnderAnotherNameMakesTheOrderUncertain) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(MakeCheckpoint(*OpenForWriting(directory.path()), 1));
  fs::copy(directory / "step-00000001", directory / "best", fs::copy_options::recursive);
  const auto catalog = CatalogOf(directory.path());
  ASSERT_EQ(catalog.size(), 2U);
  for (const CatalogEntry& entry : catalog) {
    EXPECT_EQ(entry.state, GenerationState::kComplete);
    EXPECT_THAT(entry.reason, HasSubstr("same sequence number 1"));
  }
}

TEST(CatalogTest, ARootWithoutItsIdAndMovedElsewhereIsReadAllTheSame) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(MakeCheckpoint(*OpenForWriting(directory / "a"), 1));
  fs::remove(directory / "a/fastpersist-root.json");
  fs::remove(directory / "a/fastpersist.lock");
  fs::rename(directory / "a", directory / "b");
  EXPECT_EQ(NewestStep(directory / "b"), 1U);
}

TEST(CatalogTest, AnEmptyDirectoryHasNone) {
  const TemporaryDirectory directory;
  EXPECT_THAT(CatalogOf(directory.path()), IsEmpty());
}

TEST(CatalogTest, OneIsFoundByItsName) {
  const TemporaryDirectory directory;
  const auto root = OpenForWriting(directory.path());
  ASSERT_TRUE(MakeCheckpoint(*root, 1));
  const auto found = ReadCatalogEntry(*root, "step-00000001", file::RealFileOps());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->state, GenerationState::kComplete);
  for (const char* name : {"step-00000002", "..", "", "/", "step-00000001/../step-00000001"}) {
    const auto missing = ReadCatalogEntry(*root, name, file::RealFileOps());
    ASSERT_FALSE(missing) << name;
    EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  }
}

TEST(CatalogTest, NamesTellSteps) {
  EXPECT_EQ(StepOfName("step-00000200"), 200U);
  EXPECT_EQ(StepOfName("step-123456789012"), 123456789012U);
  EXPECT_EQ(StepOfName("step-00000200.g3f9a"), 200U);
  for (const char* name : {"step-200", "step-", "step-0000020x", "step-00000200.",
                           "step-00000200.g", "step-00000200.gxyz", "step-00000200.bak",
                           "Step-00000200", "step-99999999999999999999999"}) {
    EXPECT_EQ(StepOfName(name), std::nullopt) << name;
  }
}

}  // namespace
}  // namespace fastpersist::commit
