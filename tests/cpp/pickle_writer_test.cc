// SPDX-License-Identifier: Apache-2.0
// The expected bytes were written by CPython's pickle.dumps(value, 2).
#include "layout/pickle_writer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "testing/hex.h"

namespace fastpersist::layout {
namespace {

using fastpersist::testing::ToHex;

std::string Finished(PickleWriter& writer) { return ToHex(std::move(writer).Finish()); }

TEST(PickleWriter, WritesIntegersOfEveryWidth) {
  const std::vector<std::pair<std::int64_t, std::string>> cases{
      {0, "80024b002e"},
      {1, "80024b012e"},
      {255, "80024bff2e"},
      {256, "80024d00012e"},
      {65535, "80024dffff2e"},
      {65536, "80024a000001002e"},
      {INT32_MAX, "80024affffff7f2e"},
      {std::int64_t{1} << 31, "80028a0500000080002e"},
      {std::int64_t{1} << 32, "80028a0500000000012e"},
      {(std::int64_t{1} << 39) - 1, "80028a05ffffffff7f2e"},
      {std::int64_t{1} << 39, "80028a060000000080002e"},
      {INT64_MAX, "80028a08ffffffffffffff7f2e"},
      {-1, "80024affffffff2e"},
      {-128, "80024a80ffffff2e"},
      {-129, "80024a7fffffff2e"},
      {INT32_MIN, "80024a000000802e"},
      {std::int64_t{INT32_MIN} - 1, "80028a05ffffff7fff2e"},
      {-(std::int64_t{1} << 39), "80028a0500000000802e"},
      {-(std::int64_t{1} << 39) - 1, "80028a06ffffffff7fff2e"},
      {INT64_MIN, "80028a0800000000000000802e"},
  };
  for (const auto& [value, expected] : cases) {
    PickleWriter writer;
    writer.Int(value);
    EXPECT_EQ(Finished(writer), expected) << value;
  }
}

TEST(PickleWriter, WritesTuplesOfEverySize) {
  const std::vector<std::string> expected{"8002292e", "80024b018571002e", "80024b014b028671002e",
                                          "80024b014b024b038771002e",
                                          "8002284b014b024b034b047471002e"};
  for (std::size_t size = 0; size < expected.size(); ++size) {
    PickleWriter writer;
    if (size > 3) writer.Mark();
    for (std::size_t i = 1; i <= size; ++i) writer.Int(static_cast<std::int64_t>(i));
    size == 0 ? writer.EmptyTuple() : writer.Tuple(size);
    EXPECT_EQ(Finished(writer), expected[size]);
  }
}

TEST(PickleWriter, WritesBooleans) {
  PickleWriter yes;
  yes.Bool(true);
  EXPECT_EQ(Finished(yes), "8002882e");
  PickleWriter no;
  no.Bool(false);
  EXPECT_EQ(Finished(no), "8002892e");
}

TEST(PickleWriter, WritesADictOfOneItem) {
  PickleWriter writer;
  writer.EmptyDict();
  writer.Text("a");
  writer.Int(1);
  writer.SetItem();
  EXPECT_EQ(Finished(writer), "80027d710058010000006171014b01732e");
}

TEST(PickleWriter, WritesTextsAnewAndConstantsAndGlobalsOnce) {
  PickleWriter writer;
  writer.Text("a");
  writer.Text("a");
  writer.Constant("cpu");
  writer.Constant("cpu");
  writer.Global("torch", "FloatStorage");
  writer.Global("torch", "FloatStorage");
  EXPECT_EQ(Finished(writer),
            "8002"
            "5801000000617100"
            "5801000000617101"
            "58030000006370757102"
            "6802"
            "63746f7263680a466c6f617453746f726167650a7103"
            "6803"
            "2e");
}

TEST(PickleWriter, NumbersTheMemoWithFourBytesFromTwoHundredFiftySixOn) {
  PickleWriter writer;
  for (int i = 0; i < 255; ++i) writer.Text("");
  writer.Constant("x");
  writer.Constant("y");
  writer.Constant("x");
  writer.Constant("y");
  EXPECT_TRUE(
      Finished(writer).ends_with("580100000078"
                                 "71ff"
                                 "580100000079"
                                 "7200010000"
                                 "68ff"
                                 "6a00010000"
                                 "2e"));
}

}  // namespace
}  // namespace fastpersist::layout
