// SPDX-License-Identifier: Apache-2.0
// Seeds of random tests. A failure names the seed, and FASTPERSIST_SEED=N replays the run.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>

namespace fastpersist::testing {

using Random = std::mt19937_64;

/// Chooses a seed, prints it, and attaches it to every failure for as long as it lives.
class Seed {
 public:
  Seed();

  [[nodiscard]] std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_;
  ::testing::ScopedTrace trace_;
};

/// A number in [low, high], each with the same probability.
[[nodiscard]] std::uint64_t Between(Random& random, std::uint64_t low, std::uint64_t high);

/// True once in `times` calls on average.
[[nodiscard]] bool OnceIn(Random& random, std::uint64_t times);

}  // namespace fastpersist::testing
