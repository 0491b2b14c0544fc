// SPDX-License-Identifier: Apache-2.0
#include "memory/allowance.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <string_view>

namespace fastpersist::memory {
namespace {

namespace fs = std::filesystem;

// What the two versions of control groups call the same things.
struct Names {
  std::string_view limit;
  std::string_view usage;
  std::string_view reclaimable;  // a line of memory.stat
};
constexpr Names kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr Names kVersion2{"memory.max", "memory.current", "inactive_file"};
// Version 1 says "no limit" by a number near 2^63, version 2 by the word "max".
constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;

std::optional<std::uint64_t> ReadNumber(const fs::path& file) {
  std::ifstream in(file);
  std::uint64_t number = 0;
  if (!(in >> number)) return std::nullopt;
  return number;
}

std::uint64_t ReadStat(const fs::path& file, std::string_view key) {
  std::ifstream in(file);
  std::string name;
  std::uint64_t value = 0;
  while (in >> name >> value) {
    if (name == key) return value;
  }
  return 0;
}

std::optional<std::uint64_t> AllowanceOf(const fs::path& group, const Names& names) {
  const auto limit = ReadNumber(group / names.limit);
  const auto usage = ReadNumber(group / names.usage);
  if (!limit || !usage || *limit >= kNoLimit) return std::nullopt;
  const std::uint64_t reclaimable = ReadStat(group / "memory.stat", names.reclaimable);
  const std::uint64_t used = *usage - std::min(*usage, reclaimable);
  return *limit - std::min(*limit, used);
}

// The tightest of the group and its ancestors. In a container the path may lie outside of what is
// mounted; its root is looked at all the same.
std::optional<std::uint64_t> Tightest(const fs::path& mount, fs::path group, const Names& names) {
  std::optional<std::uint64_t> tightest;
  for (;;) {
    const auto allowance = AllowanceOf(mount / group.relative_path(), names);
    if (allowance) tightest = std::min(tightest.value_or(*allowance), *allowance);
    if (!group.has_relative_path()) return tightest;
    group = group.parent_path();
  }
}

}  // namespace

std::optional<std::uint64_t> MemoryAllowance(const fs::path& root, const fs::path& self) {
  std::ifstream in(self);
  std::optional<std::uint64_t> tightest;
  // Lines are "4:memory:/path" (version 1) and "0::/path" (version 2).
  for (std::string line; std::getline(in, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const fs::path group = line.substr(second + 1);
    std::optional<std::uint64_t> allowance;
    if (controllers.empty()) {
      allowance = Tightest(root, group, kVersion2);
    } else if (("," + controllers + ",").contains(",memory,")) {
      allowance = Tightest(root / "memory", group, kVersion1);
    }
    if (allowance) tightest = std::min(tightest.value_or(*allowance), *allowance);
  }
  return tightest;
}

}  // namespace fastpersist::memory
