// SPDX-License-Identifier: Apache-2.0
// A root: one directory that holds checkpoints, each in a directory of its own (generation.h). It
// is known by a random id in fastpersist-root.json rather than by its path, so that it can be
// moved, and told from another of the same name.
//
// One process writes at a time: it holds an open-file-description lock on fastpersist.lock. A
// forked child does not keep it (base/fork_closed.h), and a process that dies gives it up. What is
// written in the lock file (host, process, boot id) serves the message to whoever comes second,
// nothing else. File systems without locks are written to all the same, with a warning; there
// nothing is removed that another process may still be writing. (A heartbeat with a take-over would
// close this gap.)
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "base/fork_closed.h"
#include "base/unique_fd.h"
#include "fastpersist/error.h"
#include "file/file_ops.h"

namespace fastpersist::commit {

inline constexpr const char* kRootName = "fastpersist-root.json";
inline constexpr const char* kLockName = "fastpersist.lock";

/// Thread-safe.
class Root {
 public:
  enum class Access : std::uint8_t { kRead, kWrite };

  /// kWrite: makes the directory, and missing parents, makes the id, takes the lock.
  /// kRead: changes nothing and takes no lock; a root that is being written to may be read.
  /// Errors: kNotFound (reading, and nothing there), kStorage; with EAGAIN when another process
  /// writes to it, which the detail names; kCorrupt when the id cannot be understood.
  [[nodiscard]] static Result<std::unique_ptr<Root>> Open(
      const std::string& path, Access access, const file::FileOps& files = file::RealFileOps());
  Root(Root&&) = delete;
  Root& operator=(Root&&) = delete;
  Root(const Root&) = delete;
  Root& operator=(const Root&) = delete;
  /// Gives the lock up.
  ~Root();

  /// As it was given.
  [[nodiscard]] const std::string& path() const { return path_; }
  /// 32 hexadecimal digits; empty for a directory that is only read and has none.
  [[nodiscard]] const std::string& id() const { return id_; }
  /// The directory.
  [[nodiscard]] int fd() const { return directory_.get(); }
  [[nodiscard]] Access access() const { return access_; }
  /// Of this run of the program: random, made when the root was opened for writing.
  [[nodiscard]] const std::string& job() const { return job_; }
  /// True while nobody else can be writing here.
  [[nodiscard]] bool locked() const { return locked_; }
  /// A sentence without a final period when writing goes on without a lock, else empty.
  [[nodiscard]] const std::string& lock_warning() const { return lock_warning_; }

  /// 1 + the highest sequence number of any manifest in the root, damaged and retired ones
  /// included. Scans the directory the first time, and each time when there is no lock. To be
  /// called by one thread until NoteSequence.
  [[nodiscard]] Result<std::uint64_t> NextSequence(const file::FileOps& files) const;
  void NoteSequence(std::uint64_t sequence) const;

  /// Generations that this process is writing: nobody cleans them away.
  void NoteActive(const std::string& generation) const;
  void NoteEnded(const std::string& generation) const;
  [[nodiscard]] bool IsActive(const std::string& generation) const;

 private:
  Root(std::string path, Access access);
  [[nodiscard]] Result<void> OpenForWriting(const file::FileOps& files);
  [[nodiscard]] Result<void> TakeLock(const file::FileOps& files);
  [[nodiscard]] Result<void> ReadOrMakeId(const file::FileOps& files);
  [[nodiscard]] Result<bool> ReadId(const file::FileOps& files);
  [[nodiscard]] Result<void> MakeId(const file::FileOps& files);
  [[nodiscard]] Error Failed(std::string operation, int negative_errno,
                             std::string detail = "") const;

  std::string path_;
  Access access_;
  pid_t owner_;  // the process that opened it
  std::string id_;
  std::string job_;
  std::string lock_warning_;
  bool locked_ = false;
  base::UniqueFd directory_;
  base::UniqueFd lock_;
  base::ForkClosed lock_fork_closed_;  // after lock_: unregistered before it is closed
  mutable std::mutex mutex_;           // guards the rest
  mutable std::optional<std::uint64_t> highest_;
  mutable std::set<std::string> active_;
};

}  // namespace fastpersist::commit
