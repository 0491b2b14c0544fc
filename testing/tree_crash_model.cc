// SPDX-License-Identifier: Apache-2.0
#include "testing/tree_crash_model.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <filesystem>
#include <utility>

#include "testing/temporary_directory.h"

namespace fastpersist::testing {
namespace {

using Kind = Operation::Kind;

ino_t InodeOf(int fd) {
  struct stat info{};
  return fd >= 0 && ::fstat(fd, &info) == 0 ? info.st_ino : 0;
}

ino_t InodeIn(int directory, const std::string& name) {
  struct stat info{};
  return ::fstatat(directory, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 ? info.st_ino : 0;
}

bool Makes(Kind kind) { return kind == Kind::kCreateTemporary || kind == Kind::kMakeDirectory; }

bool ChangesNames(Kind kind) {
  return Makes(kind) || kind == Kind::kRename || kind == Kind::kUnlink ||
         kind == Kind::kRemoveDirectory || kind == Kind::kSyncDirectory;
}

bool Happens(TreeCrashModel::Fate fate, Random& random) {
  if (fate == TreeCrashModel::Fate::kRandom) return OnceIn(random, 2);
  return fate == TreeCrashModel::Fate::kKeepAll;
}

}  // namespace

std::vector<TreeOperation> TreeRecorder::operations() const {
  const std::scoped_lock lock(mutex_);
  return operations_;
}

void TreeRecorder::After(const Operation& operation) const {
  TreeOperation recorded{.operation = operation, .at = InodeOf(operation.fd)};
  if (Makes(operation.kind) && operation.succeeded()) {
    recorded.made = InodeIn(operation.fd, operation.name);
  }
  const std::scoped_lock lock(mutex_);
  operations_.push_back(std::move(recorded));
}

TreeCrashModel::TreeCrashModel(const std::string& directory) { root_ = Take(directory); }

TreeCrashModel::Id TreeCrashModel::Take(const std::string& path) {
  struct stat info{};
  if (::lstat(path.c_str(), &info) != 0) return -1;
  const Id id = next_++;
  ids_[info.st_ino] = id;
  Node node{.directory = S_ISDIR(info.st_mode)};
  if (node.directory) {
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      node.names[entry.path().filename()] = Take(entry.path());
    }
    node.durable_names = node.names;
  } else {
    node.content = node.durable = ReadFile(path);
  }
  nodes_[id] = std::move(node);
  return id;
}

void TreeCrashModel::Apply(const TreeOperation& operation) {
  const auto id = ids_.find(operation.at);
  if (id == ids_.end()) return;
  Node& node = nodes_.at(id->second);
  if (!ChangesNames(operation.operation.kind)) {
    ApplyToData(node, operation.operation);
  } else if (operation.operation.succeeded()) {
    ApplyToNames(node, operation);
  }
}

void TreeCrashModel::ApplyToNames(Node& parent, const TreeOperation& recorded) {
  const Operation& operation = recorded.operation;
  if (Makes(operation.kind)) {
    const Id id = next_++;
    ids_[recorded.made] = id;
    parent.names[operation.name] = id;
    parent.pending.push_back({.added = operation.name, .node = id});
    nodes_[id].directory = operation.kind == Kind::kMakeDirectory;
  } else if (operation.kind == Kind::kRename) {
    const Id id = parent.names.at(operation.name);
    parent.names.erase(operation.name);
    parent.names[operation.new_name] = id;
    parent.pending.push_back({.removed = operation.name, .added = operation.new_name, .node = id});
  } else if (operation.kind == Kind::kSyncDirectory) {
    parent.durable_names = parent.names;
    parent.pending.clear();
  } else {
    parent.names.erase(operation.name);
    parent.pending.push_back({.removed = operation.name});
  }
}

void TreeCrashModel::ApplyToData(Node& node, const Operation& operation) {
  if (operation.kind == Kind::kWrite && operation.succeeded()) {
    node.content += operation.bytes.substr(0, static_cast<std::size_t>(operation.result));
  } else if (operation.kind == Kind::kSyncData) {
    node.lost = node.lost || !operation.succeeded();
    if (!node.lost) node.durable = node.content;
  }
}

void TreeCrashModel::Crash(Fate names, Fate data, Random& random,
                           const std::string& directory) const {
  CrashNode(nodes_.at(root_), names, data, random, directory);
}

void TreeCrashModel::CrashNode(const Node& node, Fate names, Fate data, Random& random,
                               const std::string& path) const {
  if (!node.directory) {
    std::string content = Happens(data, random) ? node.content : node.durable;
    if (data == Fate::kRandom && content.size() > node.durable.size() && OnceIn(random, 2)) {
      content.resize(Between(random, node.durable.size(), content.size()));
    }
    WriteFile(path, content);
    return;
  }
  std::filesystem::create_directory(path);
  std::map<std::string, Id> left = node.durable_names;
  for (const NameChange& change : node.pending) {
    if (!Happens(names, random)) continue;
    if (!change.removed.empty()) left.erase(change.removed);
    if (!change.added.empty()) left[change.added] = change.node;
  }
  for (const auto& [name, id] : left) {
    CrashNode(nodes_.at(id), names, data, random, path + '/' + name);
  }
}

}  // namespace fastpersist::testing
