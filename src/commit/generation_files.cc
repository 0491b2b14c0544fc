// SPDX-License-Identifier: Apache-2.0
#include "commit/generation_files.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "commit/manifest.h"
#include "commit/manifest_json.h"
#include "commit/small_file.h"
#include "commit/target.h"

namespace fastpersist::commit {
namespace {

constexpr std::uint64_t kMaxOwnerBytes = 65'536;

bool IsNotThere(int result) { return result == -ENOENT; }

class Remover {
 public:
  Remover(const Root& root, const std::string& name, int directory, const file::FileOps& files)
      : root_(root),
        name_(name),
        path_(root.path() + '/' + name),
        directory_(directory),
        files_(files) {}

  Result<RemovedFiles> Remove(const std::set<std::string>& parts) {
    std::vector<std::string> names;
    if (const int listed = files_.ListDirectory(directory_, names); listed < 0) {
      return Failed("list directory", path_, listed);
    }
    RemovedFiles removed;
    bool owned = false;
    bool retired = false;
    for (const std::string& file : names) {
      if (file == kOwnerName) {
        owned = true;
      } else if (file == kRetiredName) {
        retired = true;
      } else if (parts.contains(file) || IsPartName(file) || file == kManifestTemporary) {
        if (const int gone = Unlink(file); gone < 0) return Failed("remove", Path(file), gone);
      } else {
        removed.foreign_left = true;
      }
    }
    return Finish(owned, retired, removed);
  }

 private:
  // As long as owner.json is there, others know that they may go on.
  Result<RemovedFiles> Finish(bool owned, bool retired, RemovedFiles removed) {
    if (retired) {
      if (const int gone = Unlink(kRetiredName); gone < 0) {
        return Failed("remove", Path(kRetiredName), gone);
      }
    }
    std::string warning;
    if (const int synced = SyncDirectoryIfPossible(directory_, warning, files_); synced < 0) {
      return Failed("sync the directory", path_, synced);
    }
    if (owned) {
      if (const int gone = Unlink(kOwnerName); gone < 0) {
        return Failed("remove", Path(kOwnerName), gone);
      }
    }
    if (removed.foreign_left) return removed;
    const int gone = files_.RemoveDirectory(root_.fd(), name_.c_str());
    if (gone == -ENOTEMPTY || gone == -EEXIST) return RemovedFiles{.foreign_left = true};
    if (gone < 0 && !IsNotThere(gone)) return Failed("remove directory", path_, gone);
    if (const int synced = SyncDirectoryIfPossible(root_.fd(), warning, files_); synced < 0) {
      return Failed("sync the directory", root_.path(), synced);
    }
    return removed;
  }

  int Unlink(const std::string& file) const {
    const int gone = files_.Unlink(directory_, file.c_str());
    return IsNotThere(gone) ? 0 : gone;
  }
  [[nodiscard]] std::string Path(const std::string& file) const { return path_ + '/' + file; }
  static std::unexpected<Error> Failed(std::string operation, const std::string& path, int result) {
    return std::unexpected(StorageError(std::move(operation), path, -result));
  }

  const Root& root_;
  const std::string& name_;
  std::string path_;
  int directory_;
  const file::FileOps& files_;
};

}  // namespace

std::string OwnerText(const Owner& owner) {
  return CanonicalText({{"version", 1},
                        {"job", owner.job},
                        {"generation", owner.generation},
                        {"root", owner.root}}) +
         '\n';
}

Result<std::optional<Owner>> ReadOwner(int directory, const std::string& path,
                                       const file::FileOps& files) {
  const auto text =
      ReadSmallFile(directory, kOwnerName, path + '/' + kOwnerName, kMaxOwnerBytes, files);
  if (!text && text.error().code == ErrorCode::kStorage) return std::unexpected(text.error());
  if (!text) return std::nullopt;
  const Json json = Json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  Owner owner;
  for (const auto& [key, out] :
       {std::pair("job", &owner.job), std::pair("generation", &owner.generation),
        std::pair("root", &owner.root)}) {
    const auto found = json.find(key);
    if (found == json.end() || !found->is_string()) return std::nullopt;
    *out = found->get<std::string>();
  }
  return owner;
}

int OpenGeneration(const Root& root, const std::string& name, const file::FileOps& files) {
  if (!IsPlainName(name)) return -ENOENT;
  return files.Open(root.fd(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
}

Result<RemovedFiles> RemoveFiles(const Root& root, const std::string& name, int directory,
                                 const std::set<std::string>& parts, const file::FileOps& files) {
  return Remover(root, name, directory, files).Remove(parts);
}

}  // namespace fastpersist::commit
