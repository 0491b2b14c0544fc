// SPDX-License-Identifier: Apache-2.0
#include "testing/generation_file.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>

#include "base/crc32.h"

namespace fastpersist::testing {
namespace {

struct Header {
  std::array<char, 8> magic{'f', 'p', '-', 'g', 'e', 'n', '0', '1'};
  std::uint64_t generation = 0;
  std::uint64_t size = 0;
};

std::uint32_t CrcOf(std::string_view bytes) {
  return base::Crc32(std::as_bytes(std::span(bytes.data(), bytes.size())));
}

}  // namespace

std::string GenerationFile(std::uint64_t generation, std::size_t about_bytes) {
  const std::size_t rounded = std::max<std::size_t>(about_bytes, 64) / 512 * 512;
  const Header header{.generation = generation, .size = rounded + 64 + generation % 448};
  std::string content(header.size, '\0');
  std::mt19937_64 random(generation);
  for (std::size_t at = 0; at + sizeof(std::uint64_t) <= content.size();
       at += sizeof(std::uint64_t)) {
    const std::uint64_t number = random();
    std::memcpy(content.data() + at, &number, sizeof number);
  }
  std::memcpy(content.data(), &header, sizeof header);
  const std::size_t body = content.size() - sizeof(std::uint32_t);
  const std::uint32_t crc = CrcOf(std::string_view(content).substr(0, body));
  std::memcpy(content.data() + body, &crc, sizeof crc);
  return content;
}

std::optional<std::uint64_t> GenerationOf(std::string_view content) {
  Header header;
  if (content.size() < sizeof header + sizeof(std::uint32_t)) return std::nullopt;
  std::memcpy(&header, content.data(), sizeof header);
  if (header.magic != Header{}.magic || header.size != content.size()) return std::nullopt;
  const std::size_t body = content.size() - sizeof(std::uint32_t);
  std::uint32_t crc = 0;
  std::memcpy(&crc, content.data() + body, sizeof crc);
  if (crc != CrcOf(content.substr(0, body))) return std::nullopt;
  return header.generation;
}

layout::Stream StreamOf(std::string_view content) {
  layout::StreamBuilder builder;
  builder.AddMemory(std::as_bytes(std::span(content.data(), content.size())));
  return std::move(builder).Finish(0, nullptr);
}

}  // namespace fastpersist::testing
