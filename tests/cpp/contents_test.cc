// SPDX-License-Identifier: Apache-2.0
#include "layout/contents.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "fastpersist/state.h"
#include "layout/dict_of_tensors.h"
#include "layout/torch_container.h"
#include "testing/memory_source.h"
#include "testing/streams.h"

namespace fastpersist::layout {
namespace {

using fastpersist::testing::MemorySource;
using fastpersist::testing::RenderPlainly;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kLength16("\x10\0\0\0\0\0\0\0", 8);

Result<Contents> Read(const std::string& bytes, const std::string& name = "m.pt") {
  return ReadContents(MemorySource(bytes, name));
}

std::string Detail(const Result<Contents>& contents) {
  if (contents) {
    ADD_FAILURE() << "was read";
    return {};
  }
  EXPECT_EQ(contents.error().operation, "read");
  return contents.error().detail;
}

// A file that Save would write, with one storage for two of its tensors.
std::string TorchFile(const std::vector<float>& values) {
  State state;
  EXPECT_TRUE(state.Add("w", {.data = values.data(),
                              .dtype = DType::kFloat32,
                              .shape = {2, static_cast<std::int64_t>(values.size() / 2)}}));
  EXPECT_TRUE(state.Add("flat", {.data = values.data(),
                                 .dtype = DType::kFloat32,
                                 .shape = {static_cast<std::int64_t>(values.size())}}));
  EXPECT_TRUE(state.Add("other", {.data = values.data(), .dtype = DType::kUint8, .shape = {3}}));
  std::string pickle;
  const auto records = DictOfTensorsRecords(state, 64, pickle);
  const auto stream = LayOutTorchContainer(records, {.prefix = "m"});
  EXPECT_TRUE(stream);
  const auto bytes = RenderPlainly(*stream).bytes;
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(Contents, AreThoseOfTheStateThatWasSaved) {
  const std::vector<float> values{1, 2, 3, 4, 5, 6};
  const std::string file = TorchFile(values);
  const auto read = Read(file);
  ASSERT_TRUE(read) << read.error().Message();
  EXPECT_EQ(read->kind, Contents::Kind::kTorch);
  ASSERT_EQ(read->tensors.size(), 3U);
  EXPECT_EQ(read->tensors[0].name, "w");
  EXPECT_EQ(read->tensors[1].name, "flat");
  EXPECT_EQ(read->tensors[2].dtype, "uint8");
  EXPECT_EQ(read->tensors[0].storage, read->tensors[1].storage);
  const StoredStorage& storage = read->storages[read->tensors[0].storage];
  const std::string stored(reinterpret_cast<const char*>(values.data()), 24);
  EXPECT_EQ(file.substr(storage.offset, storage.size), stored);
}

TEST(Contents, OfSafetensorsFilesAreToldByTheirFirstBytes) {
  const auto read = Read(kLength16 + "{}              ", "anything");
  ASSERT_TRUE(read) << read.error().Message();
  EXPECT_EQ(read->kind, Contents::Kind::kSafetensors);
  EXPECT_THAT(Detail(Read(kLength16 + "{\"a\":           ")), HasSubstr("not JSON"));
}

TEST(Contents, DamagedSafetensorsFilesAreToldByTheirName) {
  EXPECT_THAT(Detail(Read(kLength16 + "{}", "m.safetensors")),
              HasSubstr("should have 16 bytes, and after the length of the header 2 bytes"));
  EXPECT_THAT(Detail(Read("abc", "m.safetensors")), HasSubstr("it has 3 bytes"));
  EXPECT_THAT(Detail(Read(kLength16 + "x               ", "m.safetensors")),
              HasSubstr("does not begin with {"));
  // Of another name it could be anything.
  EXPECT_THAT(Detail(Read(kLength16 + "{}", "m.pt")), Not(HasSubstr("should have 16 bytes")));
}

TEST(Contents, OtherFilesAreDescribedWhateverTheirName) {
  for (const char* name : {"m.pt", "m.safetensors"}) {
    EXPECT_THAT(Detail(Read("", name)), HasSubstr("is empty"));
    EXPECT_THAT(Detail(Read("version https://git-lfs.github.com/spec/v1\n", name)),
                HasSubstr("Git LFS"));
    EXPECT_THAT(Detail(Read("\x80\x02}q\x01.0123456789", name)), HasSubstr("is a pickle"));
    EXPECT_THAT(Detail(Read(std::string(5000, '\0'), name)), HasSubstr("zero"));
  }
}

TEST(Contents, EveryShorterTorchFileIsRefused) {
  const std::string whole = TorchFile({1, 2, 3, 4});
  ASSERT_TRUE(Read(whole));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const auto read = Read(whole.substr(0, size));
    ASSERT_FALSE(read) << size;
    ASSERT_THAT(read.error().code, AnyOf(ErrorCode::kCorrupt, ErrorCode::kUnsupportedFile)) << size;
    ASSERT_FALSE(read.error().detail.empty()) << size;
  }
}

TEST(Contents, StoragesTakeTheOffsetsOfTheirRecords) {
  auto read = Read(TorchFile({1, 2, 3, 4}));
  ASSERT_TRUE(read);
  const std::uint64_t before = read->storages[0].offset;
  read->archive.records[read->storages[0].record].body_offset += 7;
  AdoptBodyOffsets(*read);
  EXPECT_EQ(read->storages[0].offset, before + 7);
}

TEST(Contents, AFailingSourceIsAnErrorOfTheStorage) {
  class Broken final : public ByteSource {
   public:
    [[nodiscard]] const std::string& name() const override { return name_; }
    [[nodiscard]] std::uint64_t size() const override { return 1000; }
    [[nodiscard]] Result<void> Read(std::uint64_t offset,
                                    std::span<std::byte> /*out*/) const override {
      return std::unexpected(Error{.code = ErrorCode::kStorage,
                                   .operation = "read",
                                   .path = name_,
                                   .offset = offset,
                                   .system_errno = 5});
    }

   private:
    std::string name_ = "broken.pt";
  };
  const auto read = ReadContents(Broken());
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, ErrorCode::kStorage);
  EXPECT_EQ(read.error().system_errno, 5);
}

}  // namespace
}  // namespace fastpersist::layout
