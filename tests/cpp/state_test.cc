// SPDX-License-Identifier: Apache-2.0
#include "fastpersist/state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace fastpersist {
namespace {

using ::testing::HasSubstr;

// The refusal's sentence; empty when the view was accepted.
std::string RefusalOf(std::string_view name, TensorView view) {
  State state;
  const auto added = state.Add(name, std::move(view));
  EXPECT_EQ(state.entries().size(), added ? 1U : 0U);
  if (added) return "";
  EXPECT_EQ(added.error().code, ErrorCode::kInvalidArgument);
  return added.error().Message();
}

class StateTest : public ::testing::Test {
 protected:
  [[nodiscard]] TensorView View(std::vector<std::int64_t> shape,
                                std::vector<std::int64_t> strides = {}) const {
    return {.data = memory_.data(), .shape = std::move(shape), .strides = std::move(strides)};
  }

  const std::vector<float> memory_ = std::vector<float>(64);
};

TEST_F(StateTest, KeepsEntriesInTheOrderOfAdding) {
  State state;
  for (const char* name : {"z", "a", "", "m"}) ASSERT_TRUE(state.Add(name, View({2})));
  std::vector<std::string> names;
  for (const auto& entry : state.entries()) names.push_back(entry.name);
  EXPECT_EQ(names, (std::vector<std::string>{"z", "a", "", "m"}));
}

TEST_F(StateTest, RefusesANameThatIsThereAlready) {
  State state;
  ASSERT_TRUE(state.Add("w", View({2})));
  const auto again = state.Add("w", View({3}));
  ASSERT_FALSE(again);
  EXPECT_THAT(again.error().Message(), HasSubstr("'w' is there already"));
  EXPECT_EQ(state.entries().size(), 1U);
}

TEST_F(StateTest, AnEntryThatWasRefusedMayBeAddedCorrectly) {
  State state;
  ASSERT_FALSE(state.Add("w", View({-1})));
  EXPECT_TRUE(state.Add("w", View({1})));
}

TEST_F(StateTest, RefusesShapesThatCannotBe) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  EXPECT_THAT(RefusalOf("n", View({-1})), HasSubstr("negative"));
  EXPECT_THAT(RefusalOf("n", View({2, -1, 0})), HasSubstr("negative"));
  EXPECT_THAT(RefusalOf("n", View({kHuge, kHuge})), HasSubstr("impossibly large"));
  EXPECT_THAT(RefusalOf("n", View({INT64_MAX})), HasSubstr("impossibly large"));
  EXPECT_THAT(RefusalOf("n", View({INT64_MAX, 0, 2})), HasSubstr("impossibly large"));
  EXPECT_EQ(RefusalOf("n", View({INT64_MAX / 4})), "");
}

TEST_F(StateTest, RefusesANullAddressUnlessThereIsNothingThere) {
  EXPECT_THAT(RefusalOf("n", {.shape = {1}}), HasSubstr("null address"));
  EXPECT_THAT(RefusalOf("n", {.shape = {}}), HasSubstr("null address"));
  EXPECT_EQ(RefusalOf("n", {.shape = {0}}), "");
  EXPECT_EQ(RefusalOf("n", {.shape = {3, 0, 2}}), "");
}

TEST_F(StateTest, AcceptsRowMajorStridesOnly) {
  EXPECT_EQ(RefusalOf("n", View({2, 3}, {3, 1})), "");
  EXPECT_EQ(RefusalOf("n", View({}, {})), "");
  EXPECT_EQ(RefusalOf("n", View({2, 1, 3}, {3, 77, 1})), "") << "no matter for a size of 1";
  EXPECT_EQ(RefusalOf("n", View({0, 3}, {1, 1})), "") << "no matter for an empty tensor";
  for (const auto& strides : std::vector<std::vector<std::int64_t>>{
           {1, 2}, {3, 2}, {4, 1}, {0, 0}, {-3, 1}, {1}, {6, 3, 1}}) {
    EXPECT_THAT(RefusalOf("n", View({2, 3}, strides)), HasSubstr("not contiguous"));
  }
}

TEST_F(StateTest, RefusesNamesThatAreNotUtf8) {
  // Both file formats hold names as UTF-8, and a reader would choke on anything else.
  for (const char* name :
       {"w", "\u00e9", "\u20ac", "\U0001F600", "\U0010FFFF", "\ud7ff", "\ue000"}) {
    EXPECT_EQ(RefusalOf(name, View({1})), "") << name;
  }
  for (const char* name :
       {"\xff", "\x80", "a\xc3", "\xc3(", "\xe2\x82", "\xe2(\xac", "\xf0\x9f\x98",
        "\xf8\x88\x80\x80\x80", "\xc0\xaf", "\xc1\xbf", "\xe0\x80\xaf", "\xf0\x80\x80\xaf",
        "\xed\xa0\x80", "\xed\xbf\xbf", "\xf4\x90\x80\x80", "\xfe", "ok\xe9"}) {
    EXPECT_THAT(RefusalOf(name, View({1})), HasSubstr("is not UTF-8"));
  }
}

TEST_F(StateTest, ByteSizeIsElementsTimesItemSize) {
  EXPECT_EQ(ByteSize(View({2, 3})), 24U);
  EXPECT_EQ(ByteSize(View({})), 4U);
  EXPECT_EQ(ByteSize(View({5, 0})), 0U);
  EXPECT_EQ(ByteSize({.dtype = DType::kComplex128, .shape = {3}}), 48U);
}

TEST(DType, ItemSizesAreThoseOfTorch) {
  const std::vector<std::pair<DType, std::size_t>> sizes{
      {DType::kBool, 1},    {DType::kUint8, 1},   {DType::kInt8, 1},      {DType::kInt16, 2},
      {DType::kInt32, 4},   {DType::kInt64, 8},   {DType::kFloat16, 2},   {DType::kBfloat16, 2},
      {DType::kFloat32, 4}, {DType::kFloat64, 8}, {DType::kComplex64, 8}, {DType::kComplex128, 16}};
  for (const auto& [dtype, size] : sizes) EXPECT_EQ(ItemSize(dtype), size);
}

}  // namespace
}  // namespace fastpersist
