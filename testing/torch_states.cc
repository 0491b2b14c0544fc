// SPDX-License-Identifier: Apache-2.0
#include "testing/torch_states.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <span>
#include <string_view>
#include <utility>

#include "base/crc32.h"
#include "layout/pickle_opcodes.h"
#include "layout/zip.h"
#include "testing/memory_source.h"

namespace fastpersist::testing {
namespace {

using layout::PickleOpcodes;

std::string_view StorageClass(std::uint32_t item_size) {
  switch (item_size) {
    case 4:
      return "FloatStorage";
    case 8:
      return "DoubleStorage";
    default:
      return "ByteStorage";
  }
}

void AppendSizes(PickleOpcodes& out, const std::vector<std::int64_t>& sizes) {
  if (sizes.empty()) return out.EmptyTuple();
  if (sizes.size() > 3) out.Mark();
  for (const std::int64_t size : sizes) out.Int(size);
  out.Tuple(sizes.size());
}

// torch._utils._rebuild_tensor_v2(storage, offset, shape, strides, False, OrderedDict())
void AppendView(PickleOpcodes& out, const ViewOfStorage& view, std::uint64_t elements,
                std::uint32_t item_size) {
  out.Unicode(view.name);
  out.Global("torch._utils", "_rebuild_tensor_v2");
  out.Mark();
  out.Mark();
  out.Unicode("storage");
  out.Global("torch", StorageClass(item_size));
  out.Unicode(fmt::format("{}", view.storage));
  out.Unicode("cpu");
  out.Int(static_cast<std::int64_t>(elements));
  out.Tuple(5);
  out.PersistentId();
  out.Int(view.offset);
  AppendSizes(out, view.shape);
  AppendSizes(out, view.strides);
  out.Bool(false);
  out.Global("collections", "OrderedDict");
  out.EmptyTuple();
  out.Reduce();
  out.Tuple(6);
  out.Reduce();
  out.SetItem();
}

std::span<const std::byte> BytesOf(const std::string& text) {
  return std::as_bytes(std::span(text));
}

}  // namespace

std::vector<Body> RecordsOfViews(const std::vector<std::string>& storages,
                                 const std::vector<ViewOfStorage>& views, std::uint32_t item_size) {
  PickleOpcodes out;
  out.EmptyDict();
  for (const ViewOfStorage& view : views) {
    AppendView(out, view, storages.at(view.storage).size() / item_size, item_size);
  }
  std::vector<Body> records{{.name = "data.pkl", .bytes = std::move(out).Finish()}};
  for (const std::string& storage : storages) {
    records.push_back({.name = fmt::format("data/{}", records.size() - 1), .bytes = storage});
  }
  return records;
}

std::string WithGaps(const std::string& archive, std::uint64_t gap, std::string_view behind) {
  const auto bodies = ReadBodies(MemorySource(archive));
  EXPECT_TRUE(bodies);
  if (!bodies) return "";
  layout::Bytes out;
  layout::Bytes directory;
  for (const Body& body : *bodies) {
    const layout::ZipEntry entry{
        .name = body.name, .size = body.bytes.size(), .header_offset = out.size()};
    const auto bytes = BytesOf(body.bytes);
    const std::uint32_t crc = base::Crc32(bytes);
    layout::AppendLocalHeader(entry, 64, out);
    out.insert(out.end(), bytes.begin(), bytes.end());
    layout::AppendDescriptor(entry, crc, out);
    layout::AppendDirectoryRecord(entry, crc, directory);
    if (&body != &bodies->back() && body.name.ends_with(behind))
      out.resize(out.size() + gap, std::byte{0xA5});
  }
  const std::uint64_t directory_offset = out.size();
  out.insert(out.end(), directory.begin(), directory.end());
  layout::AppendEndRecords(bodies->size(), directory_offset, directory.size(), out);
  return {reinterpret_cast<const char*>(out.data()), out.size()};
}

}  // namespace fastpersist::testing
