// SPDX-License-Identifier: Apache-2.0
// The public entry point, from a state to a file, and the file read back by readers that know
// nothing of this library's layout.
#include "fastpersist/save.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "base/crc32.h"
#include "testing/temporary_directory.h"

namespace fastpersist {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::ReadFile;
using testing::TemporaryDirectory;

struct Weights {
  std::vector<float> floats = std::vector<float>(300'000);
  std::vector<std::int64_t> step{42};
  std::vector<std::uint8_t> bytes{1, 2, 3};

  Weights() { std::iota(floats.begin(), floats.end(), 0.5F); }

  [[nodiscard]] State MakeState() const {
    State state;
    EXPECT_TRUE(state.Add("w", {.data = floats.data(), .shape = {300, 1000}}));
    EXPECT_TRUE(state.Add("step", {.data = step.data(), .dtype = DType::kInt64}));
    EXPECT_TRUE(state.Add("mask", {.data = bytes.data(), .dtype = DType::kUint8, .shape = {3}}));
    EXPECT_TRUE(state.Add("empty", {.data = nullptr, .shape = {0, 4}}));
    return state;
  }
};

template <class T>
std::string_view BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <class T>
T Number(std::string_view bytes, std::size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// Name → bytes, from the local headers of a ZIP file of stored records. What it reads is checked
// with the CRC in the data descriptor.
std::map<std::string, std::string> ReadStoredZip(std::string_view file) {
  std::map<std::string, std::string> records;
  std::size_t at = 0;
  while (Number<std::uint32_t>(file, at) == 0x04034b50U) {
    const auto flags = Number<std::uint16_t>(file, at + 6);
    const auto name_size = Number<std::uint16_t>(file, at + 26);
    const auto extra_size = Number<std::uint16_t>(file, at + 28);
    const std::string name(file.substr(at + 30, name_size));
    const std::size_t body = at + 30 + name_size + extra_size;
    // Sizes stand behind the body: find the descriptor that fits.
    std::size_t end = body;
    if ((flags & 8U) != 0) {
      while (Number<std::uint32_t>(file, end) != 0x08074b50U ||
             Number<std::uint32_t>(file, end + 8) != end - body) {
        ++end;
      }
      const auto bytes = std::as_bytes(std::span(file.data() + body, end - body));
      EXPECT_EQ(Number<std::uint32_t>(file, end + 4), base::Crc32(bytes)) << name;
    }
    records[name] = std::string(file.substr(body, end - body));
    at = (flags & 8U) != 0 ? end + 16 : end;
  }
  return records;
}

TEST(SaveTest, ATorchFileHoldsTheTensorsUnderItsOwnName) {
  const TemporaryDirectory directory;
  const Weights weights;
  const auto saved = Save(weights.MakeState(), directory / "model.v1.pt");
  ASSERT_TRUE(saved) << saved.error().Message();
  const std::string file = ReadFile(directory / "model.v1.pt");
  EXPECT_EQ(saved->bytes, file.size());
  const auto records = ReadStoredZip(file);
  EXPECT_TRUE(records.at("model.v1/data/0") == BytesOf(weights.floats));
  EXPECT_EQ(records.at("model.v1/data/1"), BytesOf(weights.step));
  EXPECT_EQ(records.at("model.v1/data/2"), BytesOf(weights.bytes));
  EXPECT_EQ(records.at("model.v1/data/3"), "");
  EXPECT_EQ(records.at("model.v1/byteorder"), "little");
  EXPECT_EQ(records.at("model.v1/version"), "3\n");
  EXPECT_THAT(records.at("model.v1/data.pkl"), HasSubstr("_rebuild_tensor_v2"));
  EXPECT_EQ(records.at("model.v1/.data/serialization_id").size(), 40U);
  EXPECT_EQ(file.find(BytesOf(weights.floats)) % 64, 0U) << "torch's alignment";
}

TEST(SaveTest, ASafetensorsFileIsItsHeaderAndItsTensors) {
  const TemporaryDirectory directory;
  const Weights weights;
  const auto saved = Save(weights.MakeState(), directory / "model.safetensors", {},
                          {.metadata = {{"format", "pt"}}});
  ASSERT_TRUE(saved) << saved.error().Message();
  const std::string file = ReadFile(directory / "model.safetensors");
  EXPECT_EQ(saved->bytes, file.size());
  const auto header_size = Number<std::uint64_t>(file, 0);
  const auto header = nlohmann::json::parse(file.substr(8, header_size));
  EXPECT_EQ(header.at("__metadata__").at("format"), "pt");
  const auto body = [&](const std::string& name) {
    const auto offsets = header.at(name).at("data_offsets");
    const std::uint64_t begin = offsets.at(0);
    const std::uint64_t end = offsets.at(1);
    return file.substr(8 + header_size + begin, end - begin);
  };
  EXPECT_EQ(header.at("w").at("dtype"), "F32");
  EXPECT_EQ(header.at("w").at("shape"), nlohmann::json({300, 1000}));
  EXPECT_EQ(header.at("step").at("shape"), nlohmann::json::array());
  EXPECT_TRUE(body("w") == BytesOf(weights.floats));
  EXPECT_EQ(body("step"), BytesOf(weights.step));
  EXPECT_EQ(body("mask"), BytesOf(weights.bytes));
  EXPECT_EQ(body("empty"), "");
}

TEST(SaveTest, TheSuffixChoosesTheFormatUnlessTheCallerDoes) {
  const TemporaryDirectory directory;
  const Weights weights;
  ASSERT_TRUE(
      Save(weights.MakeState(), directory / "a.safetensors", {}, {.format = Format::kTorch}));
  EXPECT_TRUE(ReadFile(directory / "a.safetensors").starts_with("PK"));
  ASSERT_TRUE(Save(weights.MakeState(), directory / "b.bin", {}, {.format = Format::kSafetensors}));
  EXPECT_EQ(ReadFile(directory / "b.bin").at(8), '{');
}

TEST(SaveTest, AnEmptyStateIsAFileToo) {
  const TemporaryDirectory directory;
  for (const char* const name : {"empty.pt", "empty.safetensors"}) {
    const auto saved = Save(State(), directory / name);
    ASSERT_TRUE(saved) << saved.error().Message();
    EXPECT_EQ(std::filesystem::file_size(directory / name), saved->bytes);
  }
}

TEST(SaveTest, TheSameStateGivesTheSameFile) {
  const TemporaryDirectory directory;
  const Weights weights;
  ASSERT_TRUE(Save(weights.MakeState(), directory / "model.pt"));
  const std::string first = ReadFile(directory / "model.pt");
  for (const Engine engine :
       {Engine::kUring, Engine::kLibaio, Engine::kThreads, Engine::kBuffered}) {
    ASSERT_TRUE(Save(weights.MakeState(), directory / "model.pt",
                     {.engine = engine, .block_bytes = 65536, .sync = false}));
    EXPECT_TRUE(ReadFile(directory / "model.pt") == first) << EngineName(engine);
  }
}

TEST(SaveTest, WhatCannotBeWrittenIsRefusedBeforeTheDiskIsTouched) {
  const TemporaryDirectory directory;
  const Weights weights;
  testing::WriteFile(directory / "model.pt", "old");

  const auto metadata =
      Save(weights.MakeState(), directory / "model.pt", {}, {.metadata = {{"a", "b"}}});
  ASSERT_FALSE(metadata);
  EXPECT_EQ(metadata.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(metadata.error().Message(), HasSubstr("safetensors"));

  const auto no_prefix = Save(weights.MakeState(), directory / ".pt");
  ASSERT_FALSE(no_prefix);
  EXPECT_EQ(no_prefix.error().code, ErrorCode::kInvalidArgument);

  State reserved;
  ASSERT_TRUE(reserved.Add("__metadata__", {.data = weights.bytes.data(), .dtype = DType::kUint8}));
  const auto bad_name = Save(reserved, directory / "model.safetensors");
  ASSERT_FALSE(bad_name);
  EXPECT_EQ(bad_name.error().code, ErrorCode::kUnsupportedState);
  EXPECT_THAT(bad_name.error().Message(), HasSubstr("__metadata__"));

  EXPECT_EQ(ReadFile(directory / "model.pt"), "old");
  EXPECT_THAT(directory.names(), ElementsAre("model.pt"));
}

TEST(SaveTest, AMissingDirectoryIsAStorageErrorThatSaysWhatToDo) {
  const TemporaryDirectory directory;
  const auto saved = Save(Weights().MakeState(), directory / "missing/model.pt");
  ASSERT_FALSE(saved);
  EXPECT_EQ(saved.error().code, ErrorCode::kStorage);
  EXPECT_EQ(saved.error().system_errno, ENOENT);
  EXPECT_EQ(saved.error().path, directory / "missing/model.pt");
  EXPECT_THAT(saved.error().Message(), HasSubstr("create the directory first"));
  EXPECT_THAT(directory.names(), IsEmpty());
}

}  // namespace
}  // namespace fastpersist
