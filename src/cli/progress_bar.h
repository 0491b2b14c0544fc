// SPDX-License-Identifier: Apache-2.0
// One line on stderr that shows how far a long command has come. Only on a terminal, and only once
// the command has taken a second or begins what is known to take long; everything else sees nothing
// of it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace fastpersist::cli {

/// At most one at a time. Used by one thread.
class ProgressBar {
 public:
  explicit ProgressBar(std::string label);
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  ProgressBar(ProgressBar&&) = delete;
  ProgressBar& operator=(ProgressBar&&) = delete;
  /// Takes the line away.
  ~ProgressBar() { Hide(); }

  /// Cheap: draws ten times a second at most.
  void Update(std::uint64_t done, std::uint64_t all);

  /// Draws at once: before work that is known to be long and tells nothing on the way.
  void Show(std::uint64_t done, std::uint64_t all);

  /// Takes the line away, if one is shown; the next Update draws it again. Thread-safe.
  static void Hide();

 private:
  using Clock = std::chrono::steady_clock;

  std::string label_;
  bool enabled_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point next_;
};

}  // namespace fastpersist::cli
