// SPDX-License-Identifier: Apache-2.0
// ReadSafetensorsFile of contents.h: the header is compared with the size of the file, as the
// safetensors package does it: the tensors cover the data without hole or overlap.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <span>
#include <utility>

#include "layout/contents.h"
#include "layout/file_dtypes.h"
#include "layout/safetensors_header.h"
#include "layout/short_text.h"

namespace fastpersist::layout {
namespace {

using Entry = SafetensorsHeader::Entry;

constexpr std::uint64_t kLengthField = 8;
constexpr std::size_t kNameLimit = 200;

std::unexpected<Error> Corrupt(const ByteSource& source, std::string detail,
                               std::string entry = {}) {
  return std::unexpected(Error{.code = ErrorCode::kCorrupt,
                               .operation = "read",
                               .path = source.name(),
                               .entry = std::move(entry),
                               .detail = std::move(detail)});
}

Result<std::uint64_t> ReadHeaderLength(const ByteSource& source) {
  if (source.size() < kLengthField) {
    return Corrupt(source,
                   fmt::format("is no safetensors file: it has {} bytes, and the length of the "
                               "header alone takes 8",
                               source.size()));
  }
  std::array<std::byte, kLengthField> field{};
  if (auto read = source.Read(0, field); !read) return std::unexpected(std::move(read.error()));
  std::uint64_t length = 0;
  for (std::size_t i = field.size(); i-- > 0;) {
    length = length << 8U | std::to_integer<std::uint64_t>(field.at(i));
  }
  if (length > kMaxSafetensorsHeader) {
    return Corrupt(source, fmt::format("is no safetensors file, or damaged: its first bytes tell "
                                       "of a header of {} bytes; at most {} are allowed",
                                       length, kMaxSafetensorsHeader));
  }
  if (length > source.size() - kLengthField) {
    return Corrupt(source, fmt::format("is cut off: its header should have {} bytes, and after the "
                                       "length of the header {} bytes are left",
                                       length, source.size() - kLengthField));
  }
  return length;
}

Result<SafetensorsHeader> ReadHeader(const ByteSource& source, std::uint64_t length) {
  std::string text(length, '\0');
  if (auto read = source.Read(kLengthField, std::as_writable_bytes(std::span(text))); !read) {
    return std::unexpected(std::move(read.error()));
  }
  if (!text.starts_with('{')) {
    return Corrupt(source, "is no safetensors file, or damaged: its header does not begin with {");
  }
  auto header = ParseSafetensorsHeader(text);
  if (!header) {
    header.error().path = source.name();
    if (header.error().offset) *header.error().offset += kLengthField;
  }
  return header;
}

// Row-major strides. False if a product does not fit.
bool MakeStrides(StoredTensor& tensor) {
  tensor.strides.resize(tensor.shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = tensor.shape.size(); i-- > 0;) {
    tensor.strides[i] = stride;
    const std::int64_t size = std::max<std::int64_t>(tensor.shape[i], 1);
    if (__builtin_mul_overflow(stride, size, &stride)) return false;
  }
  return true;
}

// Two elements of F4 are one of torch's type, along the last dimension.
void PairElements(StoredTensor& tensor, const FileDtype& dtype) {
  if (dtype.bits != 4) return;
  if (!tensor.shape.empty() && tensor.shape.back() % 2 == 0) {
    tensor.shape.back() /= 2;
    return;
  }
  tensor.dtype = dtype.safetensors;
  tensor.item_size = 0;
}

// The tensor without its storage.
Result<StoredTensor> MakeTensor(const ByteSource& source, Entry& entry) {
  const std::string name = Shortened(entry.name, kNameLimit);
  const FileDtype* dtype = FindSafetensorsDtype(entry.dtype);
  if (dtype == nullptr) {
    return Corrupt(source,
                   fmt::format("tensor '{}' has type '{}', which safetensors files do not have",
                               name, Shortened(entry.dtype, kNameLimit)),
                   name);
  }
  std::uint64_t bits = dtype->bits;
  bool fits = true;
  for (const std::int64_t size : entry.shape) {
    fits = fits && !__builtin_mul_overflow(bits, static_cast<std::uint64_t>(size), &bits);
  }
  StoredTensor tensor{.name = std::move(entry.name),
                      .dtype = std::string(dtype->torch),
                      .item_size = dtype->item_size,
                      .shape = std::move(entry.shape),
                      .bytes = entry.end - entry.begin,
                      .device = "cpu"};
  PairElements(tensor, *dtype);
  if (!fits || !MakeStrides(tensor)) {
    return Corrupt(source, fmt::format("tensor '{}' has an impossibly large shape", name), name);
  }
  if (bits % 8 != 0 || bits / 8 != tensor.bytes) {
    return Corrupt(
        source,
        fmt::format("tensor '{}' of type {} has {} bits by its shape, and {} bytes by "
                    "its data_offsets [{}, {}]",
                    name, dtype->safetensors, bits, tensor.bytes, entry.begin, entry.end),
        name);
  }
  return tensor;
}

std::vector<std::uint32_t> InFileOrder(const std::vector<Entry>& entries) {
  std::vector<std::uint32_t> order(entries.size());
  std::iota(order.begin(), order.end(), 0U);
  std::ranges::sort(
      order, {}, [&](std::uint32_t i) { return std::tuple(entries[i].begin, entries[i].end, i); });
  return order;
}

// The tensors lie back to back from the begin of the data to the end of the file.
Result<void> CheckCover(const ByteSource& source, const std::vector<Entry>& entries,
                        const std::vector<std::uint32_t>& order, std::uint64_t data_size) {
  std::uint64_t at = 0;
  for (const std::uint32_t i : order) {
    const Entry& entry = entries[i];
    const std::string name = Shortened(entry.name, kNameLimit);
    const auto offsets = fmt::format("[{}, {}]", entry.begin, entry.end);
    if (entry.end < entry.begin) {
      return Corrupt(
          source, fmt::format("tensor '{}' ends before it begins: data_offsets {}", name, offsets),
          name);
    }
    if (entry.end > data_size) {
      return Corrupt(source,
                     fmt::format("tensor '{}' lies beyond the end of the file: data_offsets {} in "
                                 "{} bytes of data",
                                 name, offsets, data_size),
                     name);
    }
    if (entry.begin != at) {
      return Corrupt(
          source,
          fmt::format("tensor '{}' {} the tensor before it: data_offsets {} where {} is "
                      "expected as the first",
                      name, entry.begin < at ? "overlaps" : "leaves a hole behind", offsets, at),
          name);
    }
    at = entry.end;
  }
  if (at != data_size) {
    return Corrupt(source, fmt::format("has {} bytes of data, of which the tensors in its header "
                                       "cover only {}",
                                       data_size, at));
  }
  return {};
}

}  // namespace

Result<Contents> ReadSafetensorsFile(const ByteSource& source) {
  const auto length = ReadHeaderLength(source);
  if (!length) return std::unexpected(length.error());
  auto header = ReadHeader(source, *length);
  if (!header) return std::unexpected(std::move(header.error()));
  const std::uint64_t data_offset = kLengthField + *length;
  std::vector<Entry>& entries = header->entries;
  const auto order = InFileOrder(entries);
  if (auto covered = CheckCover(source, entries, order, source.size() - data_offset); !covered) {
    return std::unexpected(std::move(covered.error()));
  }

  Contents contents{.kind = Contents::Kind::kSafetensors,
                    .metadata = std::move(header->metadata),
                    .checksums = false};
  contents.storages.reserve(entries.size());
  for (const std::uint32_t i : order) {
    contents.storages.push_back({.name = entries[i].name,
                                 .offset = data_offset + entries[i].begin,
                                 .size = entries[i].end - entries[i].begin});
  }
  contents.tensors.reserve(entries.size());
  for (Entry& entry : entries) {
    auto tensor = MakeTensor(source, entry);
    if (!tensor) return std::unexpected(std::move(tensor.error()));
    contents.tensors.push_back(std::move(*tensor));
  }
  for (std::uint32_t storage = 0; storage < order.size(); ++storage) {
    contents.tensors[order[storage]].storage = storage;
  }
  return contents;
}

}  // namespace fastpersist::layout
