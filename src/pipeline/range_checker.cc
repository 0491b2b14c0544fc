// SPDX-License-Identifier: Apache-2.0
#include "pipeline/range_checker.h"

#include <algorithm>
#include <cstring>

#include "base/crc32.h"

namespace fastpersist::pipeline {
namespace {

// Short enough that what the checksum has read is still in the cache when it is copied.
constexpr std::size_t kChunk = std::size_t{128} << 10;

}  // namespace

void RangeChecker::Restart() { *this = RangeChecker(*plan_); }

bool RangeChecker::Accept(std::uint64_t offset, std::span<const std::byte> bytes) {
  const std::uint64_t end = offset + bytes.size();
  while (range_ < plan_->ranges.size()) {
    const CheckedRange& range = plan_->ranges[range_];
    if (range.range.begin >= end) break;
    const std::uint64_t from = std::max(offset, range.range.begin);
    const std::uint64_t to = std::min(end, range.range.end);
    const auto piece = bytes.subspan(from - offset, to - from);
    const bool last = to == range.range.end;
    if (range.kind == CheckedRange::Kind::kBody) {
      Body(range, from, piece);
      if (last) FinishBody(range);
    } else {
      Frame(range, piece, last);
    }
    if (!last) break;
    ++range_;
    if (gave_up_ || damages_.size() >= plan_->most_damages) return false;
  }
  accepted_ += bytes.size();
  if (plan_->advance) plan_->advance(accepted_);
  return range_ < plan_->ranges.size();
}

void RangeChecker::Body(const CheckedRange& range, std::uint64_t offset,
                        std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto piece = bytes.first(PieceAt(offset, bytes.size()));
    const std::uint64_t end = offset + piece.size();
    Activate(offset, end);
    // Mostly one tensor takes the whole piece: then copying and checksum are one pass.
    const plan::Delivery* only =
        active_.size() == 1 ? &plan_->deliveries[active_.front()] : nullptr;
    std::byte* target = only != nullptr ? only->memory + (offset - only->range.begin) : nullptr;
    if (only != nullptr && target != piece.data() && range.crc) {
      crc_ = base::CopyAndCrc32({target, piece.size()}, piece, crc_);
    } else {
      if (range.crc) crc_ = base::Crc32(piece, crc_);
      CopyOut(offset, piece);
    }
    offset += piece.size();
    bytes = bytes.subspan(piece.size());
  }
}

// How much of the next bytes is looked at as one. While at most one delivery takes part: up to
// where that changes, so that it takes all of them; copying past the cache pays for long pieces.
std::size_t RangeChecker::PieceAt(std::uint64_t offset, std::size_t bytes) {
  Activate(offset, offset + 1);
  if (active_.size() > 1) return std::min(bytes, kChunk);
  std::uint64_t end = offset + bytes;
  if (!active_.empty()) end = std::min(end, plan_->deliveries[active_.front()].range.end);
  if (delivery_ < plan_->deliveries.size()) {
    end = std::min(end, plan_->deliveries[delivery_].range.begin);
  }
  return end - offset;
}

// Those that have a part in [offset, end).
void RangeChecker::Activate(std::uint64_t offset, std::uint64_t end) {
  std::erase_if(active_, [&](std::size_t i) { return plan_->deliveries[i].range.end <= offset; });
  for (; delivery_ < plan_->deliveries.size(); ++delivery_) {
    const plan::Range& range = plan_->deliveries[delivery_].range;
    if (range.begin >= end) break;
    if (range.end > offset && range.begin < range.end) active_.push_back(delivery_);
  }
}

// To every delivery that has a part in these bytes and does not lie there already.
void RangeChecker::CopyOut(std::uint64_t offset, std::span<const std::byte> bytes) {
  const std::uint64_t end = offset + bytes.size();
  for (const std::size_t i : active_) {
    const plan::Delivery& delivery = plan_->deliveries[i];
    const std::uint64_t from = std::max(offset, delivery.range.begin);
    const std::uint64_t to = std::min(end, delivery.range.end);
    std::byte* target = delivery.memory + (from - delivery.range.begin);
    const std::byte* source = bytes.data() + (from - offset);
    if (target != source) std::memcpy(target, source, to - from);
  }
}

void RangeChecker::FinishBody(const CheckedRange& range) {
  if (!range.crc) {
    ++uncompared_;
  } else {
    ++compared_;
    if (crc_ != *range.crc) damages_.push_back(plan_->differs(range, crc_));
  }
  crc_ = 0;
}

void RangeChecker::Frame(const CheckedRange& range, std::span<const std::byte> bytes, bool last) {
  if (!plan_->show) return;
  if (!last || !partial_.empty()) {
    partial_.insert(partial_.end(), bytes.begin(), bytes.end());
    bytes = partial_;
  }
  if (!last) return;
  Checked checked = plan_->show(range, bytes);
  partial_.clear();
  gave_up_ = gave_up_ || (checked.give_up && plan_->may_give_up);
  if (checked.damage) damages_.push_back(*std::move(checked.damage));
}

}  // namespace fastpersist::pipeline
