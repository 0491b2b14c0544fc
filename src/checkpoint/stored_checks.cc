// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/stored_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

namespace fastpersist::checkpoint {
namespace {

using layout::ArchiveRecord;
using layout::Contents;
using pipeline::Checked;
using pipeline::CheckedRange;
using pipeline::RangeChecker;

// Signature, CRC-32, two sizes of 64 bits.
constexpr std::uint64_t kLongestDescriptor = 24;
constexpr std::string_view kAdvice = "restore this file from another copy";

void AddRange(RangeChecker::Plan& plan, CheckedRange range) {
  if (range.range.begin < range.range.end) plan.ranges.push_back(range);
}

void AddRecord(RangeChecker::Plan& plan, const Contents& contents, std::uint32_t index) {
  const ArchiveRecord& record = contents.archive.records[index];
  AddRange(plan, {.range = {.begin = record.header_offset, .end = record.body_offset},
                  .kind = CheckedRange::Kind::kHeader,
                  .record = index});
  AddRange(plan, {.range = {.begin = record.body_offset, .end = record.body_end()},
                  .kind = CheckedRange::Kind::kBody,
                  .crc = contents.checksums ? std::optional(record.crc) : std::nullopt,
                  .record = index});
  // Whatever lies between a descriptor and the next record belongs to nobody.
  AddRange(plan, {.range = {.begin = record.body_end(),
                            .end = std::min(record.end, record.body_end() + kLongestDescriptor)},
                  .kind = CheckedRange::Kind::kDescriptor,
                  .record = index});
}

// The tensors in a storage: the name of the first, and how many more there are.
std::pair<std::string, std::size_t> TensorsIn(const Contents& contents, std::uint32_t storage) {
  std::pair<std::string, std::size_t> found;
  for (const layout::StoredTensor& tensor : contents.tensors) {
    if (tensor.storage != storage) continue;
    if (found.first.empty()) {
      found.first = tensor.name;
    } else {
      ++found.second;
    }
  }
  return found;
}

std::optional<std::uint32_t> StorageOf(const Contents& contents, std::uint32_t record) {
  const auto at = std::ranges::find(contents.storages, record, &layout::StoredStorage::record);
  if (at == contents.storages.end()) return std::nullopt;
  return static_cast<std::uint32_t>(at - contents.storages.begin());
}

Error Damaged(const Contents& contents, const std::string& file, const CheckedRange& range,
              std::uint32_t found) {
  const ArchiveRecord& record = contents.archive.records[range.record];
  const auto storage = StorageOf(contents, range.record);
  const auto [tensor, more] =
      storage ? TensorsIn(contents, *storage) : std::pair<std::string, std::size_t>();
  const std::string others = more == 0 ? "" : fmt::format(" and {} more", more);
  const std::string what =
      tensor.empty() ? fmt::format("record '{}'", record.name)
                     : fmt::format("tensor '{}'{} (record '{}')", tensor, others, record.name);
  return {.code = ErrorCode::kCorrupt,
          .operation = "read",
          .path = file,
          .offset = record.body_offset,
          .entry = tensor.empty() ? record.name : tensor,
          .expected_crc = record.crc,
          .found_crc = found,
          .detail = fmt::format("{} is damaged: its {} bytes have the CRC-32 {:08x}, not {:08x}",
                                what, record.size, found, record.crc),
          .advice = std::string(kAdvice)};
}

Checked Show(const Contents& contents, const std::string& file, const CheckedRange& range,
             std::span<const std::byte> bytes) {
  const ArchiveRecord& record = contents.archive.records[range.record];
  if (range.kind == CheckedRange::Kind::kDescriptor) {
    auto good = layout::CheckDescriptor(record, bytes, file);
    return {.damage = good ? std::nullopt : std::optional(std::move(good.error()))};
  }
  auto good = layout::CheckLocalHeader(record, bytes, file);
  if (good) return {};
  return {.damage = std::move(good.error()), .give_up = layout::SaysOtherBody(record, bytes)};
}

RangeChecker::Plan EmptyPlan(const Contents& contents, const std::string& file) {
  RangeChecker::Plan plan;
  plan.differs = [&contents, file](const CheckedRange& range, std::uint32_t found) {
    return Damaged(contents, file, range, found);
  };
  plan.show = [&contents, file](const CheckedRange& range, std::span<const std::byte> bytes) {
    return Show(contents, file, range, bytes);
  };
  return plan;
}

}  // namespace

RangeChecker::Plan ChecksFor(const Contents& contents, std::span<const std::uint32_t> storages,
                             const std::string& file) {
  RangeChecker::Plan plan = EmptyPlan(contents, file);
  plan.ranges.reserve(3 * storages.size());
  for (const std::uint32_t index : storages) {
    const layout::StoredStorage& storage = contents.storages[index];
    if (contents.kind == Contents::Kind::kTorch) {
      AddRecord(plan, contents, storage.record);
    } else {
      AddRange(plan, {.range = {.begin = storage.offset, .end = storage.offset + storage.size},
                      .record = index});
    }
  }
  return plan;
}

RangeChecker::Plan ChecksForAll(const Contents& contents, const std::string& file) {
  if (contents.kind == Contents::Kind::kSafetensors) {
    std::vector<std::uint32_t> all(contents.storages.size());
    std::iota(all.begin(), all.end(), 0U);
    return ChecksFor(contents, all, file);
  }
  RangeChecker::Plan plan = EmptyPlan(contents, file);
  plan.ranges.reserve(3 * contents.archive.records.size());
  for (std::uint32_t i = 0; i < contents.archive.records.size(); ++i) AddRecord(plan, contents, i);
  return plan;
}

void OnlyDelivered(RangeChecker::Plan& checks) {
  std::vector<CheckedRange> kept;
  std::size_t first = 0;  // the first delivery that may reach into this range or a later one
  for (const CheckedRange& range : checks.ranges) {
    if (range.kind != CheckedRange::Kind::kBody) {
      kept.push_back(range);
      continue;
    }
    std::uint64_t covered = range.range.begin;
    while (first < checks.deliveries.size() &&
           checks.deliveries[first].range.begin < range.range.end) {
      const plan::Range& wanted = checks.deliveries[first++].range;
      const plan::Range part{.begin = std::max(wanted.begin, covered),
                             .end = std::min(wanted.end, range.range.end)};
      if (part.begin >= part.end) continue;  // empty, or within an earlier one
      kept.push_back({.range = part, .kind = range.kind, .record = range.record});
      covered = part.end;
    }
  }
  checks.ranges = std::move(kept);
}

std::vector<plan::Range> WantedRanges(const RangeChecker::Plan& checks) {
  std::vector<plan::Range> wanted;
  for (const CheckedRange& range : checks.ranges) {
    if (!wanted.empty() && wanted.back().end == range.range.begin) {
      wanted.back().end = range.range.end;
    } else {
      wanted.push_back(range.range);
    }
  }
  return wanted;
}

}  // namespace fastpersist::checkpoint
