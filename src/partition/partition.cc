// SPDX-License-Identifier: Apache-2.0
#include "partition/partition.h"

#include <algorithm>
#include <cassert>
#include <numeric>

#include "base/align.h"

namespace fastpersist::partition {
namespace {

// Products of two 64-bit numbers; integers, so that every machine rounds alike.
__extension__ using Wide = unsigned __int128;

// Whole blocks of align bytes; the last one of a stream may be short.
struct Blocks {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// Cuts the blocks in proportion to the weights. Returns where each weight's share begins, and the
// end: one more than there are weights.
std::vector<std::uint64_t> Shares(Blocks blocks, std::span<const std::uint64_t> weights) {
  const Wide all = std::accumulate(weights.begin(), weights.end(), Wide{0});
  assert(all > 0 || blocks.begin == blocks.end);
  std::vector<std::uint64_t> bounds{blocks.begin};
  Wide before = 0;
  for (const std::uint64_t weight : weights) {
    before += weight;
    const Wide part = all == 0 ? Wide{0} : (blocks.end - blocks.begin) * before / all;
    bounds.push_back(blocks.begin + static_cast<std::uint64_t>(part));
  }
  return bounds;
}

// The bounds of all writers, in blocks. A head or tail that does not fit into its writer's share
// takes that writer out of the division; that leaves less for the other end's writer, who may have
// to be taken out in turn.
std::vector<std::uint64_t> Bounds(std::uint64_t head_end, std::uint64_t tail_begin,
                                  std::uint64_t end, std::span<const std::uint64_t> weights) {
  bool head_alone = false;
  bool tail_alone = false;
  for (;;) {
    const Blocks rest{.begin = head_alone ? head_end : 0, .end = tail_alone ? tail_begin : end};
    const std::size_t first = head_alone ? 1 : 0;
    const std::size_t count = weights.size() - first - (tail_alone ? 1 : 0);
    std::vector<std::uint64_t> bounds = Shares(rest, weights.subspan(first, count));
    if (head_alone) bounds.insert(bounds.begin(), 0);
    if (tail_alone) bounds.push_back(end);
    if (!head_alone && bounds.at(1) < head_end) {
      head_alone = true;
    } else if (!tail_alone && bounds.at(bounds.size() - 2) > tail_begin) {
      tail_alone = true;
    } else {
      return bounds;
    }
  }
}

}  // namespace

std::vector<plan::Range> Divide(const Divisible& stream, std::span<const std::uint64_t> weights,
                                std::uint64_t align) {
  assert(!weights.empty());
  assert(stream.head_end <= stream.tail_begin && stream.tail_begin <= stream.size);
  const std::uint64_t end = base::AlignUp(stream.size, align) / align;
  const std::uint64_t head_end = base::AlignUp(stream.head_end, align) / align;
  const bool has_tail = stream.tail_begin < stream.size;
  const std::uint64_t tail_begin = has_tail ? stream.tail_begin / align : end;
  std::vector<plan::Range> ranges(weights.size(), {.begin = stream.size, .end = stream.size});
  if (weights.size() == 1 || head_end > tail_begin) {
    ranges.front() = {.begin = 0, .end = stream.size};
    return ranges;
  }
  std::vector<std::uint64_t> used(weights.begin(), weights.end());
  if (std::ranges::all_of(used, [](std::uint64_t weight) { return weight == 0; })) {
    std::ranges::fill(used, 1);
  }
  const std::vector<std::uint64_t> bounds = Bounds(head_end, tail_begin, end, used);
  const auto at = [&](std::uint64_t block) {
    return block == end ? stream.size : block * align;  // the last block may be short
  };
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    ranges[i] = {.begin = at(bounds[i]), .end = at(bounds[i + 1])};
  }
  return ranges;
}

std::size_t TailOwner(std::span<const plan::Range> ranges) {
  const auto filled =
      std::ranges::find_if(ranges.rbegin(), ranges.rend(),
                           [](const plan::Range& range) { return range.begin < range.end; });
  return filled == ranges.rend() ? 0 : static_cast<std::size_t>(ranges.rend() - filled) - 1;
}

}  // namespace fastpersist::partition
