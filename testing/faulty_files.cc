// SPDX-License-Identifier: Apache-2.0
#include "testing/faulty_files.h"

namespace fastpersist::testing {

unsigned FaultyFiles::calls(Operation::Kind kind) const {
  const std::scoped_lock lock(mutex_);
  return calls_[kind];
}

int FaultyFiles::Before(const Operation& operation) const {
  const std::scoped_lock lock(mutex_);
  const unsigned call = ++calls_[operation.kind];
  for (const FileFault& fault : faults_) {
    if (fault.kind != operation.kind) continue;
    if (call == fault.nth || (fault.from_then_on && call > fault.nth)) return -fault.system_errno;
  }
  return 0;
}

}  // namespace fastpersist::testing
