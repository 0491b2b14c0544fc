// SPDX-License-Identifier: Apache-2.0
#include "testing/recording_files.h"

#include <utility>

namespace fastpersist::testing {
namespace {

bool Opens(Operation::Kind kind) {
  using enum Operation::Kind;
  return kind == kOpenDirectory || kind == kCreateTemporary || kind == kOpenLeftover ||
         kind == kOpenInPlace;
}

}  // namespace

void OperationTrace::Add(Operation operation) {
  const std::scoped_lock lock(mutex_);
  if (Opens(operation.kind)) {
    if (operation.succeeded()) {
      file_of_[static_cast<int>(operation.result)] = next_file_;
      operation.file = next_file_++;
    }
  } else if (const auto known = file_of_.find(operation.fd); known != file_of_.end()) {
    operation.file = known->second;
  }
  operations_.push_back(std::move(operation));
}

std::vector<Operation> OperationTrace::operations() const {
  const std::scoped_lock lock(mutex_);
  return operations_;
}

}  // namespace fastpersist::testing
