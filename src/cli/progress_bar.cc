// SPDX-License-Identifier: Apache-2.0
#include "cli/progress_bar.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "cli/terminal.h"

namespace fastpersist::cli {
namespace {

constexpr std::chrono::milliseconds kPatience{1000};
constexpr std::chrono::milliseconds kBetween{100};
constexpr std::size_t kCells = 30;

std::atomic<bool> shown = false;

// A terminal that can go back to the beginning of its line.
bool CanBeShown() {
  const char* kind = std::getenv("TERM");
  return StderrIsTerminal() && kind != nullptr && std::string_view(kind) != "dumb";
}

void Draw(std::string_view text) {
  // What cannot be drawn is not worth a word.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace

ProgressBar::ProgressBar(std::string label)
    : label_(std::move(label)), enabled_(CanBeShown()), next_(start_ + kPatience) {}

void ProgressBar::Update(std::uint64_t done, std::uint64_t all) {
  if (Clock::now() >= next_) Show(done, all);
}

void ProgressBar::Show(std::uint64_t done, std::uint64_t all) {
  if (!enabled_ || all == 0) return;
  const auto now = Clock::now();
  next_ = now + kBetween;
  const double share = std::min(1.0, static_cast<double>(done) / static_cast<double>(all));
  const auto cells = static_cast<std::size_t>(share * kCells);
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const std::string bar = std::string(cells, '#') + std::string(kCells - cells, '.');
  shown = true;
  Draw(fmt::format("\r\x1b[K{} [{}] {:3.0f} %  {}", label_, bar, share * 100,
                   RateText(done, seconds)));
}

void ProgressBar::Hide() {
  if (shown.exchange(false)) Draw("\r\x1b[K");
}

}  // namespace fastpersist::cli
