// SPDX-License-Identifier: Apache-2.0
#include "partition/slice.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/crc32.h"

namespace fastpersist::partition {
namespace {

using layout::Extent;
using layout::RecordDigest;

// Cuts one slice, extent by extent.
class Cutter {
 public:
  Cutter(const layout::Stream& whole, plan::Range range)
      : whole_(whole), range_(range), known_(whole.record_count(), range.begin == 0) {}

  Slice Run() && {
    for (std::uint32_t i = First(); i < whole_.extents().size(); ++i) {
      const Extent& extent = whole_.extents()[i];
      if (extent.offset >= range_.end || range_.begin == range_.end) break;
      Add(extent, i);
    }
    slice_.stream = std::move(builder_).Finish(whole_.record_count(), whole_.shared_late());
    return std::move(slice_);
  }

 private:
  [[nodiscard]] std::uint32_t First() const {
    const auto found = std::ranges::upper_bound(whole_.extents(), range_.begin, {}, &Extent::end);
    return static_cast<std::uint32_t>(found - whole_.extents().begin());
  }

  void Add(const Extent& extent, std::uint32_t index) {
    const std::uint64_t begin = std::max(extent.offset, range_.begin);
    const std::uint64_t end = std::min(extent.end(), range_.end);
    const std::uint64_t skip = begin - extent.offset;
    const std::uint64_t length = end - begin;
    const bool all_of_it = length == extent.length;
    if (extent.kind == Extent::Kind::kLate) {
      AddLate(extent, index, {.offset = builder_.offset(), .length = length, .skip = skip});
      return;
    }
    assert(extent.kind != Extent::Kind::kPulled);
    const std::span bytes(extent.bytes + skip, length);
    if (extent.kind == Extent::Kind::kMemory) {
      builder_.AddMemory(bytes, extent.body_of);
    } else {
      builder_.AddGenerated(bytes, extent.body_of);
    }
    if (extent.body_of == layout::kNoRecord) return;
    slice_.fragments.push_back({.record = extent.body_of, .offset = skip, .length = length});
    known_[extent.body_of] = all_of_it;
  }

  // Rendered on the way if everything that it depends on is in this slice, and all of it is, too.
  void AddLate(const Extent& extent, std::uint32_t index, Patch patch) {
    const bool all_of_it = patch.length == extent.length;
    if (all_of_it && IsKnown(extent)) {
      builder_.AddLate(extent.length, extent.late_id, extent.body_of);
      if (extent.body_of == layout::kNoRecord) return;
      slice_.fragments.push_back({.record = extent.body_of, .length = extent.length});
      known_[extent.body_of] = true;
      return;
    }
    patch.extent = index;
    slice_.patches.push_back(patch);
    const std::vector<std::byte> zeros(patch.length);
    builder_.AddGenerated(zeros);
    if (extent.body_of != layout::kNoRecord) known_[extent.body_of] = false;
  }

  [[nodiscard]] bool IsKnown(const Extent& extent) const {
    const auto record = whole_.late()->NeedsOnly(extent.late_id);
    return record ? known_[*record] : range_.begin == 0;
  }

  const layout::Stream& whole_;
  plan::Range range_;
  std::vector<bool> known_;  // the whole body was filled in this slice
  layout::StreamBuilder builder_;
  Slice slice_;
};

}  // namespace

Slice Cut(const layout::Stream& whole, plan::Range range) {
  assert(range.begin <= range.end && range.end <= whole.size());
  return Cutter(whole, range).Run();
}

std::vector<FragmentDigest> DigestsOf(const Slice& slice, std::span<const RecordDigest> digests) {
  std::vector<FragmentDigest> found;
  found.reserve(slice.fragments.size());
  for (const Fragment& fragment : slice.fragments) {
    found.push_back({.fragment = fragment, .digest = digests[fragment.record]});
  }
  return found;
}

std::vector<RecordDigest> Combine(std::uint32_t record_count,
                                  std::span<const std::vector<FragmentDigest>> slices) {
  std::vector<RecordDigest> all(record_count);
  for (const auto& slice : slices) {
    for (const auto& [fragment, digest] : slice) {
      RecordDigest& whole = all[fragment.record];
      whole.crc = base::CombineCrc32(whole.crc, digest.crc, fragment.length);
      if (fragment.offset >= whole.head.size()) continue;
      const std::size_t count =
          std::min<std::uint64_t>(whole.head.size() - fragment.offset, fragment.length);
      std::copy_n(digest.head.begin(), count,
                  whole.head.begin() + static_cast<std::ptrdiff_t>(fragment.offset));
    }
  }
  return all;
}

std::vector<std::byte> RenderPatch(const layout::Stream& whole, const Patch& patch,
                                   std::span<RecordDigest> digests) {
  const Extent& extent = whole.extents()[patch.extent];
  std::vector<std::byte> bytes(extent.length);
  whole.late()->Render(extent.late_id, digests, bytes);
  if (extent.body_of != layout::kNoRecord) {
    RecordDigest& digest = digests[extent.body_of];
    digest.crc = base::Crc32(bytes);
    std::copy_n(bytes.begin(), std::min(bytes.size(), digest.head.size()), digest.head.begin());
  }
  bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(patch.skip));
  bytes.resize(patch.length);
  return bytes;
}

// A CRC is linear: what other bytes change in it does not depend on those before them, and is moved
// by those behind them.
std::uint32_t PatchedCrc(std::uint32_t crc, std::uint64_t size, const Patch& patch,
                         std::span<const std::byte> bytes) {
  const std::vector<std::byte> zeros(bytes.size());
  const std::uint32_t change = base::Crc32(bytes) ^ base::Crc32(zeros);
  const std::uint64_t behind = size - patch.offset - patch.length;
  return crc ^ base::CombineCrc32(change, 0, behind);
}

}  // namespace fastpersist::partition
