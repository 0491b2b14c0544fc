// SPDX-License-Identifier: Apache-2.0
// The file-system calls of saving and reading, one virtual function each, so that tests can fail,
// record and replay them (testing/faulty_files.h). The real ones retry EINTR and do nothing else.
//
// Every call returns >= 0 on success and -errno on failure. Thread-safe.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plan/write_plan.h"

namespace fastpersist::file {

class FileOps {
 public:
  virtual ~FileOps() = default;

  /// openat(2) with O_CLOEXEC; returns the descriptor.
  virtual int Open(int directory, const char* name, int flags, mode_t mode) const;
  /// fstatat(2), without following a link in the last component.
  virtual int StatLink(int directory, const char* name, struct stat* out) const;
  /// Takes an open-file-description write lock (fcntl(2), F_OFD_SETLK) without waiting. -EAGAIN:
  /// somebody holds it.
  virtual int TryLock(int fd) const;
  virtual int ChangeMode(int fd, mode_t mode) const;
  virtual int ChangeGroup(int fd, gid_t group) const;
  /// fallocate(2) with mode 0; never posix_fallocate, which writes where the file system cannot.
  virtual int Preallocate(int fd, std::uint64_t size) const;
  /// Turns O_DIRECT on or off for this open file.
  virtual int SetDirect(int fd, bool direct) const;
  virtual int Truncate(int fd, std::uint64_t size) const;
  virtual int SyncData(int fd) const;       ///< fdatasync(2)
  virtual int SyncDirectory(int fd) const;  ///< fsync(2)
  /// close(2) of a duplicate: file systems that report write errors at close (NFS) report them, and
  /// the descriptor with its lock stays.
  virtual int FlushAsClose(int fd) const;
  virtual int Rename(int directory, const char* from, const char* to) const;
  virtual int Unlink(int directory, const char* name) const;
  /// Alignment of direct I/O on this file; see ProbeLimits.
  virtual plan::DeviceLimits Limits(int fd) const;
  /// The same for a file that is only read; see ProbeReadLimits.
  virtual plan::DeviceLimits ReadLimits(int fd) const;
  /// How much of a file of that size lies in the page cache, 0 to 1; see page_cache.h.
  virtual double CachedShare(int fd, std::uint64_t size) const;
  /// Whether the processor copies what is read from this file's device; see ProcessorCopies.
  virtual bool ProcessorCopies(int fd) const;
  virtual int MakeDirectory(int directory, const char* name, mode_t mode) const;
  /// Only an empty one.
  virtual int RemoveDirectory(int directory, const char* name) const;
  /// Replaces names by those in the directory, "." and ".." left out, in no order.
  virtual int ListDirectory(int directory, std::vector<std::string>& names) const;
  /// write(2) at the descriptor's position, for the small files that describe a checkpoint; the
  /// data of a save goes through an engine. Returns how many bytes were written: maybe fewer.
  virtual std::int64_t Write(int fd, std::span<const std::byte> bytes) const;
  /// pread(2), for the same small files. Returns how many bytes were read; 0 at the end.
  virtual std::int64_t Read(int fd, std::span<std::byte> bytes, std::uint64_t offset) const;
};

/// The one real implementation; stateless.
[[nodiscard]] const FileOps& RealFileOps();

}  // namespace fastpersist::file
