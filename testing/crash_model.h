// SPDX-License-Identifier: Apache-2.0
// Judges what a save did to the file system, from an OperationTrace.
//
// ProtocolViolations checks the order that commit/publish.h promises. CrashModel is independent of
// that order: it keeps only what a file system must keep after a power cut, so that a wrong order
// shows by its damage. It forgets
//   - any write, preallocation and truncation that no successful fdatasync of its file followed,
//   each
//     by itself, a write possibly down to some of its sectors;
//   - any name made, renamed or removed that no successful sync of its directory followed, each by
//     itself; a rename happens as a whole or not at all.
// After a failed sync what it covered never becomes durable: Linux marks such pages clean.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "testing/operation.h"
#include "testing/seed.h"

namespace fastpersist::testing {

/// One sentence for each broken promise. name: of the target, in its directory.
[[nodiscard]] std::vector<std::string> ProtocolViolations(const std::vector<Operation>& trace,
                                                          std::string_view name);

class CrashModel {
 public:
  /// What is durable at the start: contents by name.
  explicit CrashModel(const std::map<std::string, std::string>& directory);

  void Apply(const Operation& operation);

  /// How many changes of names a crash may keep or lose now: Crash takes any set of them.
  [[nodiscard]] std::size_t pending_names() const { return pending_names_.size(); }

  enum class Data : std::uint8_t { kLoseAll, kKeepAll, kRandom };
  /// The directory after a crash now. kept: bit i says whether the ith pending change of names is
  /// kept; data: what happens to unsynced data.
  [[nodiscard]] std::map<std::string, std::string> Crash(std::uint64_t kept, Data data,
                                                         Random& random) const;

 private:
  struct Change {  // of a file's data
    Operation operation;
    bool durable_at_sync = false;  // accepted by the kernel, and no sync of it has failed
  };
  struct File {
    std::string durable;
    std::vector<Change> pending;
  };
  struct NameChange {
    std::string removed;  // empty: none
    std::string added;    // empty: none
    int file = -1;
  };

  void ApplyToNames(const Operation& operation);
  void ApplyToData(const Operation& operation);
  void SyncFile(File& file, bool succeeded);
  static std::string CrashedData(const File& file, Data data, Random& random);

  std::map<int, File> files_;
  std::map<std::string, int> names_;          // as running programs see them
  std::map<std::string, int> durable_names_;  // as of the last directory sync
  std::vector<NameChange> pending_names_;
};

struct CrashCheck {
  std::string name;                ///< Of the target.
  std::optional<std::string> old;  ///< Its content before the save; nullopt: it was not there.
  std::string saved;               ///< Its content after the save.
  std::uint64_t seed = 0;
  unsigned samples = 4;  ///< Random crashes for each prefix and each set of names kept.
};

/// Crashes after every prefix of the trace, in every way for names and in sampled ways for data.
/// One sentence for each crash after which the name does not lead to the complete old or new
/// content, or not to the new one although the save had reported success.
[[nodiscard]] std::vector<std::string> CrashDamage(const std::vector<Operation>& trace,
                                                   const CrashCheck& check);

}  // namespace fastpersist::testing
