// SPDX-License-Identifier: Apache-2.0
// A checkpoint file as all readers see it: every byte of it damaged, the file cut at every length,
// archives with gaps. Whatever happens, wrong bytes are never taken for right ones.
#include "checkpoint/opened_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "layout/gather.h"
#include "testing/generation_file.h"
#include "testing/process_state.h"
#include "testing/seed.h"
#include "testing/temporary_directory.h"
#include "testing/torch_states.h"

namespace fastpersist::checkpoint {
namespace {

using layout::Contents;
using layout::StoredTensor;
using testing::ArchiveOf;
using testing::Between;
using testing::GenerationFile;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Random;
using testing::RecordsOfViews;
using testing::Seed;
using ::testing::SizeIs;
using testing::TemporaryDirectory;
using testing::WithGaps;
using testing::WriteFile;

const Options kBuffered{.direct = false};

std::string TextOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Everything that a reader would make of a file: name, type, sizes and elements of each tensor.
std::map<std::string, std::string> Meaning(const Contents& contents, const memory::Arena& arena) {
  std::map<std::string, std::string> meaning;
  for (const StoredTensor& tensor : contents.tensors) {
    std::vector<std::byte> elements(tensor.bytes);
    const std::uint64_t at = contents.storages[tensor.storage].offset + tensor.offset;
    layout::Gather(arena.memory().data() + at, tensor.shape, tensor.strides, tensor.item_size,
                   elements);
    meaning[tensor.name] =
        fmt::format("{} {} {}", tensor.dtype, fmt::join(tensor.shape, "x"), TextOf(elements));
  }
  for (const auto& value : contents.values) meaning[value.name] = value.text;
  return meaning;
}

class OpenedFileTest : public ::testing::Test {
 protected:
  // Two tensors share a storage, one is transposed, one empty.
  [[nodiscard]] std::string SmallFile(std::size_t bytes = 60) const {
    return ArchiveOf(RecordsOfViews(
        {GenerationFile(1, bytes + 600).substr(0, bytes), GenerationFile(2, 600).substr(0, 33), ""},
        {{.name = "wte", .shape = {static_cast<std::int64_t>(bytes)}, .strides = {1}},
         {.name = "turned", .offset = 6, .shape = {2, 5}, .strides = {1, 2}},
         {.name = "bias", .storage = 1, .shape = {33}, .strides = {1}},
         {.name = "none", .storage = 2, .shape = {0}, .strides = {1}}}));
  }

  std::shared_ptr<OpenedFile> Open(const std::string& content) const {
    WriteFile(path_, content);
    auto file = OpenedFile::Open(path_);
    EXPECT_TRUE(file) << file.error().Message();
    return file ? *file : nullptr;
  }

  // The whole file in an arena.
  static Result<std::map<std::string, std::string>> Load(OpenedFile& file,
                                                         const Options& options = {}) {
    ReadInfo info;
    auto arena = file.ReadAll(options, info);
    if (!arena) return std::unexpected(arena.error());
    return Meaning(*file.contents(), *arena);
  }

  const TemporaryDirectory directory_;
  const std::string path_ = directory_ / "model.pt";
};

TEST_F(OpenedFileTest, TheArenaMirrorsTheBodiesOfTheFile) {
  for (const std::size_t bytes : {60U, 4096U, 100'000U, 5'000'000U}) {
    const std::string content = SmallFile(bytes);
    const auto file = Open(content);
    ASSERT_NE(file, nullptr);
    for (const Options& options : {Options{}, kBuffered, Options{.block_bytes = 4096}}) {
      ReadInfo info;
      const auto arena = file->ReadAll(options, info);
      ASSERT_TRUE(arena) << arena.error().Message();
      EXPECT_EQ(arena->memory().size(), content.size());
      for (const auto& storage : file->contents()->storages) {
        EXPECT_TRUE(TextOf(arena->memory().subspan(storage.offset, storage.size)) ==
                    content.substr(storage.offset, storage.size))
            << storage.name << " of " << bytes;
      }
      EXPECT_EQ(info.in_place_bytes, 0U) << "fresh memory is read through staging";
    }
  }
}

TEST_F(OpenedFileTest, NoFlippedByteIsEverTakenForTheOriginal) {
  const Seed seed;
  Random random(seed.value());
  const std::string content = SmallFile();
  const auto original = Load(*Open(content), kBuffered);
  ASSERT_TRUE(original);
  ASSERT_THAT(*original, SizeIs(4));
  std::size_t opened = 0;
  std::size_t verified = 0;
  for (std::size_t at = 0; at < content.size(); ++at) {
    std::string damaged = content;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << Between(random, 0, 7)));
    WriteFile(path_, damaged);
    const auto file = OpenedFile::Open(path_);
    if (!file) {
      EXPECT_TRUE(file.error().code == ErrorCode::kCorrupt ||
                  file.error().code == ErrorCode::kUnsupportedFile)
          << at << ": " << file.error().Message();
      continue;
    }
    ++opened;
    const auto found = (*file)->Verify(kBuffered, {});
    ASSERT_TRUE(found) << "damage at " << at << " is no error: " << found.error().Message();
    const auto loaded = Load(**file, kBuffered);
    if (found->damages.empty()) {
      ++verified;
      ASSERT_TRUE(loaded) << at << ": Verify found nothing";
      EXPECT_TRUE(*loaded == *original) << "the byte at " << at << " changed something silently";
    } else {
      ASSERT_FALSE(loaded) << at << ": Verify found a damage";
      EXPECT_EQ(loaded.error().code, ErrorCode::kCorrupt);
      EXPECT_EQ(loaded.error().path, path_);
    }
  }
  EXPECT_GT(opened, 93U) << "flips in the bodies are found when they are read";
  EXPECT_LT(verified, opened);
}

TEST_F(OpenedFileTest, AFileThatIsCutAnywhereIsNotOpened) {
  const std::string content = SmallFile();
  const auto before = testing::OpenFiles();
  for (std::size_t length = 0; length < content.size(); ++length) {
    WriteFile(path_, content.substr(0, length));
    const auto file = OpenedFile::Open(path_);
    ASSERT_FALSE(file) << length;
    EXPECT_TRUE(file.error().code == ErrorCode::kCorrupt ||
                file.error().code == ErrorCode::kUnsupportedFile)
        << length << ": " << file.error().Message();
  }
  EXPECT_EQ(testing::OpenFiles(), before);
}

TEST_F(OpenedFileTest, ArchivesWithGapsAreReadAndVerified) {
  const std::string content = SmallFile();
  const auto original = Load(*Open(content));
  ASSERT_TRUE(original);
  // Gaps behind the pickle are seen when the file is opened, others when data is read.
  for (const char* const behind : {"", "data.pkl", "data/0", "data/1"}) {
    for (const std::uint64_t gap : {1U, 2U, 15U, 16U, 63U, 5000U, 200'000U}) {
      const std::string spread = WithGaps(content, gap, behind);
      for (const Options& options : {Options{}, kBuffered}) {
        const auto file = Open(spread);
        ASSERT_NE(file, nullptr);
        const auto loaded = Load(*file, options);
        ASSERT_TRUE(loaded) << gap << ": " << loaded.error().Message();
        EXPECT_TRUE(*loaded == *original) << gap;
        const auto found = Open(spread)->Verify(options, {});
        ASSERT_TRUE(found);
        EXPECT_THAT(found->damages, IsEmpty());
        EXPECT_EQ(found->checked_records, 6U);
      }
    }
  }
}

TEST_F(OpenedFileTest, ContentsThatWereHandedOutStayWhenBodiesAreLocated) {
  const auto file = Open(WithGaps(SmallFile(), 100, "data/0"));
  ASSERT_NE(file, nullptr);
  const auto before = file->contents();
  const std::uint64_t offset = before->storages[0].offset;
  ASSERT_TRUE(Load(*file));
  EXPECT_EQ(before->storages[0].offset, offset);
  EXPECT_NE(file->contents()->storages[0].offset, offset);
  const auto located = file->contents();
  ASSERT_TRUE(Load(*file));
  EXPECT_EQ(file->contents(), located) << "once is enough";
}

TEST_F(OpenedFileTest, VerifyListsEveryDamageWithItsName) {
  std::string content = SmallFile();
  const auto contents = Open(content)->contents();
  for (const std::size_t storage : {0U, 1U}) content[contents->storages[storage].offset + 3] ^= 1;
  const auto& header = contents->archive.records[contents->storages[1].record];
  const auto found = Open(content)->Verify({}, {});
  ASSERT_TRUE(found);
  ASSERT_THAT(found->damages, SizeIs(2));
  EXPECT_EQ(found->damages[0].entry, "wte");
  EXPECT_THAT(found->damages[0].detail, HasSubstr("and 1 more"));
  EXPECT_THAT(found->damages[0].detail, HasSubstr("data/0"));
  EXPECT_EQ(found->damages[1].entry, "bias");
  EXPECT_EQ(found->damages[1].offset, header.body_offset);
  EXPECT_EQ(found->damages[1].expected_crc, header.crc);
  EXPECT_NE(found->damages[1].found_crc, header.crc);
  EXPECT_EQ(found->checked_records, 6U) << "all records with a body";
  EXPECT_EQ(found->unchecked_records, 0U);
}

TEST_F(OpenedFileTest, VerifyGoesOnBehindAHeaderThatLeadsNowhere) {
  std::string content = SmallFile();
  const auto contents = Open(content)->contents();
  const auto& record = contents->archive.records[contents->storages[0].record];
  content[record.header_offset + 29] = '\x7F';  // the length of its extra fields
  content[contents->storages[1].offset] ^= 1;
  const auto found = Open(content)->Verify({}, {});
  ASSERT_TRUE(found) << found.error().Message();
  ASSERT_THAT(found->damages, SizeIs(2));
  EXPECT_THAT(found->damages[0].detail, HasSubstr("local header"));
  EXPECT_THAT(found->damages[0].detail, HasSubstr("data/0"));
  EXPECT_EQ(found->damages[1].entry, "bias");
}

TEST_F(OpenedFileTest, NoMoreThanAThousandDamagesAreListed) {
  const std::vector<std::string> storages(1200, std::string(8, 'x'));
  std::vector<testing::ViewOfStorage> views;
  for (std::uint32_t i = 0; i < storages.size(); ++i) {
    views.push_back({.name = fmt::format("t{}", i), .storage = i, .shape = {8}, .strides = {1}});
  }
  std::string content = ArchiveOf(RecordsOfViews(storages, views));
  const auto contents = Open(content)->contents();
  for (const auto& storage : contents->storages) content[storage.offset] = 'y';
  const auto found = Open(content)->Verify({}, {});
  ASSERT_TRUE(found);
  EXPECT_THAT(found->damages, SizeIs(1000));
  EXPECT_EQ(found->damages.back().entry, "t999");
}

TEST_F(OpenedFileTest, StoragesAreReadOneByOneAndOnlyTheyAreChecked) {
  std::string content = SmallFile();
  const auto contents = Open(content)->contents();
  content[contents->storages[0].offset] ^= 1;
  const auto file = Open(content);
  std::string memory(33, '\0');
  const auto deliver = [&](const Contents& now) {
    return std::vector<plan::Delivery>{
        {.range = {.begin = now.storages[1].offset, .end = now.storages[1].offset + 33},
         .memory = reinterpret_cast<std::byte*>(memory.data())}};
  };
  EXPECT_TRUE(file->ReadStorages(std::vector<std::uint32_t>{1}, deliver, {}));
  EXPECT_EQ(memory, content.substr(contents->storages[1].offset, 33));
  const auto none = [](const Contents&) { return std::vector<plan::Delivery>(); };
  const auto damaged = file->ReadStorages(std::vector<std::uint32_t>{0, 1}, none, {});
  ASSERT_FALSE(damaged);
  EXPECT_EQ(damaged.error().code, ErrorCode::kCorrupt);
  EXPECT_EQ(damaged.error().entry, "wte");
  EXPECT_TRUE(file->ReadStorages({}, none, {})) << "nothing of it";
}

TEST_F(OpenedFileTest, PartsOfStoragesAreReadWithoutAChecksum) {
  const std::string content = SmallFile(10'000);
  const auto file = Open(content);
  const std::uint64_t at = file->contents()->storages[0].offset;
  std::vector<std::string> memory{std::string(100, '\0'), std::string(1, '\0'),
                                  std::string(50, '\0'), std::string(3000, '\0')};
  const std::uint64_t begins[] = {at + 5, at + 20, at + 80, at + 7000};
  std::vector<plan::Delivery> deliveries;
  for (std::size_t i = 0; i < memory.size(); ++i) {
    deliveries.push_back({.range = {.begin = begins[i], .end = begins[i] + memory[i].size()},
                          .memory = reinterpret_cast<std::byte*>(memory[i].data())});
  }
  const auto deliver = [&](const Contents&) { return deliveries; };
  const auto info = file->ReadUnchecked(std::vector<std::uint32_t>{0}, deliver, {});
  ASSERT_TRUE(info) << info.error().Message();
  for (std::size_t i = 0; i < memory.size(); ++i) {
    EXPECT_TRUE(memory[i] == content.substr(begins[i], memory[i].size())) << i;
  }
  const auto none = [](const Contents&) { return std::vector<plan::Delivery>(); };
  EXPECT_TRUE(file->ReadUnchecked({}, none, {}));
}

TEST_F(OpenedFileTest, ProgressGrowsAndKnowsTheWhole) {
  const std::string content = SmallFile(3'000'000);
  const auto file = Open(content);
  std::uint64_t last = 0;
  std::size_t calls = 0;
  const Progress progress = [&](std::uint64_t done, std::uint64_t all) {
    EXPECT_GT(done, last);
    EXPECT_LE(done, all);
    EXPECT_EQ(all, content.size());
    last = done;
    ++calls;
  };
  ASSERT_TRUE(file->Verify({.block_bytes = 65536}, progress));
  EXPECT_GT(calls, 40U);
  last = 0;
  ReadInfo info;
  ASSERT_TRUE(file->ReadAll({.block_bytes = 65536}, info, progress));
}

}  // namespace
}  // namespace fastpersist::checkpoint
