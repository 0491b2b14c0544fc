// SPDX-License-Identifier: Apache-2.0
// What a device is taken for, on made-up trees like sysfs and on this machine's own.
#include "file/device_kind.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/sysmacros.h>

#include <filesystem>
#include <string>

#include "testing/temporary_directory.h"

namespace fastpersist::file {
namespace {

namespace fs = std::filesystem;

class DeviceKindTest : public ::testing::Test {
 protected:
  // A device as sysfs shows it: a folder somewhere, and a link to it by number.
  dev_t Add(const std::string& folder) {
    const fs::path path = directory_.path() / "devices" / folder;
    fs::create_directories(path);
    fs::create_directories(directory_.path() / "dev/block");
    const dev_t device = ::makedev(259, ++minor_);
    fs::create_symlink(path, directory_.path() / fmt::format("dev/block/259:{}", minor_));
    return device;
  }
  void Over(const std::string& folder, const std::string& part) {
    const fs::path slaves = directory_.path() / "devices" / folder / "slaves";
    fs::create_directories(slaves);
    fs::create_symlink(directory_.path() / "devices" / part, slaves / fs::path(part).filename());
  }
  [[nodiscard]] bool Copies(dev_t device) const {
    return ProcessorCopies(device, directory_.path().string());
  }

  const testing::TemporaryDirectory directory_;
  unsigned minor_ = 0;
};

TEST_F(DeviceKindTest, DriversThatMoveBytesThemselvesAreKnownByName) {
  for (const char* name : {"loop0", "loop17", "ram3", "zram0", "pmem0", "pmem0/pmem0p1"}) {
    EXPECT_TRUE(Copies(Add(fmt::format("virtual/block/{}", name)))) << name;
  }
}

TEST_F(DeviceKindTest, DisksAndNamesThatOnlyBeginAlikeReadByThemselves) {
  for (const char* name : {"nvme0n1", "nvme0n1/nvme0n1p2", "sda", "sda/sda1", "vda", "dm-0",
                           "md127", "rambo", "loop", "ramdisk0"}) {
    EXPECT_FALSE(Copies(Add(fmt::format("pci/block/{}", name)))) << name;
  }
}

TEST_F(DeviceKindTest, AVolumeIsAsItsParts) {
  const dev_t fast = Add("virtual/block/dm-0");
  const dev_t slow = Add("virtual/block/dm-1");
  Add("virtual/block/md0");
  Add("pci/block/nvme0n1");
  Add("virtual/block/loop0");
  Over("virtual/block/dm-0", "pci/block/nvme0n1");
  Over("virtual/block/dm-1", "virtual/block/md0");
  Over("virtual/block/md0", "pci/block/nvme0n1");
  Over("virtual/block/md0", "virtual/block/loop0");
  EXPECT_FALSE(Copies(fast));
  EXPECT_TRUE(Copies(slow));
}

TEST_F(DeviceKindTest, AnUnknownDeviceAndACircleOfPartsEndWithNo) {
  EXPECT_FALSE(Copies(::makedev(0, 41)));
  const dev_t circle = Add("virtual/block/dm-0");
  Over("virtual/block/dm-0", "virtual/block/dm-0");
  fs::create_symlink(directory_.path() / "nowhere",
                     directory_.path() / "devices/virtual/block/dm-0/slaves/gone");
  EXPECT_FALSE(Copies(circle));
}

TEST_F(DeviceKindTest, LoopDevicesOfThisMachineAreFound) {
  if (!fs::exists("/sys/dev/block/7:0")) GTEST_SKIP() << "skipped: there is no loop device";
  EXPECT_TRUE(ProcessorCopies(::makedev(7, 0)));
}

}  // namespace
}  // namespace fastpersist::file
