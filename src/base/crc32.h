// SPDX-License-Identifier: Apache-2.0
// CRC-32 as ZIP, gzip and PNG define it (polynomial 0xEDB88320, reflected, inverted), computed by
// ISA-L at memory speed, and a copy that computes it in the same pass over the cache.
//
// All functions are pure apart from the destination, and thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fastpersist::base {

/// Extends crc (0 for the first piece) by the bytes.
[[nodiscard]] std::uint32_t Crc32(std::span<const std::byte> bytes, std::uint32_t crc = 0);

/// Copies source to destination and extends crc by the bytes. The stores bypass the cache where the
/// processor can, because nothing on this side reads the destination again. The ranges must not
/// overlap; destination.size() >= source.size().
[[nodiscard]] std::uint32_t CopyAndCrc32(std::span<std::byte> destination,
                                         std::span<const std::byte> source, std::uint32_t crc = 0);

/// The CRC-32 of two pieces put together, from theirs and the length of the second; the bytes are
/// not looked at.
[[nodiscard]] std::uint32_t CombineCrc32(std::uint32_t first, std::uint32_t second,
                                         std::uint64_t second_length);

}  // namespace fastpersist::base
