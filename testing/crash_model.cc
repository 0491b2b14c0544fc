// SPDX-License-Identifier: Apache-2.0
#include "testing/crash_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

namespace fastpersist::testing {
namespace {

using Kind = Operation::Kind;

constexpr std::size_t kSector = 512;

void Overwrite(std::string& content, std::uint64_t offset, std::string_view bytes) {
  if (content.size() < offset + bytes.size()) content.resize(offset + bytes.size());
  content.replace(offset, bytes.size(), bytes);
}

void ApplyChange(std::string& content, const Operation& change) {
  if (change.kind == Kind::kSubmitWrite) {
    Overwrite(content, change.offset, change.bytes);
  } else if (change.kind == Kind::kPreallocate) {
    content.resize(std::max<std::size_t>(content.size(), change.size));
  } else {
    content.resize(change.size);
  }
}

void ApplySomeSectors(std::string& content, const Operation& write, Random& random) {
  for (std::size_t at = 0; at < write.bytes.size(); at += kSector) {
    if ((random() & 1U) != 0) {
      Overwrite(content, write.offset + at, std::string_view(write.bytes).substr(at, kSector));
    }
  }
}

}  // namespace

CrashModel::CrashModel(const std::map<std::string, std::string>& directory) {
  int file = -2;  // recorders number from 0, and -1 is unknown
  for (const auto& [name, content] : directory) {
    files_[file].durable = content;
    names_[name] = durable_names_[name] = file--;
  }
}

void CrashModel::Apply(const Operation& operation) {
  if (operation.kind == Kind::kCreateTemporary || operation.kind == Kind::kRename ||
      operation.kind == Kind::kUnlink || operation.kind == Kind::kSyncDirectory) {
    if (operation.succeeded()) ApplyToNames(operation);
  } else {
    ApplyToData(operation);
  }
}

void CrashModel::ApplyToNames(const Operation& operation) {
  switch (operation.kind) {
    case Kind::kCreateTemporary:
      files_[operation.file];
      names_[operation.name] = operation.file;
      pending_names_.push_back({.added = operation.name, .file = operation.file});
      break;
    case Kind::kRename: {
      const int file = names_.at(operation.name);
      names_.erase(operation.name);
      names_[operation.new_name] = file;
      pending_names_.push_back(
          {.removed = operation.name, .added = operation.new_name, .file = file});
      break;
    }
    case Kind::kUnlink:
      names_.erase(operation.name);
      pending_names_.push_back({.removed = operation.name});
      break;
    default:
      durable_names_ = names_;
      pending_names_.clear();
  }
}

void CrashModel::ApplyToData(const Operation& operation) {
  const auto found = files_.find(operation.file);
  if (found == files_.end()) return;
  File& file = found->second;
  switch (operation.kind) {
    case Kind::kSubmitWrite:
      file.pending.push_back({.operation = operation});
      break;
    case Kind::kCompleteWrite: {
      const auto write = std::ranges::find_if(file.pending, [&](const Change& change) {
        return change.operation.write == operation.write;
      });
      if (write == file.pending.end()) break;
      // A failed write may still have left some of its bytes, for which nothing answers.
      write->durable_at_sync = operation.succeeded();
      if (operation.succeeded()) {
        write->operation.bytes.resize(static_cast<std::size_t>(operation.result));
      }
      break;
    }
    case Kind::kPreallocate:
    case Kind::kTruncate:
      if (operation.succeeded()) {
        file.pending.push_back({.operation = operation, .durable_at_sync = true});
      }
      break;
    case Kind::kSyncData:
      SyncFile(file, operation.succeeded());
      break;
    default:
      break;
  }
}

void CrashModel::SyncFile(File& file, bool succeeded) {
  std::vector<Change> still_pending;
  for (Change& change : file.pending) {
    if (succeeded && change.durable_at_sync) {
      ApplyChange(file.durable, change.operation);
    } else {
      change.durable_at_sync = false;
      still_pending.push_back(std::move(change));
    }
  }
  file.pending = std::move(still_pending);
}

std::string CrashModel::CrashedData(const File& file, Data data, Random& random) {
  std::string content = file.durable;
  if (data == Data::kLoseAll) return content;
  for (const Change& change : file.pending) {
    const std::uint64_t fate = data == Data::kKeepAll ? 0 : random() % 3;
    if (fate == 0) {
      ApplyChange(content, change.operation);
    } else if (fate == 1 && change.operation.kind == Kind::kSubmitWrite) {
      ApplySomeSectors(content, change.operation, random);
    }
  }
  return content;
}

std::map<std::string, std::string> CrashModel::Crash(std::uint64_t kept, Data data,
                                                     Random& random) const {
  std::map<std::string, int> names = durable_names_;
  for (std::size_t i = 0; i < pending_names_.size(); ++i) {
    if ((kept >> i & 1U) == 0) continue;
    const NameChange& change = pending_names_[i];
    if (!change.removed.empty()) names.erase(change.removed);
    if (!change.added.empty()) names[change.added] = change.file;
  }
  std::map<std::string, std::string> directory;
  for (const auto& [name, file] : names) {
    directory[name] = CrashedData(files_.at(file), data, random);
  }
  return directory;
}

namespace {

// Collects the damage of all crashes at one moment.
class CrashesAt {
 public:
  CrashesAt(const CrashCheck& check, std::size_t prefix, bool reported,
            std::vector<std::string>& damage)
      : check_(check), prefix_(prefix), reported_(reported), damage_(damage) {}

  void TryAll(const CrashModel& model, Random& random) {
    const std::uint64_t sets = std::uint64_t{1} << std::min<std::size_t>(model.pending_names(), 6);
    for (std::uint64_t kept = 0; kept < sets; ++kept) {
      Judge(model.Crash(kept, CrashModel::Data::kLoseAll, random), kept);
      Judge(model.Crash(kept, CrashModel::Data::kKeepAll, random), kept);
      for (unsigned i = 0; i < check_.samples; ++i) {
        Judge(model.Crash(kept, CrashModel::Data::kRandom, random), kept);
      }
    }
  }

 private:
  void Judge(const std::map<std::string, std::string>& directory, std::uint64_t kept) {
    const auto found = directory.find(check_.name);
    const bool exists = found != directory.end();
    if (exists && found->second == check_.saved) return;
    const bool is_old = exists ? check_.old == found->second : !check_.old;
    if (is_old && !reported_) return;
    std::string what = "a damaged file";
    if (!exists) what = "nothing";
    if (is_old) what = "the old file, although success was reported";
    damage_.push_back(
        fmt::format("a crash after {} operations (names kept {:b}, seed {}) leaves {}", prefix_,
                    kept, check_.seed, what));
  }

  const CrashCheck& check_;
  std::size_t prefix_;
  bool reported_;
  std::vector<std::string>& damage_;
};

}  // namespace

std::vector<std::string> CrashDamage(const std::vector<Operation>& trace, const CrashCheck& check) {
  std::vector<std::string> damage;
  Random random(check.seed);
  std::map<std::string, std::string> before;
  if (check.old) before[check.name] = *check.old;
  CrashModel model(before);
  bool reported = false;
  CrashesAt(check, 0, reported, damage).TryAll(model, random);
  for (std::size_t i = 0; i < trace.size(); ++i) {
    model.Apply(trace[i]);
    reported = reported || trace[i].kind == Kind::kReportSuccess;
    CrashesAt(check, i + 1, reported, damage).TryAll(model, random);
  }
  return damage;
}

}  // namespace fastpersist::testing
