// SPDX-License-Identifier: Apache-2.0
#include "cli/terminal.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "base/utf8.h"
#include "cli/progress_bar.h"

namespace fastpersist::cli {
namespace {

// 0, or the errno of the write that failed.
int WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {  // somebody made the terminal non-blocking
      pollfd ready{.fd = fd, .events = POLLOUT, .revents = 0};
      (void)::poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

// How many bytes of valid UTF-8 begin with this one.
std::size_t SequenceLength(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xE0) return 2;
  return lead < 0xF0 ? 3 : 4;
}

char32_t CodePoint(std::string_view sequence) {
  const auto lead = static_cast<unsigned char>(sequence[0]);
  if (sequence.size() == 1) return lead;
  char32_t point = lead & (0x7FU >> sequence.size());
  for (const char next : sequence.substr(1)) {
    point = (point << 6U) | (static_cast<unsigned char>(next) & 0x3FU);
  }
  return point;
}

// Controls, and what changes the order or the visibility of its neighbours.
bool IsUnsafe(char32_t point) {
  return point < 0x20 || (point >= 0x7F && point < 0xA0) || point == 0xAD || point == 0x061C ||
         (point >= 0x200B && point <= 0x200F) || (point >= 0x2028 && point <= 0x202E) ||
         (point >= 0x2060 && point <= 0x206F) || point == 0xFEFF ||
         (point >= 0xE0000 && point <= 0xE007F);
}

void AppendEscaped(std::string& out, char32_t point) {
  if (point == '\n') {
    out += "\\n";
  } else if (point == '\t') {
    out += "\\t";
  } else if (point < 0x80) {
    out += fmt::format("\\x{:02x}", static_cast<std::uint32_t>(point));
  } else if (point < 0x10000) {
    out += fmt::format("\\u{:04x}", static_cast<std::uint32_t>(point));
  } else {
    out += fmt::format("\\U{:08x}", static_cast<std::uint32_t>(point));
  }
}

// Characters, which is columns for nearly all names.
std::size_t Width(std::string_view text) {
  return static_cast<std::size_t>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80; }));
}

}  // namespace

std::string Escaped(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = SequenceLength(static_cast<unsigned char>(text[0]));
    const std::string_view sequence = text.substr(0, length);
    if (sequence.size() < length || !base::IsUtf8(sequence)) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
      text.remove_prefix(1);
      continue;
    }
    const char32_t point = CodePoint(sequence);
    if (IsUnsafe(point)) {
      AppendEscaped(out, point);
    } else {
      out += sequence;
    }
    text.remove_prefix(length);
  }
  return out;
}

std::string Grouped(std::uint64_t number) {
  std::string digits = fmt::format("{}", number);
  for (std::size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, 1, ',');
  return digits;
}

std::string Counted(std::uint64_t number, std::string_view noun) {
  return fmt::format("{} {}{}", Grouped(number), noun, number == 1 ? "" : "s");
}

std::string SizeText(std::uint64_t bytes) {
  constexpr std::array kUnits{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return Counted(bytes, "byte");
  double size = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; size >= 1023.95 && unit + 1 < kUnits.size(); ++unit) size /= 1024;
  return fmt::format("{:.1f} {}", size, kUnits.at(unit));
}

std::string RateText(std::uint64_t bytes, double seconds) {
  if (seconds <= 0) return "- GB/s";
  return fmt::format("{:.2f} GB/s", static_cast<double>(bytes) / seconds / 1e9);
}

std::string Table::Text() const {
  std::vector<std::size_t> widths(alignment_.size());
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Width(row[i]));
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - Width(row[i]), ' ');
      line += (i == 0 ? "" : "  ");
      line += alignment_[i] == 'r' ? padding + row[i] : row[i] + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

bool StdoutIsTerminal() { return ::isatty(STDOUT_FILENO) == 1; }
bool StderrIsTerminal() { return ::isatty(STDERR_FILENO) == 1; }

ExitStatus Print(std::string_view text, ExitStatus status) {
  const int failed = WriteAll(STDOUT_FILENO, text);
  if (failed == 0 || failed == EPIPE) return status;
  Complain(fmt::format("cannot write to the standard output: {}",
                       std::generic_category().message(failed)));
  return ExitStatus::kStorage;
}

void Complain(std::string_view sentence) {
  ProgressBar::Hide();
  (void)WriteAll(STDERR_FILENO, fmt::format("fastpersist: {}\n", Escaped(sentence)));
}

ExitStatus Fail(const Error& error) {
  Complain(error.Message());
  return StatusOf(error.code);
}

}  // namespace fastpersist::cli
