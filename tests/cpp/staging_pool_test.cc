// SPDX-License-Identifier: Apache-2.0
#include "memory/staging_pool.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "base/align.h"
#include "testing/child_process.h"

namespace fastpersist::memory {
namespace {

using fastpersist::testing::Arguments;
using fastpersist::testing::GiveUpPrivileges;
using fastpersist::testing::RegisterRole;
using fastpersist::testing::Report;
using fastpersist::testing::RunRole;
using ::testing::HasSubstr;

constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;

// The VmFlags line of the mapping that holds the address; empty if nothing is mapped there.
std::string FlagsOf(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  std::ifstream smaps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    // "begin-end flags ..." opens a mapping; every other line begins with a capital letter.
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    char dash = 0;
    if (std::istringstream(line) >> std::hex >> begin >> dash >> end && dash == '-') {
      inside = begin <= at && at < end;
    }
    if (inside && line.starts_with("VmFlags:")) return line + ' ';
  }
  return "";
}

TEST(StagingPool, IsAsLargeAsAskedAndAligned) {
  for (const std::uint64_t bytes : {std::uint64_t{4096}, std::uint64_t{4097}, std::uint64_t{65536},
                                    kHugePage - 4096, kHugePage, kHugePage + 1, 5 * kHugePage}) {
    const auto pool = StagingPool::Create(bytes);
    ASSERT_TRUE(pool) << pool.error().Message();
    const std::uint64_t alignment = bytes >= kHugePage ? kHugePage : 4096;
    EXPECT_EQ(pool->memory().size(), base::AlignUp(bytes, alignment));
    EXPECT_TRUE(base::IsAlignedAddress(pool->memory().data(), alignment));
    std::ranges::fill(pool->memory(), std::byte{1});
  }
}

TEST(StagingPool, IsNotInheritedByForkedChildren) {
  const auto pool = StagingPool::Create(65536);
  ASSERT_TRUE(pool);
  EXPECT_THAT(FlagsOf(pool->memory().data()), HasSubstr(" dc ")) << "MADV_DONTFORK";
}

TEST(StagingPool, MovesWithoutMovingTheMemory) {
  StagingPool pool = *StagingPool::Create(4096);
  const std::byte* const at = pool.memory().data();
  StagingPool moved(std::move(pool));
  EXPECT_EQ(moved.memory().data(), at);
  StagingPool other = *StagingPool::Create(8192);
  other = std::move(moved);
  EXPECT_EQ(other.memory().data(), at);
  EXPECT_EQ(other.memory().size(), 4096U);
}

TEST(StagingPool, GivesItsMemoryBack) {
  const std::byte* at = nullptr;
  {
    const auto pool = StagingPool::Create(3 * kHugePage);
    ASSERT_TRUE(pool);
    at = pool->memory().data();
    EXPECT_NE(FlagsOf(at), "");
  }
  EXPECT_EQ(FlagsOf(at), "");
}

// Bytes of address space in use.
std::uint64_t AddressSpace() {
  std::ifstream statm("/proc/self/statm");
  std::uint64_t pages = 0;
  statm >> pages;
  return pages * 4096;
}

TEST(StagingPool, LeavesNoAddressSpaceBehind) {
  // More than needed is mapped at first, to find an aligned part.
  ASSERT_TRUE(StagingPool::Create(kHugePage));
  const std::uint64_t before = AddressSpace();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(StagingPool::Create(kHugePage));
  EXPECT_LT(AddressSpace(), before + kHugePage);
}

TEST(StagingPool, AnAbsurdSizeIsAnErrorThatSaysWhatToDo) {
  const auto pool = StagingPool::Create(std::uint64_t{1} << 48);
  ASSERT_FALSE(pool);
  EXPECT_EQ(pool.error().code, ErrorCode::kStorage);
  EXPECT_EQ(pool.error().system_errno, ENOMEM);
  EXPECT_THAT(pool.error().Message(), HasSubstr("staging_bytes"));
}

const RegisterRole kSmallLockLimit("stages with a small lock limit", [](const Arguments&) {
  const rlimit limit{.rlim_cur = 65536, .rlim_max = 65536};
  if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 1;
  GiveUpPrivileges();
  const auto pool = StagingPool::Create(kHugePage);
  if (!pool) return 2;
  std::ranges::fill(pool->memory(), std::byte{1});
  const bool is_locked = FlagsOf(pool->memory().data()).find(" lo ") != std::string::npos;
  Report(pool->shortcoming().empty() && !is_locked ? "mlock did nothing" : pool->shortcoming());
  return 0;
});

TEST(StagingPool, WorksUnlockedWhenTheLimitIsSmallAndSaysSo) {
  const auto result = RunRole("stages with a small lock limit");
  EXPECT_EQ(result.exit_code, 0);
  if (result.report == "mlock did nothing\n") {
    GTEST_SKIP() << "skipped: the sanitizer replaces mlock";
  }
  EXPECT_THAT(result.report,
              HasSubstr("not locked (RLIMIT_MEMLOCK: have 65536 bytes, need 2097152"));
}

}  // namespace
}  // namespace fastpersist::memory
