// SPDX-License-Identifier: Apache-2.0
// Writes down what a save does to the file system, in order, with the number of the file behind
// each descriptor. RecordingFiles records the calls, RecordingEngine (recording_engine.h) the
// writes; both put them into one OperationTrace, which crash_model.h judges.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "testing/observed_files.h"

namespace fastpersist::testing {

/// Thread-safe.
class OperationTrace {
 public:
  /// Appends the operation, with its file number filled in from its descriptor.
  void Add(Operation operation);
  [[nodiscard]] std::vector<Operation> operations() const;

 private:
  mutable std::mutex mutex_;
  std::vector<Operation> operations_;
  std::map<int, int> file_of_;  // descriptor → number of the file that was opened last there
  int next_file_ = 0;
};

/// Thread-safe. The trace and inner must outlive it.
class RecordingFiles final : public ObservedFiles {
 public:
  explicit RecordingFiles(OperationTrace& trace, const file::FileOps& inner = file::RealFileOps())
      : ObservedFiles(inner), trace_(trace) {}

 protected:
  void After(const Operation& operation) const override { trace_.Add(operation); }

 private:
  OperationTrace& trace_;
};

}  // namespace fastpersist::testing
