// SPDX-License-Identifier: Apache-2.0
#include "testing/temporary_directory.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <system_error>

namespace fastpersist::testing {
namespace {

void Require(bool works, const std::string& what) {
  if (!works) throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

TemporaryDirectory::TemporaryDirectory(const std::filesystem::path& parent) {
  const std::filesystem::path in =
      parent.empty() ? std::filesystem::path(::testing::TempDir()) : parent;
  std::string pattern = in / "fastpersist-test-XXXXXX";
  Require(::mkdtemp(pattern.data()) != nullptr, pattern);
  path_ = pattern;
  Require(::chmod(pattern.c_str(), 0755) == 0, pattern);
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::permissions(path_, std::filesystem::perms::owner_all,
                               std::filesystem::perm_options::add, ignored);
  std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> TemporaryDirectory::names() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path_)) {
    names.push_back(entry.path().filename());
  }
  std::ranges::sort(names);
  return names;
}

std::vector<std::string> TemporaryDirectory::temporaries() const {
  std::vector<std::string> temporaries = names();
  std::erase_if(temporaries, [](const std::string& name) { return !name.starts_with(".fp-"); });
  return temporaries;
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) return {};
  std::string content(static_cast<std::size_t>(in.tellg()), '\0');
  in.seekg(0);
  in.read(content.data(), static_cast<std::streamsize>(content.size()));
  content.resize(static_cast<std::size_t>(in.gcount()));
  return content;
}

void WriteFile(const std::string& path, std::string_view content, mode_t mode) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
  out.close();
  Require(!out.fail(), path);
  Require(::chmod(path.c_str(), mode) == 0, path);
}

mode_t ModeOf(const std::string& path) {
  struct stat info{};
  Require(::stat(path.c_str(), &info) == 0, path);
  return info.st_mode & 07777;
}

}  // namespace fastpersist::testing
