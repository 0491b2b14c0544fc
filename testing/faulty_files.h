// SPDX-License-Identifier: Apache-2.0
// File operations that fail on demand: the nth call of one kind, once or from then on. Everything
// else goes to the files inside. Nothing is done by a call that is made to fail.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "testing/observed_files.h"

namespace fastpersist::testing {

struct FileFault {
  Operation::Kind kind = Operation::Kind::kOpenDirectory;
  int system_errno = 0;
  unsigned nth = 1;           ///< Counted from 1, over the life of the FaultyFiles.
  bool from_then_on = false;  ///< False: only that call.
};

/// Thread-safe.
class FaultyFiles final : public ObservedFiles {
 public:
  explicit FaultyFiles(std::vector<FileFault> faults,
                       const file::FileOps& inner = file::RealFileOps())
      : ObservedFiles(inner), faults_(std::move(faults)) {}

  /// Calls of this kind so far, the failed ones included.
  [[nodiscard]] unsigned calls(Operation::Kind kind) const;

 protected:
  int Before(const Operation& operation) const override;

 private:
  std::vector<FileFault> faults_;
  mutable std::mutex mutex_;
  mutable std::map<Operation::Kind, unsigned> calls_;
};

/// Fails one call, whatever it is, or all from there on: then nothing more is done, as if the
/// process had been killed there. Thread-safe.
class FailingCall final : public ObservedFiles {
 public:
  /// nth: counted from 1.
  FailingCall(unsigned nth, int system_errno, bool from_then_on,
              const file::FileOps& inner = file::RealFileOps())
      : ObservedFiles(inner), nth_(nth), system_errno_(system_errno), from_then_on_(from_then_on) {}

  /// The call was reached.
  [[nodiscard]] bool failed() const { return calls_ >= nth_; }

 protected:
  int Before(const Operation& /*operation*/) const override {
    const unsigned call = ++calls_;
    return call == nth_ || (from_then_on_ && call > nth_) ? -system_errno_ : 0;
  }

 private:
  unsigned nth_;
  int system_errno_;
  bool from_then_on_;
  mutable std::atomic<unsigned> calls_{0};
};

}  // namespace fastpersist::testing
