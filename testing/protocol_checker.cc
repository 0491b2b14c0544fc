// SPDX-License-Identifier: Apache-2.0
// The other half of crash_model.h: the order of operations.
#include <fmt/format.h>

#include <map>
#include <set>

#include "testing/crash_model.h"

namespace fastpersist::testing {
namespace {

using Kind = Operation::Kind;

// What the protocol must know of one temporary.
struct Progress {
  bool locked = false;
  bool preallocated = false;
  bool exact = false;   // truncated after the last write
  bool synced = false;  // after the last change
  bool flushed = false;
  bool sync_failed = false;
  bool published = false;
  std::set<std::uint64_t> in_flight;
};

class ProtocolChecker {
 public:
  explicit ProtocolChecker(std::string_view name) : name_(name) {}

  void Check(const Operation& operation) {
    switch (operation.kind) {
      case Kind::kCreateTemporary:
        if (!operation.succeeded()) break;
        temporaries_[operation.name] = operation.file;
        progress_[operation.file] = {};
        break;
      case Kind::kRename:
        if (operation.succeeded()) CheckRename(operation);
        break;
      case Kind::kUnlink:
        Require(operation.name != name_, "the target was unlinked");
        break;
      case Kind::kSyncDirectory:
        if (operation.succeeded()) names_synced_ = true;
        break;
      case Kind::kReportSuccess:
        Require(renamed_, "success was reported before the rename");
        Require(names_synced_, "success was reported before the directory was synced");
        break;
      default:
        if (const auto file = progress_.find(operation.file); file != progress_.end()) {
          CheckFile(operation, file->second);
        }
    }
  }

  [[nodiscard]] std::vector<std::string> violations() const { return violations_; }

 private:
  void CheckFile(const Operation& operation, Progress& file) {
    switch (operation.kind) {
      case Kind::kTryLock:
        file.locked = operation.succeeded();
        break;
      case Kind::kPreallocate:
        file.preallocated = file.preallocated || operation.succeeded();
        break;
      case Kind::kSubmitWrite:
        Require(file.locked, "a write to a temporary that was not locked");
        Require(file.preallocated, "a write before the preallocation");
        Require(!file.published, "a write after the rename");
        file.in_flight.insert(operation.write);
        file.exact = file.synced = file.flushed = false;
        break;
      case Kind::kCompleteWrite:
        Require(file.in_flight.erase(operation.write) == 1, "a completion of no write in flight");
        break;
      case Kind::kTruncate:
        Require(file.in_flight.empty(), "a truncation with writes in flight");
        file.preallocated = file.preallocated || operation.succeeded();  // as a hole
        file.exact = operation.succeeded();
        file.synced = file.flushed = false;
        break;
      case Kind::kSyncData:
        Require(file.in_flight.empty(), "a sync with writes in flight");
        Require(!file.sync_failed, "a failed sync was repeated on the same file");
        file.synced = operation.succeeded();
        file.sync_failed = file.sync_failed || !operation.succeeded();
        break;
      case Kind::kFlushAsClose:
        file.flushed = operation.succeeded();
        break;
      default:
        break;
    }
  }

  void CheckRename(const Operation& operation) {
    const auto temporary = temporaries_.find(operation.name);
    Require(temporary != temporaries_.end(), "a rename of a file that was not made here");
    Require(operation.new_name == name_, "a rename to another name");
    if (temporary == temporaries_.end()) return;
    Progress& file = progress_[temporary->second];
    Require(file.exact, "a rename before the truncation to the exact size");
    Require(file.synced, "a rename before the data was synced");
    Require(file.flushed, "a rename before the flush that close would do");
    file.published = true;
    renamed_ = true;
    names_synced_ = false;
  }

  void Require(bool kept, std::string_view violation) {
    if (!kept) violations_.emplace_back(violation);
  }

  std::string_view name_;
  std::map<std::string, int> temporaries_;
  std::map<int, Progress> progress_;
  bool renamed_ = false;
  bool names_synced_ = false;
  std::vector<std::string> violations_;
};

}  // namespace

std::vector<std::string> ProtocolViolations(const std::vector<Operation>& trace,
                                            std::string_view name) {
  ProtocolChecker checker(name);
  for (const Operation& operation : trace) checker.Check(operation);
  return checker.violations();
}

}  // namespace fastpersist::testing
