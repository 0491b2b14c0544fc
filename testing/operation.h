// SPDX-License-Identifier: Apache-2.0
// One thing that a save asks of the file system, as recorders write it down, fault injectors select
// it and the crash model replays it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fastpersist::testing {

struct Operation {
  enum class Kind : std::uint8_t {
    kOpenDirectory,    ///< FileOps::Open with O_DIRECTORY.
    kCreateTemporary,  ///< FileOps::Open with O_EXCL.
    kOpenLeftover,     ///< FileOps::Open with O_NOFOLLOW, of a file that is there already.
    kOpenInPlace,      ///< Every other FileOps::Open.
    kStatLink,
    kTryLock,
    kChangeMode,
    kChangeGroup,
    kPreallocate,
    kSetDirect,
    kTruncate,
    kSyncData,
    kSyncDirectory,
    kFlushAsClose,
    kRename,
    kUnlink,
    kMakeDirectory,
    kRemoveDirectory,
    kListDirectory,
    kWrite,          ///< FileOps::Write, of a small file; an engine's writes are submitted.
    kRead,           ///< FileOps::Read.
    kSubmitWrite,    ///< From here on the bytes may be on the device, or not.
    kCompleteWrite,  ///< The kernel has accepted them.
    kReportSuccess,  ///< The caller was told that the save is done.
  };

  Kind kind = Kind::kOpenDirectory;
  int fd = -1;         ///< Of the file, or of the directory where name lies.
  int file = -1;       ///< Which file fd was at that moment, numbered by the recorder; -1 unknown.
  std::string name{};  ///< Within the directory.
  std::string new_name{};  ///< kRename: within the same directory.
  std::uint64_t offset = 0;
  std::uint64_t size = 0;   ///< Bytes: of the file, or of the write.
  std::string bytes{};      ///< kSubmitWrite, kWrite: what is written.
  std::uint64_t write = 0;  ///< kSubmitWrite and its kCompleteWrite carry the same number.
  std::int64_t result = 0;  ///< -errno on failure.

  [[nodiscard]] bool succeeded() const { return result >= 0; }
};

/// "create the temporary", "rename", ...: for the messages of tests.
[[nodiscard]] std::string_view OperationName(Operation::Kind kind);

/// "12 rename .fp-… to model.pt = 0", one line for each operation.
[[nodiscard]] std::string Describe(const std::vector<Operation>& trace);

}  // namespace fastpersist::testing
