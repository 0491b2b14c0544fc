// SPDX-License-Identifier: Apache-2.0
#include "testing/streams.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

namespace fastpersist::testing {
namespace {

using layout::Extent;
using layout::RecordDigest;

// late_id: how many records precede the extent.
class DigestEcho final : public layout::LateBytes {
 public:
  void Render(std::uint32_t late_id, std::span<const RecordDigest> records,
              std::span<std::byte> out) const override {
    std::uint64_t all = late_id;
    for (const RecordDigest& record : records.first(late_id)) {
      all = all * 31 + record.crc;
      for (const std::byte byte : record.head) all = all * 31 + std::to_integer<unsigned>(byte);
    }
    for (std::byte& byte : out) {
      all = all * 6364136223846793005 + 1442695040888963407;
      byte = static_cast<std::byte>(all >> 56);
    }
  }
};

// Often on a boundary, one less or one more.
std::uint64_t RandomLength(Random& random, std::uint64_t most) {
  constexpr std::array<std::uint64_t, 6> kBoundaries{8, 512, 4096, 16384, 65536, 262144};
  if (OnceIn(random, 3)) return Between(random, 1, most);
  const std::uint64_t boundary = kBoundaries.at(Between(random, 0, kBoundaries.size() - 1));
  const std::uint64_t length = boundary * Between(random, 1, 3) + Between(random, 0, 2) - 1;
  return std::clamp<std::uint64_t>(length, 1, most);
}

std::size_t RandomResidue(Random& random, std::uint64_t offset) {
  switch (Between(random, 0, 3)) {
    case 0:
      return 0;
    case 1:
      return offset % kLargestAlignment;  // whole blocks can be written in place
    case 2:
      return Between(random, 0, 127) * 512;
    default:
      return Between(random, 0, kLargestAlignment - 1);
  }
}

}  // namespace

std::uint32_t PulledNoise::Add(std::vector<std::byte> body) {
  bodies_.push_back(std::move(body));
  return static_cast<std::uint32_t>(bodies_.size() - 1);
}

Result<void> PulledNoise::Pull(std::uint32_t pull_id, std::uint64_t at,
                               std::span<std::byte> out) const {
  if (pull_id == fail_id && at + out.size() > fail_at) {
    return std::unexpected(
        Error{.operation = "pull", .path = "source", .offset = at, .system_errno = EIO});
  }
  std::ranges::copy(std::span(bodies_.at(pull_id)).subspan(at, out.size()), out.begin());
  return {};
}

std::vector<std::byte> TestStreamBuilder::Noise(std::uint64_t length) {
  std::vector<std::byte> noise(length);
  FillWithNoise(noise, random_);
  return noise;
}

TestStreamBuilder& TestStreamBuilder::Memory(std::uint64_t length, std::size_t residue) {
  const AlignedMemory& memory = memory_.emplace_back(length, residue);
  memory.FillWithNoise(random_);
  builder_.AddMemory(memory.bytes(), records_++);
  return *this;
}

TestStreamBuilder& TestStreamBuilder::GeneratedBody(std::uint64_t length) {
  builder_.AddGenerated(Noise(length), records_++);
  return *this;
}

TestStreamBuilder& TestStreamBuilder::Generated(std::uint64_t length) {
  builder_.AddGenerated(Noise(length));
  return *this;
}

TestStreamBuilder& TestStreamBuilder::Late(std::uint64_t length) {
  builder_.AddLate(length, records_);
  return *this;
}

TestStreamBuilder& TestStreamBuilder::LateBody(std::uint64_t length) {
  builder_.AddLate(length, records_, records_);
  ++records_;
  return *this;
}

TestStreamBuilder& TestStreamBuilder::Pulled(std::uint64_t length) {
  builder_.AddPulled({.pull_id = pulled_->Add(Noise(length)), .length = length}, records_++);
  return *this;
}

TestStream TestStreamBuilder::Finish() && {
  TestStream made{.stream = std::move(builder_).Finish(records_, std::make_shared<DigestEcho>()),
                  .memory = std::move(memory_),
                  .pulled = std::move(pulled_)};
  made.stream.set_pulled(made.pulled);
  return made;
}

TestStream RandomTestStream(Random& random, std::uint64_t bytes) {
  TestStreamBuilder builder(random());
  while (builder.offset() < bytes) {
    const std::uint64_t length = RandomLength(random, bytes - builder.offset());
    switch (Between(random, 0, 8)) {
      case 0:
        builder.Generated(length);
        break;
      case 1:
        builder.GeneratedBody(length);
        break;
      case 2:
        builder.Late(std::min<std::uint64_t>(length, 5000));
        break;
      case 3:
        builder.LateBody(std::min<std::uint64_t>(length, 100));
        break;
      case 4:
        builder.Pulled(length);
        break;
      default:
        builder.Memory(length, RandomResidue(random, builder.offset()));
    }
  }
  return std::move(builder).Finish();
}

std::uint32_t PlainCrc32(std::span<const std::byte> bytes) {
  std::uint32_t crc = 0xFFFFFFFF;
  for (const std::byte byte : bytes) {
    crc ^= std::to_integer<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xEDB88320 : 0);
  }
  return ~crc;
}

PlainRendering RenderPlainly(const layout::Stream& stream) {
  PlainRendering rendering;
  rendering.digests.resize(stream.record_count());
  for (const Extent& extent : stream.extents()) {
    std::vector<std::byte> bytes(extent.length);
    if (extent.kind == Extent::Kind::kLate) {
      stream.late()->Render(extent.late_id, rendering.digests, bytes);
    } else if (extent.kind == Extent::Kind::kPulled) {
      (void)stream.pulled()->Pull(extent.pull_id, 0, bytes);
    } else {
      std::copy_n(extent.bytes, extent.length, bytes.begin());
    }
    if (extent.body_of != layout::kNoRecord) {
      RecordDigest& digest = rendering.digests[extent.body_of];
      digest.crc = PlainCrc32(bytes);
      std::copy_n(bytes.begin(), std::min(bytes.size(), digest.head.size()), digest.head.begin());
    }
    rendering.bytes.insert(rendering.bytes.end(), bytes.begin(), bytes.end());
  }
  return rendering;
}

}  // namespace fastpersist::testing
