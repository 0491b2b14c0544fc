// SPDX-License-Identifier: Apache-2.0
#include "testing/seed.h"

#include <fmt/format.h>

#include <cstdlib>
#include <iostream>
#include <string>

namespace fastpersist::testing {
namespace {

std::uint64_t ChooseSeed() {
  const char* fixed = std::getenv("FASTPERSIST_SEED");
  const std::uint64_t seed =
      fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
  std::cout << fmt::format("seed {} (FASTPERSIST_SEED={} replays it)\n", seed, seed);
  return seed;
}

}  // namespace

Seed::Seed() : value_(ChooseSeed()), trace_(__FILE__, __LINE__, fmt::format("seed {}", value_)) {}

std::uint64_t Between(Random& random, std::uint64_t low, std::uint64_t high) {
  return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
}

bool OnceIn(Random& random, std::uint64_t times) { return Between(random, 1, times) == 1; }

}  // namespace fastpersist::testing
