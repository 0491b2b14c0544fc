// SPDX-License-Identifier: Apache-2.0
// Archives are made by the writer, so that single things in them can be wrong. What torch itself
// writes is read from fuzz/corpus by the fuzzers and by the Python tests.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "layout/contents.h"
#include "layout/pickle_opcodes.h"
#include "layout/torch_container.h"
#include "testing/memory_source.h"
#include "testing/streams.h"

namespace fastpersist::layout {
namespace {

using fastpersist::testing::MemorySource;
using fastpersist::testing::RenderPlainly;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Shape = std::vector<std::int64_t>;

// Names and bodies, without the prefix.
using Records = std::vector<std::pair<std::string, std::string>>;

std::vector<std::byte> Archive(const Records& records) {
  std::vector<Record> given;
  for (const auto& [name, body] : records) {
    given.push_back({.name = name, .body = std::as_bytes(std::span(body))});
  }
  const auto stream = LayOutTorchContainer(given, {.prefix = "model"});
  EXPECT_TRUE(stream) << stream.error().Message();
  return RenderPlainly(*stream).bytes;
}

struct TensorArguments {
  std::string storage = "FloatStorage";
  std::string key = "0";
  std::string location = "cpu";
  std::int64_t elements = 6;
  std::int64_t offset = 0;
  Shape shape = {2, 3};
  Shape strides = {3, 1};
  std::string dtype = {};  // _rebuild_tensor_v3
  bool conjugate = false;
};

class StatePickle {
 public:
  PickleOpcodes& out() { return out_; }
  StatePickle& Dict() {
    out_.EmptyDict();
    return *this;
  }
  StatePickle& Key(const std::string& key) {
    out_.Unicode(key);
    return *this;
  }
  StatePickle& Set() {
    out_.SetItem();
    return *this;
  }
  StatePickle& Storage(const TensorArguments& a) {
    out_.Mark();
    out_.Unicode("storage");
    out_.Global(a.storage == "UntypedStorage" ? "torch.storage" : "torch", a.storage);
    out_.Unicode(a.key);
    out_.Unicode(a.location);
    out_.Int(a.elements);
    out_.Tuple(5);
    out_.PersistentId();
    return *this;
  }
  StatePickle& Tensor(const TensorArguments& a) {
    const bool v3 = !a.dtype.empty();
    out_.Global("torch._utils", v3 ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
    out_.Mark();
    Storage(a);
    out_.Int(a.offset);
    Sizes(a.shape);
    Sizes(a.strides);
    out_.Bool(false);
    out_.Global("collections", "OrderedDict");
    out_.EmptyTuple();
    out_.Reduce();
    if (v3) out_.Global("torch", a.dtype);
    if (a.conjugate) {
      out_.EmptyDict();
      out_.Unicode("conj");
      out_.Bool(true);
      out_.SetItem();
    }
    out_.Tuple(7);  // from the mark, whatever the number
    out_.Reduce();
    return *this;
  }
  std::string Finish() { return std::move(out_).Finish(); }

 private:
  void Sizes(const Shape& sizes) {
    if (sizes.empty()) return out_.EmptyTuple();
    if (sizes.size() > 3) out_.Mark();
    for (const std::int64_t size : sizes) out_.Int(size);
    out_.Tuple(sizes.size());
  }

  PickleOpcodes out_;
};

std::string PickleOf(const TensorArguments& tensor) {
  return StatePickle().Dict().Key("w").Tensor(tensor).Set().Finish();
}

std::string Floats(std::size_t count) { return std::string(4 * count, 'f'); }

Result<Contents> ReadBytes(std::vector<std::byte> bytes) {
  return ReadTorchFile(MemorySource(std::move(bytes), "m.pt"));
}
Result<Contents> Read(const Records& records) { return ReadBytes(Archive(records)); }
Result<Contents> ReadTensor(const TensorArguments& tensor, const std::string& storage = Floats(6)) {
  return Read({{"data.pkl", PickleOf(tensor)}, {"data/0", storage}});
}

Error ErrorOf(const Result<Contents>& contents, ErrorCode code = ErrorCode::kCorrupt) {
  if (contents) {
    ADD_FAILURE() << "was read";
    return {};
  }
  EXPECT_EQ(contents.error().code, code) << contents.error().Message();
  EXPECT_EQ(contents.error().operation, "read");
  EXPECT_EQ(contents.error().path, "m.pt");
  return contents.error();
}

std::vector<std::string> NamesOf(const Contents& contents) {
  std::vector<std::string> names;
  for (const StoredTensor& tensor : contents.tensors) names.push_back(tensor.name);
  return names;
}
std::vector<std::string> ValuesOf(const Contents& contents) {
  std::vector<std::string> values;
  for (const StoredValue& value : contents.values) {
    values.push_back(value.name + "=" + value.text + (value.opaque ? "!" : ""));
  }
  return values;
}

TEST(TorchFile, ListsATensorAndItsStorage) {
  const auto read = ReadTensor({.offset = 1, .shape = {2, 2}, .strides = {3, 1}});
  ASSERT_TRUE(read) << read.error().Message();
  ASSERT_EQ(read->tensors.size(), 1U);
  const StoredTensor& tensor = read->tensors[0];
  EXPECT_EQ(tensor.name, "w");
  EXPECT_EQ(tensor.dtype, "float32");
  EXPECT_EQ(tensor.item_size, 4U);
  EXPECT_THAT(tensor.shape, ElementsAre(2, 2));
  EXPECT_THAT(tensor.strides, ElementsAre(3, 1));
  EXPECT_EQ(tensor.offset, 4U);
  EXPECT_EQ(tensor.bytes, 16U);
  EXPECT_EQ(tensor.device, "cpu");
  EXPECT_FALSE(tensor.conjugate);
  ASSERT_EQ(read->storages.size(), 1U);
  const StoredStorage& storage = read->storages[tensor.storage];
  EXPECT_EQ(storage.name, "data/0");
  EXPECT_EQ(storage.size, 24U);
  EXPECT_EQ(read->archive.records[storage.record].name, "model/data/0");
  EXPECT_EQ(storage.offset, read->archive.records[storage.record].body_offset);
  EXPECT_EQ(storage.crc, read->archive.records[storage.record].crc);
  EXPECT_EQ(read->prefix, "model");
  EXPECT_EQ(read->byteorder, "little");
}

TEST(TorchFile, StoragesThatNothingRefersToAreListed) {
  const auto read = Read({{"data.pkl", PickleOf({})}, {"data/0", Floats(6)}, {"data/x", "abc"}});
  ASSERT_TRUE(read);
  ASSERT_EQ(read->storages.size(), 2U);
  EXPECT_EQ(read->storages[1].name, "data/x");
  EXPECT_LT(read->storages[0].offset, read->storages[1].offset);
}

TEST(TorchFile, NamesFollowThePathInTheState) {
  StatePickle pickle;
  PickleOpcodes& out = pickle.out();
  pickle.Dict().Key("a").Dict().Key("b.c").Tensor({}).Set().Set();
  pickle.Key("list");
  out.EmptyList();
  pickle.Tensor({});
  out.Append();
  out.Int(7);
  out.Append();
  out.Float(1);
  out.Append();
  pickle.Set();
  out.Int(3);
  pickle.Key("it's").Set();
  out.EmptyTuple();
  pickle.Key("a").Set();
  const auto read = Read({{"data.pkl", pickle.Finish()}, {"data/0", Floats(6)}});
  ASSERT_TRUE(read) << read.error().Message();
  EXPECT_THAT(NamesOf(*read), ElementsAre("a.b.c", "list.0"));
  EXPECT_THAT(ValuesOf(*read), ElementsAre("list.1=7", "list.2=1.0", "3='it\\'s'", "()='a'"));
}

TEST(TorchFile, EqualNamesAreNumberedAndOfEqualKeysTheLastCounts) {
  StatePickle pickle;
  pickle.Dict().Key("a.b").Tensor({}).Set();
  pickle.Key("a").Dict().Key("b").Tensor({}).Set().Set();
  pickle.Key("x").Tensor({.shape = {1}, .strides = {1}}).Set();
  pickle.Key("x").Tensor({.shape = {5}, .strides = {1}}).Set();
  const auto read = Read({{"data.pkl", pickle.Finish()}, {"data/0", Floats(6)}});
  ASSERT_TRUE(read) << read.error().Message();
  EXPECT_THAT(NamesOf(*read), ElementsAre("a.b", "a.b#2", "x"));
  EXPECT_THAT(read->tensors[2].shape, ElementsAre(5));
}

TEST(TorchFile, ASharedTensorIsListedUnderBothNamesAndASharedContainerOnce) {
  StatePickle pickle;
  PickleOpcodes& out = pickle.out();
  pickle.Dict();
  const auto top = out.Put();
  pickle.Key("a").Tensor({});
  const auto tensor = out.Put();
  pickle.Set().Key("b");
  out.Get(tensor);
  pickle.Set().Key("self");
  out.Get(top);
  pickle.Set();
  const auto read = Read({{"data.pkl", pickle.Finish()}, {"data/0", Floats(6)}});
  ASSERT_TRUE(read) << read.error().Message();
  EXPECT_THAT(NamesOf(*read), ElementsAre("a", "b"));
  EXPECT_EQ(read->tensors[0].storage, read->tensors[1].storage);
  EXPECT_THAT(read->values, IsEmpty());
}

TEST(TorchFile, ATensorAloneIsCalledTensorAndAValueAloneValue) {
  const auto tensor =
      Read({{"data.pkl", StatePickle().Tensor({}).Finish()}, {"data/0", Floats(6)}});
  ASSERT_TRUE(tensor) << tensor.error().Message();
  EXPECT_THAT(NamesOf(*tensor), ElementsAre("tensor"));
  StatePickle pickle;
  pickle.out().Int(5);
  const auto value = Read({{"data.pkl", pickle.Finish()}});
  ASSERT_TRUE(value) << value.error().Message();
  EXPECT_THAT(ValuesOf(*value), ElementsAre("value=5"));
}

TEST(TorchFile, OpaqueObjectsAreListedWithTheTensorsInThem) {
  StatePickle pickle;
  PickleOpcodes& out = pickle.out();
  pickle.Dict().Key("model");
  out.Global("mypackage", "Model");
  pickle.Tensor({});
  out.Tuple(1);
  out.Reduce();
  pickle.Dict().Key("bias").Tensor({}).Set();
  out.Build();
  pickle.Set();
  const auto read = Read({{"data.pkl", pickle.Finish()}, {"data/0", Floats(6)}});
  ASSERT_TRUE(read) << read.error().Message();
  EXPECT_TRUE(read->tree.opaque);
  EXPECT_THAT(ValuesOf(*read), ElementsAre("model=mypackage Model!"));
  EXPECT_THAT(NamesOf(*read), ElementsAre("model.0", "model.bias"));
}

TEST(TorchFile, DeepNestingAndLongKeysTakeNoQuadraticMemory) {
  constexpr int kDepth = 100'000;
  StatePickle pickle;
  PickleOpcodes& out = pickle.out();
  for (int i = 0; i < kDepth; ++i) {
    pickle.Dict();
    out.Int(i);
    out.Int(i);
    out.SetItem();
    pickle.Key("deeper");
  }
  out.None();
  for (int i = 0; i < kDepth; ++i) out.SetItem();
  const std::string bytes = pickle.Finish();
  const auto read = Read({{"data.pkl", bytes}});
  ASSERT_TRUE(read) << read.error().Message();
  ASSERT_EQ(read->values.size(), kDepth + 1U);
  EXPECT_EQ(read->values[1].name, "deeper.1");
  EXPECT_EQ(read->values.back().text, "None");
  EXPECT_THAT(read->values.back().name, HasSubstr("\u2026"));
  std::size_t names = 0;
  for (const StoredValue& value : read->values) names += value.name.size();
  EXPECT_LT(names, 64 * bytes.size());
}

TEST(TorchFile, NamesOfOneLongKeyAndManyElementsAreBounded) {
  StatePickle pickle;
  PickleOpcodes& out = pickle.out();
  pickle.Dict().Key(std::string(4000, 'k'));
  out.EmptyList();
  out.Mark();
  for (int i = 0; i < 20'000; ++i) out.None();
  std::string bytes = pickle.Finish();
  bytes.replace(bytes.size() - 1, 1, "es.");  // APPENDS, SETITEM, STOP
  const auto read = Read({{"data.pkl", bytes}});
  ASSERT_TRUE(read) << read.error().Message();
  ASSERT_EQ(read->values.size(), 20'000U);
  EXPECT_EQ(read->values[0].name.size(), 4002U);
  std::size_t names = 0;
  for (const StoredValue& value : read->values) names += value.name.size();
  EXPECT_LT(names, 64 * bytes.size() + (2U << 20U));
}

TEST(TorchFile, ViewsAreComparedWithTheirStorage) {
  const auto detail = [](const TensorArguments& tensor) {
    const Error error = ErrorOf(ReadTensor(tensor));
    EXPECT_EQ(error.entry, "w");
    return error.detail;
  };
  EXPECT_TRUE(ReadTensor({.offset = 0, .shape = {6}, .strides = {1}}));
  EXPECT_THAT(detail({.offset = 1, .shape = {6}, .strides = {1}}),
              HasSubstr("tensor 'w' ends at byte 28 of its storage, which has 24 bytes"));
  EXPECT_THAT(detail({.shape = {2, 3}, .strides = {4, 1}}), HasSubstr("ends at byte 28"));
  EXPECT_THAT(detail({.shape = {INT64_MAX, INT64_MAX}, .strides = {INT64_MAX, 1}}),
              HasSubstr("impossibly large"));
  EXPECT_THAT(detail({.shape = {INT64_MAX, 8}, .strides = {0, 0}}), HasSubstr("impossibly large"));
  EXPECT_THAT(detail({.offset = INT64_MAX}), HasSubstr("impossibly large"));
}

TEST(TorchFile, ExpandedAndEmptyTensorsNeedNoBytesOfTheirOwn) {
  const auto expanded = ReadTensor({.offset = 5, .shape = {1000}, .strides = {0}});
  ASSERT_TRUE(expanded) << expanded.error().Message();
  EXPECT_EQ(expanded->tensors[0].bytes, 4000U);
  EXPECT_EQ(expanded->tensors[0].offset, 20U);
  const auto empty = ReadTensor({.offset = 99, .shape = {0, 5}, .strides = {5, 1}});
  ASSERT_TRUE(empty) << empty.error().Message();
  EXPECT_EQ(empty->tensors[0].bytes, 0U);
  EXPECT_LE(empty->tensors[0].offset, 24U);
}

TEST(TorchFile, StoragesAreComparedWithTheirRecords) {
  EXPECT_THAT(ErrorOf(ReadTensor({.key = "9"})).detail,
              HasSubstr("tensor 'w' is in storage data/9, and the archive has no such record"));
  EXPECT_THAT(ErrorOf(ReadTensor({.elements = 7})).detail,
              HasSubstr("whose record has 24 bytes where the pickle says 7 elements of 4 bytes"));
  EXPECT_THAT(ErrorOf(ReadTensor({.elements = INT64_MAX})).detail, HasSubstr("impossible"));
  // A storage that is in no tensor.
  StatePickle alone;
  alone.Storage({.elements = 5});
  const Error error = ErrorOf(Read({{"data.pkl", alone.Finish()}, {"data/0", Floats(6)}}));
  EXPECT_EQ(error.entry, "data/0");
}

TEST(TorchFile, MetaTensorsHaveNoStorage) {
  const auto read = ReadTensor({.key = "7", .location = "meta"});
  ASSERT_TRUE(read) << read.error().Message();
  EXPECT_EQ(read->tensors[0].storage, kNoStorage);
  EXPECT_EQ(read->tensors[0].device, "meta");
  EXPECT_EQ(read->tensors[0].bytes, 24U);
}

TEST(TorchFile, NewerTypesComeFromUntypedStorages) {
  const auto read = ReadTensor({.storage = "UntypedStorage",
                                .elements = 24,
                                .offset = 2,
                                .shape = {10},
                                .strides = {1},
                                .dtype = "uint16"});
  ASSERT_TRUE(read) << read.error().Message();
  EXPECT_EQ(read->tensors[0].dtype, "uint16");
  EXPECT_EQ(read->tensors[0].offset, 4U);
  EXPECT_EQ(read->tensors[0].bytes, 20U);
}

TEST(TorchFile, UnknownTypesAreListedWithoutBytes) {
  for (const TensorArguments& tensor :
       {TensorArguments{.storage = "UntypedStorage", .elements = 24, .dtype = "float3"},
        TensorArguments{.storage = "Float3Storage", .elements = 99}}) {
    const auto read = ReadTensor(tensor);
    ASSERT_TRUE(read) << read.error().Message();
    EXPECT_EQ(read->tensors[0].item_size, 0U);
    EXPECT_EQ(read->tensors[0].bytes, 0U);
    EXPECT_THAT(read->tensors[0].dtype, HasSubstr("loat3"));
  }
}

TEST(TorchFile, LazyBitsAreReported) {
  const auto read = ReadTensor({.storage = "ComplexFloatStorage",
                                .elements = 3,
                                .shape = {3},
                                .strides = {1},
                                .conjugate = true});
  ASSERT_TRUE(read) << read.error().Message();
  EXPECT_TRUE(read->tensors[0].conjugate);
  EXPECT_FALSE(read->tensors[0].negative);
}

TEST(TorchFile, SettingsAreRead) {
  const std::string pickle = PickleOf({});
  const auto read = Read({{"data.pkl", pickle},
                          {".format_version", "1"},
                          {".storage_alignment", "4096"},
                          {"byteorder", "big"},
                          {"data/0", Floats(6)}});
  ASSERT_TRUE(read) << read.error().Message();
  EXPECT_EQ(read->format_version, "1");
  EXPECT_EQ(read->alignment, 4096U);
  EXPECT_EQ(read->byteorder, "big");
  EXPECT_EQ(read->pickle, pickle);
  EXPECT_THAT(ErrorOf(Read({{"data.pkl", pickle}, {"byteorder", "middle"}})).detail,
              HasSubstr("'middle'"));
  for (const char* alignment : {"", "x", "64k", "-1", "99999999999999999999"}) {
    EXPECT_THAT(ErrorOf(Read({{"data.pkl", pickle}, {".storage_alignment", alignment}})).detail,
                HasSubstr("not a number"));
  }
}

TEST(TorchFile, EveryDamagedByteOfThePickleIsNoticed) {
  const std::string pickle = PickleOf({});
  const auto whole = Archive({{"data.pkl", pickle}, {"data/0", Floats(6)}});
  const auto read = ReadBytes(whole);
  ASSERT_TRUE(read);
  const ArchiveRecord& record = read->archive.records[0];
  ASSERT_EQ(record.name, "model/data.pkl");
  for (std::uint64_t at = record.body_offset; at < record.body_end(); ++at) {
    auto damaged = whole;
    damaged[at] ^= std::byte{0x10};
    const Error error = ErrorOf(ReadBytes(damaged));
    ASSERT_EQ(error.entry, "model/data.pkl");
    ASSERT_EQ(error.offset, record.body_offset);
    ASSERT_EQ(error.expected_crc, record.crc);
    ASSERT_TRUE(error.found_crc);
    ASSERT_NE(*error.found_crc, record.crc);
    ASSERT_THAT(error.detail, HasSubstr("checksum"));
  }
}

TEST(TorchFile, ADamagedPickleOfTheRightChecksumNamesThePickle) {
  const Error error = ErrorOf(Read({{"data.pkl", "\x80\x02X"}}));
  EXPECT_EQ(error.entry, "model/data.pkl");
  EXPECT_FALSE(error.detail.empty());
}

TEST(TorchFile, OtherArchivesAreRecognised) {
  EXPECT_THAT(ErrorOf(Read({{"a", ""}, {"b", ""}})).detail,
              HasSubstr("is a zip archive without data.pkl: no checkpoint (it holds 5 entries: "
                        "'model/a', 'model/b', 'model/version'"));
  EXPECT_THAT(ErrorOf(Read({{"arr_0.npy", ""}}), ErrorCode::kUnsupportedFile).detail,
              HasSubstr("NumPy"));
  for (const char* name : {"constants.pkl", "code/__torch__.py"}) {
    EXPECT_THAT(ErrorOf(Read({{"data.pkl", PickleOf({})}, {name, "x"}, {"data/0", Floats(6)}}),
                        ErrorCode::kUnsupportedFile)
                    .detail,
                HasSubstr("is a TorchScript archive"));
  }
}

TEST(TorchFile, HugeSettingsAreRefusedUnread) {
  const Error error =
      ErrorOf(Read({{"data.pkl", PickleOf({})}, {"byteorder", std::string((1U << 20U) + 1, 'l')}}));
  EXPECT_EQ(error.entry, "model/byteorder");
  EXPECT_THAT(error.detail, HasSubstr("1048577 bytes"));
}

TEST(TorchFile, ManyNamesOfATensorOfManyDimensionsAreRefused) {
  const std::vector<std::int64_t> ones(60, 1);
  StatePickle pickle;
  PickleOpcodes& out = pickle.out();
  out.EmptyList();
  pickle.Tensor({.shape = ones, .strides = ones});
  const auto tensor = out.Put();
  out.Append();
  for (int i = 0; i < 20'000; ++i) {
    out.Get(tensor);
    out.Append();
  }
  EXPECT_THAT(ErrorOf(Read({{"data.pkl", pickle.Finish()}, {"data/0", Floats(6)}})).detail,
              HasSubstr("dimensions"));
}

}  // namespace
}  // namespace fastpersist::layout
