// SPDX-License-Identifier: Apache-2.0
// Files that demand a given alignment of direct I/O, whatever the file system below demands: it is
// never asked, and O_DIRECT is not really set, so that any alignment can be tested anywhere.
#pragma once

#include <fcntl.h>

#include "file/file_ops.h"

namespace fastpersist::testing {

class LimitedFiles final : public file::FileOps {
 public:
  explicit LimitedFiles(plan::DeviceLimits limits) : limits_(limits) {}

  int Open(int directory, const char* name, int flags, mode_t mode) const override {
    return FileOps::Open(directory, name, flags & ~O_DIRECT, mode);
  }
  int SetDirect(int /*fd*/, bool /*direct*/) const override { return 0; }
  plan::DeviceLimits Limits(int /*fd*/) const override { return limits_; }
  plan::DeviceLimits ReadLimits(int /*fd*/) const override { return limits_; }
  double CachedShare(int /*fd*/, std::uint64_t /*size*/) const override { return 0; }

 private:
  plan::DeviceLimits limits_;
};

}  // namespace fastpersist::testing
