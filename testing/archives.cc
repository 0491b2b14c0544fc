// SPDX-License-Identifier: Apache-2.0
#include "testing/archives.h"

#include <gtest/gtest.h>

#include <charconv>
#include <utility>

#include "base/crc32.h"
#include "layout/torch_container.h"
#include "layout/zip_reader.h"
#include "testing/streams.h"

namespace fastpersist::testing {
namespace {

using layout::ArchiveRecord;
using Bytes = std::vector<std::byte>;

Result<Bytes> ReadRange(const layout::ByteSource& source, std::uint64_t begin, std::uint64_t end) {
  Bytes bytes(static_cast<std::size_t>(end - begin));
  if (auto read = source.Read(begin, bytes); !read) return std::unexpected(read.error());
  return bytes;
}

Result<void> Locate(const layout::ByteSource& source, layout::ZipDirectory& directory) {
  for (const ArchiveRecord& record : directory.records) {
    const auto header = ReadRange(source, record.header_offset, record.body_offset);
    if (!header) return std::unexpected(header.error());
    if (layout::SaysOtherBody(record, *header)) return layout::LocateBodies(source, directory);
  }
  return {};
}

Result<Body> ReadBody(const layout::ByteSource& source, const ArchiveRecord& record) {
  const auto header = ReadRange(source, record.header_offset, record.body_offset);
  const auto body = ReadRange(source, record.body_offset, record.body_end());
  const auto descriptor = ReadRange(source, record.body_end(), record.end);
  if (!header || !body || !descriptor) return std::unexpected((header ? body : header).error());
  if (auto good = CheckLocalHeader(record, *header, source.name()); !good) {
    return std::unexpected(good.error());
  }
  if (auto good = CheckDescriptor(record, *descriptor, source.name()); !good) {
    return std::unexpected(good.error());
  }
  if (base::Crc32(*body) != record.crc) {
    return std::unexpected(Error{.code = ErrorCode::kCorrupt,
                                 .operation = "read",
                                 .path = source.name(),
                                 .entry = record.name,
                                 .detail = "the CRC-32 of the body differs"});
  }
  return Body{record.name, {reinterpret_cast<const char*>(body->data()), body->size()}};
}

}  // namespace

std::string ArchiveOf(const std::vector<Body>& bodies, std::uint64_t alignment) {
  std::vector<layout::Record> records;
  records.reserve(bodies.size());
  for (const Body& body : bodies) {
    layout::Record& record = records.emplace_back();
    record.name = body.name;
    record.body = std::as_bytes(std::span(body.bytes));
  }
  layout::TorchContainerOptions options;
  options.alignment = alignment;
  const auto stream = layout::LayOutTorchContainer(records, options);
  EXPECT_TRUE(stream);
  if (!stream) return "";
  const Bytes bytes = RenderPlainly(*stream).bytes;
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Result<std::vector<Body>> ReadBodies(const layout::ByteSource& source) {
  auto directory = layout::ReadZipDirectory(source);
  if (!directory) return std::unexpected(directory.error());
  if (auto located = Locate(source, *directory); !located) {
    return std::unexpected(located.error());
  }
  std::vector<Body> bodies;
  for (const ArchiveRecord& record : directory->records) {
    auto body = ReadBody(source, record);
    if (!body) return std::unexpected(body.error());
    bodies.push_back(std::move(*body));
  }
  return bodies;
}

std::string FromHex(std::string_view digits) {
  std::string bytes;
  for (std::size_t i = 0; i + 2 <= digits.size(); i += 2) {
    unsigned value = 0;
    std::from_chars(digits.data() + i, digits.data() + i + 2, value, 16);
    bytes += static_cast<char>(value);
  }
  return bytes;
}

}  // namespace fastpersist::testing
