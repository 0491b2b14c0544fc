// SPDX-License-Identifier: Apache-2.0
#include "contents_walk.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/utf8.h"

namespace fastpersist::fuzz {
namespace {

using layout::ArchiveRecord;
using layout::Contents;
using layout::StoredStorage;
using layout::StoredTensor;
using testing::MemorySource;

std::span<const std::byte> Piece(const MemorySource& source, std::uint64_t begin,
                                 std::uint64_t end) {
  Require(begin <= end && end <= source.size(), "a record lies within its file");
  return source.bytes().subspan(begin, end - begin);
}

void WalkTensor(const Contents& contents, const StoredTensor& tensor) {
  Require(base::IsUtf8(tensor.name) && base::IsUtf8(tensor.dtype) && base::IsUtf8(tensor.device),
          "names are UTF-8");
  Require(tensor.shape.size() == tensor.strides.size(), "each dimension has a stride");
  Require(std::ranges::none_of(tensor.shape, [](std::int64_t size) { return size < 0; }),
          "sizes are not negative");
  if (tensor.storage == layout::kNoStorage) return;
  Require(tensor.storage < contents.storages.size(), "a tensor's storage exists");
  const StoredStorage& storage = contents.storages[tensor.storage];
  Require(tensor.offset <= storage.size, "a tensor begins within its storage");
  if (tensor.item_size == 0 || tensor.bytes == 0) return;
  std::uint64_t end = tensor.offset + tensor.item_size;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    end += static_cast<std::uint64_t>(tensor.shape[i] - 1) *
           static_cast<std::uint64_t>(tensor.strides[i]) * tensor.item_size;
  }
  Require(end <= storage.size, "a tensor lies within its storage");
}

void WalkStorages(const MemorySource& source, const Contents& contents) {
  std::uint64_t before = 0;
  for (const StoredStorage& storage : contents.storages) {
    Require(storage.offset >= before, "storages are in file order and do not overlap");
    before = storage.offset + storage.size;
    Require(before <= source.size() && before >= storage.offset, "a storage lies within its file");
  }
}

}  // namespace

void Require(bool holds, std::string_view promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %.*s\n", static_cast<int>(promise.size()), promise.data());
  std::abort();
}

void WalkError(const Error& error) {
  Require(!error.detail.empty(), "an error says what is wrong");
  Require(base::IsUtf8(error.Message()), "an error is UTF-8");
}

void WalkArchive(const MemorySource& source, const layout::ZipDirectory& archive) {
  std::uint64_t before = 0;
  for (const ArchiveRecord& record : archive.records) {
    Require(record.header_offset >= before, "records are in file order and do not overlap");
    Require(record.body_offset >= record.header_offset && record.body_end() <= record.end &&
                record.body_end() >= record.body_offset,
            "a body lies within its record");
    before = record.end;
    const auto header = Piece(source, record.header_offset, record.body_offset);
    (void)layout::SaysOtherBody(record, header);
    if (auto checked = layout::CheckLocalHeader(record, header, source.name()); !checked) {
      WalkError(checked.error());
    }
    const auto descriptor = Piece(source, record.body_end(), record.end);
    if (auto checked = layout::CheckDescriptor(record, descriptor, source.name()); !checked) {
      WalkError(checked.error());
    }
  }
}

void WalkContents(const MemorySource& source, Contents contents) {
  std::set<std::string_view> names;
  for (const StoredTensor& tensor : contents.tensors) {
    Require(names.insert(tensor.name).second, "names are unique");
    WalkTensor(contents, tensor);
  }
  for (const layout::StoredValue& value : contents.values) {
    Require(names.insert(value.name).second, "names are unique");
    Require(base::IsUtf8(value.name) && base::IsUtf8(value.text), "values are UTF-8");
    Require(value.text.size() <= 300, "values are short");
  }
  WalkStorages(source, contents);
  WalkArchive(source, contents.archive);
  if (!layout::LocateBodies(source, contents.archive)) return;
  WalkArchive(source, contents.archive);
  layout::AdoptBodyOffsets(contents);
  WalkStorages(source, contents);
}

}  // namespace fastpersist::fuzz
