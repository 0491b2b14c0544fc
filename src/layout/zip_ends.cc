// SPDX-License-Identifier: Apache-2.0
// The end records of an archive, and what a file without them is told (see zip_reader.h).
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "layout/zip_parse.h"
#include "layout/zip_reader.h"

namespace fastpersist::layout {
namespace {

constexpr std::uint32_t kEndSignature = 0x06054b50;
constexpr std::uint32_t kLocatorSignature = 0x07064b50;
constexpr std::uint32_t kZip64EndSignature = 0x06064b50;
constexpr std::uint64_t kEndLength = 22;
constexpr std::uint64_t kLocatorLength = 20;
constexpr std::uint64_t kZip64EndLength = 56;
constexpr std::uint64_t kLongestComment = 0xFFFF;
constexpr std::uint64_t kTailLength =
    kLongestComment + kEndLength + kLocatorLength + kZip64EndLength;
constexpr std::uint64_t kLargestDirectory = std::uint64_t{1} << 30;
constexpr std::uint64_t kHeadLength = 512;
constexpr std::uint16_t kLong16 = 0xFFFF;

bool AllZero(std::span<const std::byte> bytes) {
  return std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; });
}

// The last bytes of the file; offsets are those in the file.
struct Tail {
  const std::string& file;
  std::uint64_t size;    // of the file
  std::uint64_t offset;  // of the first of bytes
  std::vector<std::byte> bytes;

  template <std::unsigned_integral T>
  [[nodiscard]] T At(std::uint64_t at) const {
    return FieldAt<T>(bytes, at - offset);
  }
  [[nodiscard]] std::span<const std::byte> From(std::uint64_t at) const {
    return std::span(bytes).subspan(at - offset);
  }
};

Result<Tail> ReadTail(const ByteSource& source) {
  const std::uint64_t length = std::min(source.size(), kTailLength);
  Tail tail{source.name(), source.size(), source.size() - length,
            std::vector<std::byte>(static_cast<std::size_t>(length))};
  if (auto read = source.Read(tail.offset, tail.bytes); !read) {
    return std::unexpected(std::move(read.error()));
  }
  return tail;
}

// Whether the bytes at `at`, which have the signature, can be an end record at all, wherever the
// file ends: decides what a damaged file is told, never what is believed.
bool CouldBeEnd(const Tail& tail, std::uint64_t at) {
  const auto length = tail.At<std::uint32_t>(at + 12);
  const auto offset = tail.At<std::uint32_t>(at + 16);
  return tail.At<std::uint32_t>(at + 4) == 0 &&
         tail.At<std::uint16_t>(at + 8) == tail.At<std::uint16_t>(at + 10) &&
         (offset == kLongField || std::uint64_t{offset} + length <= at);
}

Error NoEnd(const ByteSource& source, const Tail& tail) {
  std::vector<std::byte> head(
      static_cast<std::size_t>(std::min<std::uint64_t>(source.size(), kHeadLength)));
  if (auto read = source.Read(0, head); !read) return std::move(read.error());
  if (head.size() < 4 || FieldAt<std::uint32_t>(head, 0) != kLocalHeaderSignature) {
    Error error = Damaged(tail.file, std::nullopt,
                          "the file is no checkpoint: it " + DescribeForeign(head, source.size()));
    error.advice.clear();
    return error;
  }
  std::string detail = "the archive has no end: it is truncated (or still being written)";
  if (AllZero(tail.bytes)) {
    detail += fmt::format("; its last {} bytes are zeros", tail.bytes.size());
  }
  return Damaged(tail.file, source.size(), std::move(detail));
}

// Of an end record at `at` that does not end where the file does.
Error EndsElsewhere(const Tail& tail, std::uint64_t at) {
  const std::uint64_t end = at + kEndLength + tail.At<std::uint16_t>(at + 20);
  if (end > tail.size) {
    return Damaged(tail.file, at + 20,
                   fmt::format("the comment of the archive reaches {} bytes beyond the end of the "
                               "file: it is truncated",
                               end - tail.size));
  }
  const bool zeros = AllZero(tail.From(end));
  Error error = Damaged(tail.file, end,
                        fmt::format("{} bytes follow the end of the archive{}", tail.size - end,
                                    zeros ? ", all of them zeros" : ""));
  if (zeros) {
    error.advice =
        fmt::format("if nothing but padding was added, cut it off (truncate -s {})", end);
  }
  return error;
}

// The offset of the end record, which ends where the file does.
Result<std::uint64_t> FindEnd(const ByteSource& source, const Tail& tail) {
  std::optional<std::uint64_t> elsewhere;
  for (std::uint64_t at = tail.size - std::min(tail.size, kEndLength) + 1; at-- > tail.offset;) {
    if (tail.From(at).size() < kEndLength || tail.At<std::uint32_t>(at) != kEndSignature) continue;
    if (at + kEndLength + tail.At<std::uint16_t>(at + 20) == tail.size) return at;
    if (!elsewhere && CouldBeEnd(tail, at)) elsewhere = at;
  }
  return std::unexpected(elsewhere ? EndsElsewhere(tail, *elsewhere) : NoEnd(source, tail));
}

// The fields of an end record.
struct Ends {
  std::uint64_t begin = 0;  // of the first end record
  std::uint64_t disk = 0;
  std::uint64_t directory_disk = 0;
  std::uint64_t entries_here = 0;
  std::uint64_t entries = 0;
  std::uint64_t length = 0;
  std::uint64_t offset = 0;
};

Ends ShortEnds(const Tail& tail, std::uint64_t at) {
  return {.begin = at,
          .disk = tail.At<std::uint16_t>(at + 4),
          .directory_disk = tail.At<std::uint16_t>(at + 6),
          .entries_here = tail.At<std::uint16_t>(at + 8),
          .entries = tail.At<std::uint16_t>(at + 10),
          .length = tail.At<std::uint32_t>(at + 12),
          .offset = tail.At<std::uint32_t>(at + 16)};
}

// The zip64 end record, which must lie directly before its locator: nothing writes the extensible
// data that the standard allows at its end.
Result<Ends> LongEnds(const Tail& tail, std::uint64_t locator) {
  const auto claimed = tail.At<std::uint64_t>(locator + 8);
  if (locator - tail.offset < kZip64EndLength || claimed != locator - kZip64EndLength) {
    return std::unexpected(
        Damaged(tail.file, locator + 8,
                fmt::format("the zip64 end record is said to be at {}, and is not", claimed)));
  }
  if (tail.At<std::uint32_t>(claimed) != kZip64EndSignature) {
    return std::unexpected(Damaged(tail.file, claimed, "the zip64 end record has no signature"));
  }
  if (const auto rest = tail.At<std::uint64_t>(claimed + 4); rest != kZip64EndLength - 12) {
    return std::unexpected(Damaged(tail.file, claimed + 4,
                                   fmt::format("the zip64 end record claims {} bytes, and has {}",
                                               rest, kZip64EndLength - 12)));
  }
  if (tail.At<std::uint32_t>(locator + 4) != 0 || tail.At<std::uint32_t>(locator + 16) > 1) {
    return std::unexpected(Unsupported(tail.file, locator,
                                       "the archive consists of several volumes",
                                       "join the volumes to one archive (zip -s 0)"));
  }
  return Ends{.begin = claimed,
              .disk = tail.At<std::uint32_t>(claimed + 16),
              .directory_disk = tail.At<std::uint32_t>(claimed + 20),
              .entries_here = tail.At<std::uint64_t>(claimed + 24),
              .entries = tail.At<std::uint64_t>(claimed + 32),
              .length = tail.At<std::uint64_t>(claimed + 40),
              .offset = tail.At<std::uint64_t>(claimed + 48)};
}

Result<void> CheckAgreement(const Tail& tail, std::uint64_t at, const Ends& few, const Ends& many) {
  const std::array<std::array<std::uint64_t, 4>, 6> fields{
      {{4, few.disk, many.disk, kLong16},
       {6, few.directory_disk, many.directory_disk, kLong16},
       {8, few.entries_here, many.entries_here, kLong16},
       {10, few.entries, many.entries, kLong16},
       {12, few.length, many.length, kLongField},
       {16, few.offset, many.offset, kLongField}}};
  for (const auto& [field, short_value, long_value, escape] : fields) {
    if (short_value == long_value || short_value == escape) continue;
    return std::unexpected(Damaged(
        tail.file, at + field,
        fmt::format("the end records disagree: {} here, {} in zip64's", short_value, long_value)));
  }
  return {};
}

Result<Ends> ReadEnds(const Tail& tail, std::uint64_t at) {
  Ends ends = ShortEnds(tail, at);
  if (at - tail.offset >= kLocatorLength &&
      tail.At<std::uint32_t>(at - kLocatorLength) == kLocatorSignature) {
    const Result<Ends> many = LongEnds(tail, at - kLocatorLength);
    if (!many) return many;
    if (auto agree = CheckAgreement(tail, at, ends, *many); !agree) {
      return std::unexpected(std::move(agree.error()));
    }
    ends = *many;
  }
  if (ends.disk != 0 || ends.directory_disk != 0 || ends.entries_here != ends.entries) {
    return std::unexpected(Unsupported(tail.file, ends.begin,
                                       "the archive consists of several volumes",
                                       "join the volumes to one archive (zip -s 0)"));
  }
  return ends;
}

// Before memory is taken for the directory.
Result<void> CheckDirectoryPlace(const Tail& tail, const Ends& ends) {
  const auto wrong = [&](std::string detail) {
    return std::unexpected(Damaged(tail.file, ends.begin, std::move(detail)));
  };
  if (ends.offset > ends.begin || ends.length > ends.begin - ends.offset) {
    return wrong(
        fmt::format("the directory is said to have {} bytes at {}, which reach beyond its "
                    "end record",
                    ends.length, ends.offset));
  }
  if (const std::uint64_t gap = ends.begin - ends.offset - ends.length; gap != 0) {
    return wrong(
        fmt::format("{} bytes lie between the directory, as its end record places it, and "
                    "that record: bytes were added or lost",
                    gap));
  }
  if (ends.entries > ends.length / kDirectoryRecordLength) {
    return wrong(fmt::format("the directory is said to hold {} entries in {} bytes", ends.entries,
                             ends.length));
  }
  if (ends.length > kLargestDirectory) {
    return std::unexpected(
        Unsupported(tail.file, ends.offset,
                    fmt::format("the directory is {} bytes long; up to {} are read", ends.length,
                                kLargestDirectory),
                    ""));
  }
  return {};
}

}  // namespace

Result<DirectoryPlace> FindDirectory(const ByteSource& source) {
  const Result<Tail> tail = ReadTail(source);
  if (!tail) return std::unexpected(tail.error());
  const Result<std::uint64_t> at = FindEnd(source, *tail);
  if (!at) return std::unexpected(at.error());
  const Result<Ends> ends = ReadEnds(*tail, *at);
  if (!ends) return std::unexpected(ends.error());
  if (auto good = CheckDirectoryPlace(*tail, *ends); !good) {
    return std::unexpected(std::move(good.error()));
  }
  return DirectoryPlace{.offset = ends->offset, .length = ends->length, .entries = ends->entries};
}

}  // namespace fastpersist::layout
