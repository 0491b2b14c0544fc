// SPDX-License-Identifier: Apache-2.0
#include "base/crc32.h"

#include <isa-l/crc.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>

#include "base/align.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastpersist::base {
namespace {

// Small enough that the second pass over a piece hits the L1 data cache.
constexpr std::size_t kCachePiece = std::size_t{16} << 10;
// Below this the destination is better left in the cache: it shares a block with other pieces.
constexpr std::size_t kStreamingThreshold = std::size_t{256} << 10;

using CopyFunction = void (*)(std::byte*, const std::byte*, std::size_t);

void CachedCopy(std::byte* destination, const std::byte* source, std::size_t size) {
  std::memcpy(destination, source, size);
}

#if defined(__x86_64__)
constexpr std::size_t kVector = 32;

// Precondition: destination is a multiple of kVector; size is a multiple of 4 * kVector.
__attribute__((target("avx2"))) void StreamingCopy(std::byte* destination, const std::byte* source,
                                                   std::size_t size) {
  for (std::size_t i = 0; i < size; i += 4 * kVector) {
    const auto* from = reinterpret_cast<const __m256i*>(source + i);
    auto* to = reinterpret_cast<__m256i*>(destination + i);
    const __m256i a = _mm256_loadu_si256(from);
    const __m256i b = _mm256_loadu_si256(from + 1);
    const __m256i c = _mm256_loadu_si256(from + 2);
    const __m256i d = _mm256_loadu_si256(from + 3);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
    _mm256_stream_si256(to + 2, c);
    _mm256_stream_si256(to + 3, d);
  }
}

bool HasStreamingStores() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}

// Streaming stores become visible to other agents (the device) only after a fence.
void FenceStreamingStores() { _mm_sfence(); }
#else
constexpr std::size_t kVector = 1;
void StreamingCopy(std::byte* destination, const std::byte* source, std::size_t size) {
  CachedCopy(destination, source, size);
}
bool HasStreamingStores() { return false; }
void FenceStreamingStores() {}
#endif

std::uint32_t CopyPieces(std::byte* destination, const std::byte* source, std::size_t size,
                         std::uint32_t crc, CopyFunction copy) {
  while (size > 0) {
    const std::size_t piece = std::min(size, kCachePiece);
    crc = Crc32({source, piece}, crc);
    copy(destination, source, piece);
    destination += piece;
    source += piece;
    size -= piece;
  }
  return crc;
}

}  // namespace

std::uint32_t Crc32(std::span<const std::byte> bytes, std::uint32_t crc) {
  return crc32_gzip_refl(crc, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

std::uint32_t CopyAndCrc32(std::span<std::byte> destination, std::span<const std::byte> source,
                           std::uint32_t crc) {
  std::byte* to = destination.data();
  const std::byte* from = source.data();
  std::size_t size = source.size();
  if (size < kStreamingThreshold || !HasStreamingStores()) {
    return CopyPieces(to, from, size, crc, CachedCopy);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  const std::size_t head = AlignUp(address, kVector) - address;
  crc = CopyPieces(to, from, head, crc, CachedCopy);
  const std::size_t body = AlignDown(size - head, 4 * kVector);
  crc = CopyPieces(to + head, from + head, body, crc, StreamingCopy);
  const std::size_t done = head + body;
  crc = CopyPieces(to + done, from + done, size - done, crc, CachedCopy);
  FenceStreamingStores();
  return crc;
}

std::uint32_t CombineCrc32(std::uint32_t first, std::uint32_t second, std::uint64_t second_length) {
  return static_cast<std::uint32_t>(
      ::crc32_combine(first, second, static_cast<z_off_t>(second_length)));
}

}  // namespace fastpersist::base
