// SPDX-License-Identifier: Apache-2.0
#include "fastpersist/options.h"

#include <fmt/format.h>

#include <array>
#include <utility>

namespace fastpersist {
inline namespace v0 {
namespace {

constexpr std::array<std::pair<Engine, std::string_view>, 5> kEngines{{
    {Engine::kAuto, "auto"},
    {Engine::kUring, "uring"},
    {Engine::kLibaio, "libaio"},
    {Engine::kThreads, "threads"},
    {Engine::kBuffered, "buffered"},
}};
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kMaxBlock = std::uint64_t{1} << 30;
constexpr std::uint32_t kMaxDepth = 256;

std::unexpected<Error> Refuse(std::string detail) {
  return std::unexpected(Error{
      .code = ErrorCode::kInvalidArgument, .operation = "options", .detail = std::move(detail)});
}

}  // namespace

std::string_view EngineName(Engine engine) {
  for (const auto& [value, name] : kEngines) {
    if (value == engine) return name;
  }
  return "unknown";
}

std::optional<Engine> ParseEngine(std::string_view name) {
  for (const auto& [value, known] : kEngines) {
    if (known == name) return value;
  }
  return std::nullopt;
}

Result<void> Validate(const Options& options) {
  if (const auto block = options.block_bytes;
      block && (*block == 0 || *block % kPage != 0 || *block > kMaxBlock)) {
    return Refuse(
        fmt::format("block_bytes {} is not a multiple of {} up to {}", *block, kPage, kMaxBlock));
  }
  if (const auto depth = options.queue_depth; depth && (*depth == 0 || *depth > kMaxDepth)) {
    return Refuse(fmt::format("queue_depth {} is not between 1 and {}", *depth, kMaxDepth));
  }
  if (const auto staging = options.staging_bytes; staging && *staging < kPage) {
    return Refuse(fmt::format("staging_bytes {} is below {}", *staging, kPage));
  }
  return {};
}

}  // namespace v0
}  // namespace fastpersist
