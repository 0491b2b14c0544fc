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
// since one that copies sets the pace. They are listed by name, as links to folders like this one.
bool AnyPartCopies(const fs::path& folder, int levels) {
  if (levels == 0) return false;
  std::error_code error;
  for (auto part = fs::directory_iterator(folder / "slaves", error);
       !error && part != fs::directory_iterator(); part.increment(error)) {
    if (NameCopies(part->path().filename().string())) return true;
    if (AnyPartCopies(part->path(), levels - 1)) return true;
  }
  return false;
}

}  // namespace

bool ProcessorCopies(dev_t device, const std::string& sysfs) {
  const fs::path link = fmt::format("{}/dev/block/{}:{}", sysfs, ::major(device), ::minor(device));
  std::error_code error;
  const fs::path folder = fs::read_symlink(link, error);
  return !error && (NameCopies(folder.filename().string()) || AnyPartCopies(link, kMaxLevels));
}

}  // namespace fastpersist::file
