// SPDX-License-Identifier: Apache-2.0
#include "file/device_kind.h"

#include <fmt/format.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <system_error>

namespace fastpersist::file {
namespace {

namespace fs = std::filesystem;

constexpr std::array<std::string_view, 4> kCopying{"loop", "ram", "zram", "pmem"};
// Devices over devices (a volume on a RAID of partitions) are few levels high.
constexpr int kMaxLevels = 8;

bool NameCopies(const std::string& name) {
  return std::ranges::any_of(kCopying, [&](std::string_view driver) {
    return name.starts_with(driver) && name.size() > driver.size() &&
           name.at(driver.size()) >= '0' && name.at(driver.size()) <= '9';
  });
}

// A partition has its disk's name as a prefix. A volume or RAID is as its parts are: all are asked,
// since one that copies sets the pace.
bool FolderCopies(const fs::path& folder, int levels) {
  if (NameCopies(folder.filename().string())) return true;
  if (levels == 0) return false;
  std::error_code error;
  for (auto part = fs::directory_iterator(folder / "slaves", error);
       !error && part != fs::directory_iterator(); part.increment(error)) {
    std::error_code missing;
    const fs::path below = fs::canonical(part->path(), missing);
    if (!missing && FolderCopies(below, levels - 1)) return true;
  }
  return false;
}

}  // namespace

bool ProcessorCopies(dev_t device, const std::string& sysfs) {
  std::error_code error;
  const fs::path folder = fs::canonical(
      fmt::format("{}/dev/block/{}:{}", sysfs, ::major(device), ::minor(device)), error);
  return !error && FolderCopies(folder, kMaxLevels);
}

}  // namespace fastpersist::file
