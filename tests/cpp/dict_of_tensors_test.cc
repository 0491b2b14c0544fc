// SPDX-License-Identifier: Apache-2.0
// Whole files, compared by size and CRC-32 with what torch.save (torch 2.13) wrote for the same
// dict into a file object.
#include "layout/dict_of_tensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/crc32.h"
#include "testing/hex.h"
#include "testing/streams.h"

namespace fastpersist::layout {
namespace {

using fastpersist::testing::RenderPlainly;
using fastpersist::testing::ToHex;

std::string FileOf(const State& state, std::uint64_t alignment = 64) {
  std::string pickle;
  const auto records = DictOfTensorsRecords(state, alignment, pickle);
  const auto stream = LayOutTorchContainer(records, {.prefix = "archive", .alignment = alignment});
  EXPECT_TRUE(stream) << stream.error().Message();
  const auto bytes = RenderPlainly(*stream).bytes;
  return fmt::format("{} bytes, CRC {:08x}", bytes.size(), base::Crc32(bytes));
}

void Add(State& state, std::string_view name, DType dtype, std::vector<std::int64_t> shape,
         const void* data) {
  const auto added = state.Add(name, {.data = data, .dtype = dtype, .shape = std::move(shape)});
  ASSERT_TRUE(added) << added.error().Message();
}

// {"t0": torch.tensor([0], dtype=torch.int32), "t1": ...}
std::string FileOfScalars(std::int32_t count) {
  std::vector<std::int32_t> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  State state;
  for (const std::int32_t& value : values) {
    Add(state, fmt::format("t{}", value), DType::kInt32, {1}, &value);
  }
  return FileOf(state);
}

TEST(DictOfTensors, IsTorchsFileForAnyNumberOfItems) {
  EXPECT_EQ(FileOfScalars(0), "1261 bytes, CRC 6cdd3008");
  EXPECT_EQ(FileOfScalars(1), "1577 bytes, CRC c9940eb3");
  EXPECT_EQ(FileOfScalars(2), "1829 bytes, CRC 76ca66f6");
}

TEST(DictOfTensors, IsTorchsFileAroundTheBatchesOfThePickler) {
  EXPECT_EQ(FileOfScalars(999), "276017 bytes, CRC 175b668f");
  EXPECT_EQ(FileOfScalars(1000), "276271 bytes, CRC 6fc164cd");
  EXPECT_EQ(FileOfScalars(1001), "276526 bytes, CRC a9dcb66d");
  EXPECT_EQ(FileOfScalars(2000), "555271 bytes, CRC a8996719");
  EXPECT_EQ(FileOfScalars(2001), "555526 bytes, CRC 7bc2797d");
}

TEST(DictOfTensors, IsTorchsFileForMoreRecordsThanSixteenBitsCount) {
  EXPECT_EQ(FileOfScalars(66'000), "18579399 bytes, CRC 2013e8b2");
}

// Aliases, empty and scalar tensors, every type, and names of one character and of many bytes.
class MixedStateTest : public ::testing::Test {
 protected:
  MixedStateTest() {
    Add(state_, "w", DType::kFloat32, {2, 3}, floats_.data());
    Add(state_, "alias", DType::kFloat32, {6}, floats_.data());
    Add(state_, "e", DType::kFloat32, {0, 4}, nullptr);
    Add(state_, "e2", DType::kFloat32, {0, 4}, nullptr);
    Add(state_, "s", DType::kInt64, {}, &seven_);
    Add(state_, "long name", DType::kBfloat16, {2, 1, 1, 2, 3}, zeros_.data());
    Add(state_, "0", DType::kBool, {2}, truth_.data());
    Add(state_, "\u00e9", DType::kFloat64, {1}, &one_and_a_half_);
    Add(state_, "\u20ac\U0001F600", DType::kUint8, {1}, &three_);
    Add(state_, "c", DType::kComplex64, {1}, &complex64_);
    Add(state_, "i8", DType::kInt8, {1}, &int8_);
    Add(state_, "i16", DType::kInt16, {1}, &int16_);
    Add(state_, "f16", DType::kFloat16, {1}, &half_one_);
    Add(state_, "c128", DType::kComplex128, {1}, &complex128_);
    Add(state_, "alias of storage 12", DType::kComplex128, {1, 1}, &complex128_);
  }

  State state_;
  const std::vector<float> floats_{0, 1, 2, 3, 4, 5};
  const std::int64_t seven_ = 7;
  const std::vector<std::uint16_t> zeros_ = std::vector<std::uint16_t>(12);
  const std::vector<std::uint8_t> truth_{1, 0};
  const double one_and_a_half_ = 1.5;
  const std::uint8_t three_ = 3;
  const std::complex<float> complex64_{1, 2};
  const std::int8_t int8_ = -1;
  const std::int16_t int16_ = -2;
  const std::uint16_t half_one_ = 0x3C00;
  const std::complex<double> complex128_{1, -2};
};

TEST_F(MixedStateTest, IsTorchsFile) { EXPECT_EQ(FileOf(state_), "4796 bytes, CRC 0b0863b0"); }

TEST_F(MixedStateTest, WritesEachStorageOnceInTheOrderOfUse) {
  std::string pickle;
  const auto records = DictOfTensorsRecords(state_, 64, pickle);
  ASSERT_EQ(records.size(), 4U + 13U);
  EXPECT_EQ(records[0].name, "data.pkl");
  EXPECT_EQ(records[3].name, "byteorder");
  EXPECT_EQ(records[4].name, "data/0");
  EXPECT_EQ(records[4].body.data(), reinterpret_cast<const std::byte*>(floats_.data()));
  EXPECT_TRUE(records[4].in_memory);
  EXPECT_TRUE(records[5].body.empty());
  EXPECT_EQ(records[7].body.size(), 8U);
  EXPECT_EQ(records[16].name, "data/12");
}

TEST(DictOfTensors, IsTorchsFileForEveryStorageAlignment) {
  const std::vector<float> values{0, 1, 2, 3, 4, 5};
  State state;
  Add(state, "w", DType::kFloat32, {2, 3}, values.data());
  Add(state, "e", DType::kFloat32, {0}, nullptr);
  EXPECT_EQ(FileOf(state, 1), "1458 bytes, CRC 49a89b13");
  EXPECT_EQ(FileOf(state, 2), "1461 bytes, CRC 6f992d7d");
  EXPECT_EQ(FileOf(state, 16), "1541 bytes, CRC 2b1dfa57");
  EXPECT_EQ(FileOf(state, 64), "1765 bytes, CRC 76ac672b");
  EXPECT_EQ(FileOf(state, 4096), "33445 bytes, CRC 5918e0e5");
  EXPECT_EQ(FileOf(state, 32768), "262821 bytes, CRC ae94ad83");
}

TEST(DictOfTensors, IsTorchsFileWhenABodyLooksLikeADescriptor) {
  const auto file = [](std::string_view body) {
    State state;
    Add(state, "d", DType::kUint8, {static_cast<std::int64_t>(body.size())}, body.data());
    return FileOf(state);
  };
  EXPECT_EQ(file("PK\x07\x08"
                 "abcdefgh"),
            "1577 bytes, CRC 555465e2");
  EXPECT_EQ(file("PK\x07\x08"
                 "abcd"),
            "1577 bytes, CRC 63ec45ef");
  EXPECT_EQ(file("PK\x07\x08"
                 "abc"),
            "1577 bytes, CRC b04dfd78");
}

TEST(DictOfTensors, ThePickleOfOneTensorIsTorchsOne) {
  const std::vector<float> values{0, 1, 2, 3, 4, 5};
  State state;
  Add(state, "w", DType::kFloat32, {2, 3}, values.data());
  std::string arena;
  const auto records = DictOfTensorsRecords(state, 64, arena);
  EXPECT_EQ(ToHex(records[0].body),
            "80027d71005801000000777101"
            "63746f7263682e5f7574696c730a5f72656275696c645f74656e736f725f76320a7102"
            "2828580700000073746f726167657103"
            "63746f7263680a466c6f617453746f726167650a7104"
            "58010000003071055803000000637075710"
            "64b06747107514b004b024b038671084b034b0186710989"
            "63636f6c6c656374696f6e730a4f726465726564446963740a710a"
            "2952710b74710c52710d732e");
}

TEST(DictOfTensors, TheSameMemoryAsAnotherTypeOrSizeIsAnotherStorage) {
  const std::vector<std::int32_t> values(4);
  State state;
  Add(state, "a", DType::kInt32, {4}, values.data());
  Add(state, "b", DType::kFloat32, {4}, values.data());
  Add(state, "c", DType::kInt32, {2}, values.data());
  Add(state, "d", DType::kInt32, {2, 2}, values.data());
  std::string arena;
  EXPECT_EQ(DictOfTensorsRecords(state, 64, arena).size(), 4U + 3U);
}

// {"a": float8_e4m3fn [1, 2], "b": uint16 [1, 2, 3], "c": [[1.5]], "d": uint64 of shape (0, 3)}
TEST(DictOfTensors, OfPulledTensorsIsTorchsFileAlsoForTypesWithoutAStorageClass) {
  const auto pulled = std::make_shared<testing::PulledNoise>();
  std::vector<PulledTensor> tensors;
  const auto add = [&](std::string_view name, std::string_view type,
                       std::span<const std::int64_t> shape, std::vector<int> values) {
    std::vector<std::byte> body;
    for (const int value : values) body.push_back(static_cast<std::byte>(value));
    const std::uint64_t length = body.size();
    tensors.push_back({.name = name,
                       .type = FindTorchDtype(type),
                       .shape = shape,
                       .body = {.pull_id = pulled->Add(std::move(body)), .length = length}});
  };
  const std::vector<std::int64_t> two{2};
  const std::vector<std::int64_t> three{3};
  const std::vector<std::int64_t> one_by_one{1, 1};
  const std::vector<std::int64_t> none_by_three{0, 3};
  add("a", "float8_e4m3fn", two, {0x38, 0x40});
  add("b", "uint16", three, {1, 0, 2, 0, 3, 0});
  add("c", "float32", one_by_one, {0, 0, 0xC0, 0x3F});
  add("d", "uint64", none_by_three, {});
  std::string pickle;
  const auto records = DictOfTensorsRecords(tensors, 64, pickle);
  auto stream = LayOutTorchContainer(records, {.prefix = "archive"});
  ASSERT_TRUE(stream) << stream.error().Message();
  stream->set_pulled(pulled);
  const auto bytes = RenderPlainly(*stream).bytes;
  EXPECT_EQ(fmt::format("{} bytes, CRC {:08x}", bytes.size(), base::Crc32(bytes)),
            "2397 bytes, CRC 81338f59");
}

}  // namespace
}  // namespace fastpersist::layout
