// SPDX-License-Identifier: Apache-2.0
// What kind of device a file lies on, as sysfs tells (Documentation/ABI/stable/sysfs-block).
#pragma once

#include <sys/types.h>

#include <string>

namespace fastpersist::file {

/// Whether the driver of that block device moves the bytes with this machine's processor, instead
/// of a device that does it by itself: loop devices, memory used as a disk, and everything that is
/// put together from such. False for devices that sysfs does not know: network file systems, and
/// file systems over several devices.
[[nodiscard]] bool ProcessorCopies(dev_t device, const std::string& sysfs = "/sys");

}  // namespace fastpersist::file
