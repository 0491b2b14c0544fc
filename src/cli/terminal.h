// SPDX-License-Identifier: Apache-2.0
// Text for people: what is written to stdout and stderr, and how numbers and foreign names look.
// Names come out of files that may be hostile, so nothing in them reaches a terminal as a command.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cli/exit_status.h"
#include "fastpersist/error.h"

namespace fastpersist::cli {

/// Control characters, bytes that are not UTF-8, and characters that reorder or hide text become
/// \n, \x1b, \u202e and the like.
[[nodiscard]] std::string Escaped(std::string_view text);

/// "154,389,504".
[[nodiscard]] std::string Grouped(std::uint64_t number);
/// "1 tensor", "1,000 tensors".
[[nodiscard]] std::string Counted(std::uint64_t number, std::string_view noun);
/// "147.2 MiB".
[[nodiscard]] std::string SizeText(std::uint64_t bytes);
/// "2.31 GB/s", in units of 10^9.
[[nodiscard]] std::string RateText(std::uint64_t bytes, double seconds);

/// Rows of cells, aligned in columns. Cells are escaped by whoever fills them.
class Table {
 public:
  /// right_aligned: one character for each column, 'r' or 'l'.
  explicit Table(std::string alignment) : alignment_(std::move(alignment)) {}
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  [[nodiscard]] std::string Text() const;

 private:
  std::string alignment_;
  std::vector<std::vector<std::string>> rows_;
};

[[nodiscard]] bool StdoutIsTerminal();
[[nodiscard]] bool StderrIsTerminal();

/// Writes everything to stdout and returns status. A reader that has gone (a closed pipe) is no
/// error; anything else, such as a full disk, is complained about and becomes kStorage.
[[nodiscard]] ExitStatus Print(std::string_view text, ExitStatus status = ExitStatus::kGood);

/// "fastpersist: <sentence>" on stderr, escaped.
void Complain(std::string_view sentence);
/// Complains and returns the status that goes with the error.
[[nodiscard]] ExitStatus Fail(const Error& error);

}  // namespace fastpersist::cli
