// SPDX-License-Identifier: Apache-2.0
// The public reading interface: Open, File::Read, File::Verify.
#include "fastpersist/file.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fastpersist/save.h"
#include "testing/aligned_memory.h"
#include "testing/generation_file.h"
#include "testing/process_state.h"
#include "testing/seed.h"
#include "testing/temporary_directory.h"
#include "testing/torch_states.h"

namespace fastpersist {
namespace {

using ::testing::AllOf;
using testing::ArchiveOf;
using testing::Between;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Random;
using testing::RecordsOfViews;
using testing::Seed;
using ::testing::SizeIs;
using testing::TemporaryDirectory;
using testing::WriteFile;
using Bytes = std::vector<std::byte>;

// A state of noise that owns its memory.
struct Model {
  std::vector<std::pair<std::string, Bytes>> tensors;

  void Add(const std::string& name, std::uint64_t bytes, Random& random) {
    testing::FillWithNoise(tensors.emplace_back(name, Bytes(bytes)).second, random);
  }
  [[nodiscard]] State MakeState() const {
    State state;
    for (const auto& [name, bytes] : tensors) {
      EXPECT_TRUE(state.Add(name, {.data = bytes.data(),
                                   .dtype = DType::kUint8,
                                   .shape = {static_cast<std::int64_t>(bytes.size())}}));
    }
    return state;
  }
};

class FileTest : public ::testing::Test {
 protected:
  FileTest() {
    for (const std::uint64_t bytes :
         {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{63}, std::uint64_t{64},
          std::uint64_t{4095}, std::uint64_t{4096}, std::uint64_t{70'001},
          (std::uint64_t{2} << 20) + 12'345, std::uint64_t{3}, std::uint64_t{1} << 20}) {
      model_.Add(fmt::format("layer.{}", model_.tensors.size()), bytes, random_);
    }
  }

  [[nodiscard]] File OpenFile(const std::string& path) const {
    auto file = Open(path);
    EXPECT_TRUE(file) << file.error().Message();
    return *std::move(file);
  }
  std::string SaveModel(const std::string& name) const {
    EXPECT_TRUE(Save(model_.MakeState(), directory_ / name));
    return directory_ / name;
  }
  // All tensors of the model at once.
  void ExpectWhole(const File& file, const Options& options = {}) const {
    std::vector<Bytes> memory;
    std::vector<ReadTarget> targets;
    for (const auto& [name, bytes] : model_.tensors) memory.emplace_back(bytes.size());
    for (std::size_t i = 0; i < memory.size(); ++i) {
      targets.push_back({.name = model_.tensors[i].first, .destination = memory[i]});
    }
    const auto info = file.Read(targets, options);
    ASSERT_TRUE(info) << info.error().Message();
    for (std::size_t i = 0; i < memory.size(); ++i) {
      EXPECT_TRUE(memory[i] == model_.tensors[i].second) << targets[i].name;
    }
  }
  // A file with views over two storages of bytes that count up.
  std::string ViewsFile() const {
    std::string counting(256, '\0');
    for (std::size_t i = 0; i < counting.size(); ++i) counting[i] = static_cast<char>(i);
    const std::string path = directory_ / "views.pt";
    WriteFile(path, ArchiveOf(RecordsOfViews(
                        {counting, std::string(64, 'z')},
                        {{.name = "all", .shape = {256}, .strides = {1}},
                         {.name = "tied", .shape = {256}, .strides = {1}},
                         {.name = "row", .offset = 16, .shape = {16}, .strides = {1}},
                         {.name = "turned", .shape = {4, 3}, .strides = {1, 4}},
                         {.name = "every third", .offset = 1, .shape = {20}, .strides = {3}},
                         {.name = "expanded", .offset = 5, .shape = {3, 2}, .strides = {0, 1}},
                         {.name = "scalar", .offset = 255},
                         {.name = "empty", .offset = 7, .shape = {2, 0}, .strides = {1, 1}},
                         {.name = "other", .storage = 1, .shape = {64}, .strides = {1}}})));
    return path;
  }
  static std::vector<int> Numbers(const File& file, const char* name) {
    const TensorInfo* info = file.Find(name);
    EXPECT_NE(info, nullptr) << name;
    if (info == nullptr) return {};
    Bytes bytes(info->bytes);
    const auto read = file.Read(name, bytes);
    EXPECT_TRUE(read) << read.error().Message();
    std::vector<int> numbers;
    for (const std::byte byte : bytes) numbers.push_back(std::to_integer<int>(byte));
    return numbers;
  }

  const Seed seed_;
  Random random_{seed_.value()};
  Model model_;
  // In the working directory, which is on a disk: /tmp need not take direct I/O.
  const TemporaryDirectory directory_{std::filesystem::current_path()};
};

TEST_F(FileTest, WhatWasSavedIsReadBackByEveryEngine) {
  for (const char* const name : {"model.pt", "model.safetensors"}) {
    const File file = OpenFile(SaveModel(name));
    EXPECT_EQ(file.path(), directory_ / name);
    EXPECT_EQ(file.size(), std::filesystem::file_size(directory_ / name));
    for (const Engine engine :
         {Engine::kAuto, Engine::kUring, Engine::kLibaio, Engine::kThreads, Engine::kBuffered}) {
      for (const std::uint64_t block : {4096U, 40'960U, 4U << 20}) {
        ExpectWhole(file, {.engine = engine,
                           .block_bytes = block,
                           .queue_depth = static_cast<std::uint32_t>(Between(random_, 1, 20))});
        ExpectWhole(file, {.engine = engine, .block_bytes = block, .direct = false});
      }
    }
  }
}

TEST_F(FileTest, ItSaysWhatItHolds) {
  const float weight[6] = {1, 2, 3, 4, 5, 6};
  const std::int64_t step = 3;
  State state;
  ASSERT_TRUE(state.Add("w", {.data = weight, .shape = {2, 3}}));
  ASSERT_TRUE(state.Add("step", {.data = &step, .dtype = DType::kInt64}));
  ASSERT_TRUE(Save(state, directory_ / "model.pt"));
  ASSERT_TRUE(Save(state, directory_ / "model.safetensors", {}, {.metadata = {{"a", "b"}}}));

  const File torch = OpenFile(directory_ / "model.pt");
  EXPECT_EQ(torch.format(), Format::kTorch);
  ASSERT_THAT(torch.tensors(), SizeIs(2));
  const TensorInfo* info = torch.Find("w");
  ASSERT_NE(info, nullptr);
  EXPECT_EQ(info, torch.tensors().data());
  EXPECT_EQ(info->dtype_name, "float32");
  EXPECT_EQ(info->dtype, DType::kFloat32);
  EXPECT_THAT(info->shape, ElementsAre(2, 3));
  EXPECT_THAT(info->strides, ElementsAre(3, 1));
  EXPECT_EQ(info->bytes, 24U);
  EXPECT_EQ(info->storage, "data/0");
  EXPECT_EQ(info->device, "cpu");
  EXPECT_EQ(torch.Find("nothing"), nullptr);
  EXPECT_EQ(torch.Find(""), nullptr);
  EXPECT_THAT(torch.metadata(), IsEmpty());

  const File safetensors = OpenFile(directory_ / "model.safetensors");
  EXPECT_EQ(safetensors.format(), Format::kSafetensors);
  EXPECT_THAT(safetensors.metadata(), ElementsAre(::testing::Pair("a", "b")));
  std::int64_t read_step = 0;
  ASSERT_TRUE(safetensors.Read("step", std::as_writable_bytes(std::span(&read_step, 1))));
  EXPECT_EQ(read_step, 3);
}

TEST_F(FileTest, ViewsComeOutRowMajor) {
  const File file = OpenFile(ViewsFile());
  EXPECT_THAT(Numbers(file, "turned"), ElementsAre(0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11));
  EXPECT_THAT(Numbers(file, "expanded"), ElementsAre(5, 6, 5, 6, 5, 6));
  EXPECT_THAT(Numbers(file, "scalar"), ElementsAre(255));
  EXPECT_THAT(Numbers(file, "empty"), IsEmpty());
  const auto thirds = Numbers(file, "every third");
  ASSERT_THAT(thirds, SizeIs(20));
  for (int i = 0; i < 20; ++i) EXPECT_EQ(thirds[static_cast<std::size_t>(i)], 1 + 3 * i);
  const auto row = Numbers(file, "row");
  ASSERT_THAT(row, SizeIs(16));
  EXPECT_EQ(row.front(), 16);
  EXPECT_EQ(Numbers(file, "all"), Numbers(file, "tied"));
  EXPECT_EQ(file.Find("all")->storage, file.Find("turned")->storage);
  EXPECT_NE(file.Find("all")->storage, file.Find("other")->storage);
}

TEST_F(FileTest, ManyViewsOfOneStorageAreReadInOnePass) {
  const File file = OpenFile(ViewsFile());
  std::vector<Bytes> memory;
  std::vector<ReadTarget> targets;
  for (int repeat = 0; repeat < 2; ++repeat) {
    for (const TensorInfo& info : file.tensors()) memory.emplace_back(info.bytes);
  }
  for (std::size_t i = 0; i < memory.size(); ++i) {
    targets.push_back(
        {.name = file.tensors()[i % file.tensors().size()].name, .destination = memory[i]});
  }
  std::ranges::shuffle(targets, random_);
  const auto info = file.Read(targets);
  ASSERT_TRUE(info) << info.error().Message();
  EXPECT_LE(info->bytes, file.size()) << "no storage is read twice";
  for (const ReadTarget& target : targets) {
    std::vector<int> numbers;
    for (const std::byte byte : target.destination) numbers.push_back(std::to_integer<int>(byte));
    EXPECT_EQ(numbers, Numbers(file, std::string(target.name).c_str())) << target.name;
  }
}

TEST_F(FileTest, LargeTiedTensorsEachGetTheirBytes) {
  const std::string storage = testing::GenerationFile(5, 6 << 20).substr(0, 5 << 20);
  WriteFile(directory_ / "tied.pt",
            ArchiveOf(RecordsOfViews(
                          {storage},
                          {{.name = "a", .shape = {5 << 20}, .strides = {1}},
                           {.name = "b", .offset = 1 << 20, .shape = {4 << 20}, .strides = {1}},
                           {.name = "c", .offset = 77, .shape = {3 << 20}, .strides = {1}}}),
                      4096));
  const File file = OpenFile(directory_ / "tied.pt");
  const testing::AlignedMemory a(5 << 20);
  const testing::AlignedMemory b(4 << 20);
  const testing::AlignedMemory c(3 << 20, 77);
  for (const bool direct : {true, false}) {
    const auto info = file.Read(std::vector<ReadTarget>{{.name = "c", .destination = c.bytes()},
                                                        {.name = "a", .destination = a.bytes()},
                                                        {.name = "b", .destination = b.bytes()}},
                                {.direct = direct});
    ASSERT_TRUE(info) << info.error().Message();
    EXPECT_GT(info->in_place_bytes, 4U << 20);
    EXPECT_EQ(std::memcmp(a.data(), storage.data(), 5 << 20), 0);
    EXPECT_EQ(std::memcmp(b.data(), storage.data() + (1 << 20), 4 << 20), 0);
    EXPECT_EQ(std::memcmp(c.data(), storage.data() + 77, 3 << 20), 0);
    for (const auto* memory : {&a, &b, &c}) std::ranges::fill(memory->bytes(), std::byte{0});
  }
}

TEST_F(FileTest, NoByteBesideADestinationIsTouched) {
  const File file = OpenFile(SaveModel("model.pt"));
  for (const auto& [name, bytes] : model_.tensors) {
    const testing::AlignedMemory memory(bytes.size() + 8192, 64);
    std::ranges::fill(memory.bytes(), std::byte{0x5A});
    const auto destination = memory.bytes().subspan(4032, bytes.size());
    ASSERT_TRUE(file.Read(name, destination));
    EXPECT_TRUE(std::ranges::equal(destination, bytes));
    const auto untouched = [](std::byte byte) { return byte == std::byte{0x5A}; };
    EXPECT_TRUE(std::ranges::all_of(memory.bytes().first(4032), untouched)) << name;
    EXPECT_TRUE(std::ranges::all_of(memory.bytes().subspan(4032 + bytes.size()), untouched));
  }
}

TEST_F(FileTest, ATargetThatDoesNotFitIsRefusedBeforeAnythingIsRead) {
  const File file = OpenFile(SaveModel("model.pt"));
  Bytes memory(4096, std::byte{0x5A});
  const auto unknown = file.Read("layer.99", memory);
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code, ErrorCode::kNotFound);
  EXPECT_EQ(unknown.error().entry, "layer.99");
  EXPECT_EQ(unknown.error().path, file.path());
  for (const std::size_t size : {std::size_t{0}, std::size_t{4094}, std::size_t{4096}}) {
    const auto wrong = file.Read("layer.4", std::span(memory).first(size));  // has 4095
    ASSERT_FALSE(wrong);
    EXPECT_EQ(wrong.error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(wrong.error().entry, "layer.4");
    EXPECT_THAT(wrong.error().detail, AllOf(HasSubstr("4095"), HasSubstr(std::to_string(size))));
  }
  const auto second_wrong = file.Read(std::vector<ReadTarget>{
      {.name = "layer.5", .destination = memory}, {.name = "layer.0", .destination = memory}});
  ASSERT_FALSE(second_wrong);
  EXPECT_TRUE(std::ranges::all_of(memory, [](std::byte b) { return b == std::byte{0x5A}; }));
}

TEST_F(FileTest, NothingToReadIsRead) {
  const File file = OpenFile(SaveModel("model.pt"));
  const auto none = file.Read(std::span<const ReadTarget>());
  ASSERT_TRUE(none);
  EXPECT_EQ(none->bytes, 0U);
  EXPECT_TRUE(file.Read("layer.0", {})) << "a tensor without elements";
}

TEST_F(FileTest, ADamagedTensorIsNamedWithItsPlaceAndChecksums) {
  const std::string path = SaveModel("model.pt");
  std::string content = testing::ReadFile(path);
  const auto& victim = model_.tensors[6].second;
  const std::size_t at =
      content.find(std::string(reinterpret_cast<const char*>(victim.data()), 64));
  ASSERT_NE(at, std::string::npos);
  content[at + 70'000] ^= 0x10;
  WriteFile(path, content);
  const File file = OpenFile(path);
  Bytes memory(victim.size());
  for (const Options& options :
       {Options{}, Options{.block_bytes = 4096}, Options{.direct = false}}) {
    const auto read = file.Read("layer.6", memory, options);
    ASSERT_FALSE(read);
    EXPECT_EQ(read.error().code, ErrorCode::kCorrupt);
    EXPECT_EQ(read.error().entry, "layer.6");
    EXPECT_EQ(read.error().path, path);
    EXPECT_EQ(read.error().offset, at);
    ASSERT_TRUE(read.error().expected_crc && read.error().found_crc);
    EXPECT_NE(read.error().expected_crc, read.error().found_crc);
    EXPECT_THAT(read.error().Message(), AllOf(HasSubstr("tensor 'layer.6'"), HasSubstr("data/"),
                                              HasSubstr("another copy")));
  }
  Bytes good(64);
  EXPECT_TRUE(file.Read("layer.3", good)) << "the others are still there";
  const auto verified = file.Verify();
  ASSERT_TRUE(verified);
  ASSERT_THAT(verified->damages, SizeIs(1));
  EXPECT_EQ(verified->damages[0].entry, "layer.6");
}

TEST_F(FileTest, VerifyCountsWhatItComparedAndWhatItCouldNot) {
  const auto torch = OpenFile(SaveModel("model.pt")).Verify();
  ASSERT_TRUE(torch);
  EXPECT_THAT(torch->damages, IsEmpty());
  EXPECT_GE(torch->checked_records, 9U) << "every tensor that has bytes, and the other records";
  EXPECT_EQ(torch->unchecked_records, 0U);
  EXPECT_GE(torch->info.bytes, std::uint64_t{3} << 20);

  const auto safetensors = OpenFile(SaveModel("model.safetensors")).Verify();
  ASSERT_TRUE(safetensors);
  EXPECT_EQ(safetensors->checked_records, 0U);
  EXPECT_EQ(safetensors->unchecked_records, 9U);
}

TEST_F(FileTest, EightThreadsReadOneFile) {
  const File file = OpenFile(SaveModel("model.pt"));
  std::atomic<int> good = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      bool all = true;
      for (std::size_t i = 0; i < 3 * model_.tensors.size(); ++i) {
        const auto& [name, bytes] =
            model_.tensors[(i + static_cast<std::size_t>(t)) % model_.tensors.size()];
        Bytes memory(bytes.size());
        all = all && file.Read(name, memory, {.block_bytes = 65536}) && memory == bytes;
      }
      all = all && file.Verify() && file.Verify()->damages.empty();
      good += all ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 8);
}

TEST_F(FileTest, EightThreadsLocateTheBodiesOfOneArchiveWithGaps) {
  WriteFile(directory_ / "gaps.pt",
            testing::WithGaps(testing::ReadFile(ViewsFile()), 500, "data/0"));
  const File file = OpenFile(directory_ / "gaps.pt");
  std::atomic<int> good = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      Bytes memory(12);
      const auto read = file.Read("turned", memory);
      good += read && memory[1] == std::byte{4} ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 8);
}

TEST_F(FileTest, AForkedChildIsRefused) {
  const File file = OpenFile(SaveModel("model.pt"));
  ExpectWhole(file);
  const pid_t child = ::fork();
  if (child == 0) {
    Bytes memory(64);
    const auto read = file.Read("layer.3", memory);
    const auto opened = Open(directory_ / "model.pt");
    const auto verified = file.Verify();
    const bool refused = !read && read.error().code == ErrorCode::kForked && !opened &&
                         opened.error().code == ErrorCode::kForked && !verified &&
                         verified.error().code == ErrorCode::kForked;
    ::_exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  ExpectWhole(file);
}

TEST_F(FileTest, AFileThatIsReplacedWhileItIsOpenStaysReadable) {
  const File file = OpenFile(SaveModel("model.pt"));
  Model old = std::exchange(model_, Model());
  model_.Add("other", 100, random_);
  SaveModel("model.pt");
  std::swap(model_, old);
  ExpectWhole(file);
  EXPECT_NE(OpenFile(directory_ / "model.pt").Find("other"), nullptr);
}

TEST_F(FileTest, AFileThatShrinksIsCorruptAndNotMadeUp) {
  const std::string path = SaveModel("model.pt");
  const File file = OpenFile(path);
  std::filesystem::resize_file(path, 100'000);
  Bytes memory(model_.tensors[7].second.size());
  for (const bool direct : {true, false}) {
    const auto read = file.Read("layer.7", memory, {.direct = direct});
    ASSERT_FALSE(read);
    EXPECT_EQ(read.error().code, ErrorCode::kCorrupt);
    EXPECT_THAT(read.error().detail, HasSubstr("it was longer"));
    const auto verified = file.Verify({.direct = direct});
    ASSERT_FALSE(verified);
    EXPECT_EQ(verified.error().code, ErrorCode::kCorrupt);
  }
}

TEST_F(FileTest, WhatIsNoCheckpointIsNotOpenedAndLeavesNothingOpen) {
  const auto before = testing::OpenFiles();
  WriteFile(directory_ / "empty", "");
  WriteFile(directory_ / "text", "hello, world; this is no checkpoint at all");
  EXPECT_EQ(Open(directory_ / "missing").error().code, ErrorCode::kNotFound);
  EXPECT_EQ(Open(directory_.path()).error().code, ErrorCode::kUnsupportedFile);
  EXPECT_EQ(Open("").error().code, ErrorCode::kInvalidArgument);
  for (const char* const name : {"empty", "text"}) {
    const auto file = Open(directory_ / name);
    ASSERT_FALSE(file);
    EXPECT_TRUE(file.error().code == ErrorCode::kCorrupt ||
                file.error().code == ErrorCode::kUnsupportedFile);
    EXPECT_EQ(file.error().path, directory_ / name);
  }
  EXPECT_EQ(testing::OpenFiles(), before);
}

TEST_F(FileTest, AMovedFileGoesOnReading) {
  const std::string path = SaveModel("model.pt");
  File first = OpenFile(path);
  File second(std::move(first));
  ExpectWhole(second);
  File third = OpenFile(SaveModel("model.safetensors"));
  third = std::move(second);
  EXPECT_EQ(third.path(), path);
  ExpectWhole(third);
}

}  // namespace
}  // namespace fastpersist
