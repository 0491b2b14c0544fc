// SPDX-License-Identifier: Apache-2.0
#include "testing/process_state.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace fastpersist::testing {
namespace {

// A line such as "RssAnon:	  1234 kB" of /proc/self/status.
std::uint64_t StatusField(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ':')) return std::stoull(line.substr(field.size() + 1));
  }
  return 0;
}

}  // namespace

std::vector<std::string> OpenFiles() {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto leads_to = std::filesystem::read_symlink(entry.path(), error);
    const bool is_this_listing = leads_to.native().ends_with("/fd");
    if (!error && !is_this_listing) files.push_back(leads_to);
  }
  std::ranges::sort(files);
  return files;
}

unsigned ThreadCount() {
  unsigned count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (!name.empty() && !name.starts_with("iou-")) ++count;  // empty: it ended meanwhile
  }
  return count;
}

std::uint64_t ResidentBytes() { return StatusField("RssAnon") * 1024; }

ScopedUmask::ScopedUmask(mode_t mask) : before_(::umask(mask)) {}

ScopedUmask::~ScopedUmask() { ::umask(before_); }

}  // namespace fastpersist::testing
