// SPDX-License-Identifier: Apache-2.0
// File operations with something between the caller and the real ones: each call is described as an
// Operation, shown to Before, which may fail it, carried out by the files inside, and shown to
// After. Fault injectors, recorders and killers are subclasses of a few lines, and can be stacked.
//
// As thread-safe as the subclass.
#pragma once

#include <functional>

#include "file/file_ops.h"
#include "testing/operation.h"

namespace fastpersist::testing {

class ObservedFiles : public file::FileOps {
 public:
  /// inner must outlive this.
  explicit ObservedFiles(const file::FileOps& inner = file::RealFileOps()) : inner_(inner) {}

  int Open(int directory, const char* name, int flags, mode_t mode) const override;
  int StatLink(int directory, const char* name, struct stat* out) const override;
  int TryLock(int fd) const override;
  int ChangeMode(int fd, mode_t mode) const override;
  int ChangeGroup(int fd, gid_t group) const override;
  int Preallocate(int fd, std::uint64_t size) const override;
  int SetDirect(int fd, bool direct) const override;
  int Truncate(int fd, std::uint64_t size) const override;
  int SyncData(int fd) const override;
  int SyncDirectory(int fd) const override;
  int FlushAsClose(int fd) const override;
  int Rename(int directory, const char* from, const char* to) const override;
  int Unlink(int directory, const char* name) const override;
  int MakeDirectory(int directory, const char* name, mode_t mode) const override;
  int RemoveDirectory(int directory, const char* name) const override;
  int ListDirectory(int directory, std::vector<std::string>& names) const override;
  std::int64_t Write(int fd, std::span<const std::byte> bytes) const override;
  std::int64_t Read(int fd, std::span<std::byte> bytes, std::uint64_t offset) const override;
  plan::DeviceLimits Limits(int fd) const override { return inner_.Limits(fd); }

 protected:
  /// 0 lets the call through; -errno becomes its result and nothing is done.
  virtual int Before(const Operation& /*operation*/) const { return 0; }
  /// operation.result is set, also where Before set it.
  virtual void After(const Operation& /*operation*/) const {}

 private:
  std::int64_t Pass(Operation operation, const std::function<std::int64_t()>& call) const;
  int PassInt(Operation operation, const std::function<int()>& call) const;

  const file::FileOps& inner_;
};

}  // namespace fastpersist::testing
