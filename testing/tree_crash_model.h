// SPDX-License-Identifier: Apache-2.0
// Power cuts in a tree of directories. TreeRecorder writes down what is done to the tree;
// TreeCrashModel replays it, and keeps only what a file system must keep. It forgets
//   - the data of any file that was not synced since they were written, all or from some byte on;
//   - any name made, renamed or removed that no successful sync of its directory followed, each by
//     itself; a rename happens as a whole or not at all.
// What a failed sync covered never becomes durable.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "testing/observed_files.h"
#include "testing/seed.h"

namespace fastpersist::testing {

/// An operation with the identities of what it was done to, as numbers of inodes at that moment; 0
/// where there is none.
struct TreeOperation {
  Operation operation;
  ino_t at = 0;    ///< Of the descriptor: the directory where the name lies, or the file.
  ino_t made = 0;  ///< What was made, or opened.
};

/// Thread-safe.
class TreeRecorder final : public ObservedFiles {
 public:
  explicit TreeRecorder(const file::FileOps& inner = file::RealFileOps()) : ObservedFiles(inner) {}

  [[nodiscard]] std::vector<TreeOperation> operations() const;

 protected:
  void After(const Operation& operation) const override;

 private:
  mutable std::mutex mutex_;
  mutable std::vector<TreeOperation> operations_;
};

class TreeCrashModel {
 public:
  /// All that is in the directory now is durable.
  explicit TreeCrashModel(const std::string& directory);

  void Apply(const TreeOperation& operation);

  enum class Fate : std::uint8_t { kLoseAll, kKeepAll, kRandom };
  /// Makes in `directory`, which is empty, what a crash now would leave.
  void Crash(Fate names, Fate data, Random& random, const std::string& directory) const;

 private:
  using Id = int;
  struct NameChange {
    std::string removed;  // empty: none
    std::string added;    // empty: none
    Id node = -1;
  };
  struct Node {
    bool directory = false;
    std::string content;  // as running programs see it
    std::string durable;
    bool lost = false;  // a sync of it failed
    std::map<std::string, Id> names;
    std::map<std::string, Id> durable_names;
    std::vector<NameChange> pending;
  };

  Id Take(const std::string& path);
  void ApplyToNames(Node& parent, const TreeOperation& operation);
  void ApplyToData(Node& node, const Operation& operation);
  void CrashNode(const Node& node, Fate names, Fate data, Random& random,
                 const std::string& path) const;

  std::map<Id, Node> nodes_;
  std::map<ino_t, Id> ids_;  // numbers of inodes are used again
  Id next_ = 1;
  Id root_ = 0;
};

}  // namespace fastpersist::testing
