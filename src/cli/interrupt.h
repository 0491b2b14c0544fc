// SPDX-License-Identifier: Apache-2.0
// Ctrl-C and its like (SIGINT, SIGTERM, SIGHUP) end the program with 128 plus the signal's number,
// and nothing is left behind: a command says what has to be undone, or asks for time to do it.
//
// The signals are blocked in all threads but one, which waits for them: it may lock, allocate and
// remove files, which a signal handler may not.
#pragma once

#include <string>

namespace fastpersist::cli {

/// To be called once, before other threads are started. Signals that were ignored stay so.
void WatchForInterrupts();

/// A new folder, which goes with all that is in it when this object or the program ends, by an
/// interrupt too. At most one at a time.
class FolderRemovedAtEnd {
 public:
  /// Its name begins with prefix, which ends in a name of its own ("dir/.name-").
  explicit FolderRemovedAtEnd(const std::string& prefix);
  FolderRemovedAtEnd(const FolderRemovedAtEnd&) = delete;
  FolderRemovedAtEnd& operator=(const FolderRemovedAtEnd&) = delete;
  FolderRemovedAtEnd(FolderRemovedAtEnd&&) = delete;
  FolderRemovedAtEnd& operator=(FolderRemovedAtEnd&&) = delete;
  ~FolderRemovedAtEnd();

  /// 0, or the errno with which the folder could not be made.
  [[nodiscard]] int system_errno() const { return system_errno_; }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
  int system_errno_ = 0;
};

/// While it lives, an interrupt is only noted; whoever has it asks, and ends by himself.
class InterruptDeferred {
 public:
  InterruptDeferred();
  InterruptDeferred(const InterruptDeferred&) = delete;
  InterruptDeferred& operator=(const InterruptDeferred&) = delete;
  InterruptDeferred(InterruptDeferred&&) = delete;
  InterruptDeferred& operator=(InterruptDeferred&&) = delete;
  ~InterruptDeferred();

  /// The signal that came meanwhile; 0 if none did.
  [[nodiscard]] static int Noted();
};

}  // namespace fastpersist::cli
