// SPDX-License-Identifier: Apache-2.0
#include "testing/operation.h"

#include <fmt/format.h>

namespace fastpersist::testing {

std::string_view OperationName(Operation::Kind kind) {
  using enum Operation::Kind;
  switch (kind) {
    case kOpenDirectory:
      return "open the directory";
    case kCreateTemporary:
      return "create the temporary";
    case kOpenLeftover:
      return "open a leftover";
    case kOpenInPlace:
      return "open in place";
    case kStatLink:
      return "look at";
    case kTryLock:
      return "lock";
    case kChangeMode:
      return "change the mode";
    case kChangeGroup:
      return "change the group";
    case kPreallocate:
      return "preallocate";
    case kSetDirect:
      return "set direct";
    case kTruncate:
      return "truncate";
    case kSyncData:
      return "sync the data";
    case kSyncDirectory:
      return "sync the directory";
    case kFlushAsClose:
      return "flush as close";
    case kRename:
      return "rename";
    case kUnlink:
      return "unlink";
    case kMakeDirectory:
      return "make a directory";
    case kRemoveDirectory:
      return "remove a directory";
    case kListDirectory:
      return "list a directory";
    case kWrite:
      return "write";
    case kRead:
      return "read";
    case kSubmitWrite:
      return "submit a write";
    case kCompleteWrite:
      return "complete a write";
    case kReportSuccess:
      return "report success";
  }
  return "unknown";
}

std::string Describe(const std::vector<Operation>& trace) {
  std::string text;
  for (std::size_t i = 0; i < trace.size(); ++i) {
    const Operation& operation = trace[i];
    text += fmt::format("{} {} file {} {} {} [{}, +{}) = {}\n", i, OperationName(operation.kind),
                        operation.file, operation.name, operation.new_name, operation.offset,
                        operation.size, operation.result);
  }
  return text;
}

}  // namespace fastpersist::testing
