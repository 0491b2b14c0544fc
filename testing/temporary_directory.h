// SPDX-License-Identifier: Apache-2.0
// A directory that a test owns, and the few things that tests do with files. Failures end the test
// program: they mean that the machine cannot run the test.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace fastpersist::testing {

class TemporaryDirectory {
 public:
  /// Made in the given directory, or where GoogleTest keeps temporary files. Mode 0755.
  explicit TemporaryDirectory(const std::filesystem::path& parent = {});
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  TemporaryDirectory(TemporaryDirectory&&) = delete;
  TemporaryDirectory& operator=(TemporaryDirectory&&) = delete;
  /// Removes it with all that is in it.
  ~TemporaryDirectory();

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::string operator/(std::string_view name) const { return path_ / name; }
  /// What is in it, sorted.
  [[nodiscard]] std::vector<std::string> names() const;
  /// Those of names() that are temporaries of saves.
  [[nodiscard]] std::vector<std::string> temporaries() const;

 private:
  std::filesystem::path path_;
};

/// The whole file. An empty string for one that cannot be read.
[[nodiscard]] std::string ReadFile(const std::string& path);
/// Makes or replaces a file with exactly this mode, whatever the umask.
void WriteFile(const std::string& path, std::string_view content, mode_t mode = 0644);
/// Permission bits, set-id and sticky bits; of the link's target.
[[nodiscard]] mode_t ModeOf(const std::string& path);

}  // namespace fastpersist::testing
