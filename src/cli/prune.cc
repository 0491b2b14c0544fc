// SPDX-License-Identifier: Apache-2.0
// `fastpersist prune`: removes old checkpoints of a directory, never the newest complete one. Takes
// the directory's lock, so a job that is running there is not disturbed: it is named instead.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/app.h"
#include "cli/directory.h"
#include "cli/json_output.h"
#include "cli/terminal.h"
#include "commit/retention.h"
#include "file/file_ops.h"

namespace fastpersist::cli {
namespace {

struct PruneOptions {
  std::string directory;
  std::uint64_t keep_last = 1;
  std::uint64_t keep_every = 0;  // 0: not given
  bool dry_run = false;
  bool json = false;
};

std::uint64_t BytesOf(const Directory& directory, const std::vector<std::string>& names) {
  std::uint64_t bytes = 0;
  for (const auto& checkpoint : directory.checkpoints) {
    if (std::ranges::find(names, checkpoint.name) != names.end()) bytes += checkpoint.bytes;
  }
  return bytes;
}

ExitStatus Report(const PruneOptions& options, const Directory& before,
                  const std::vector<std::string>& names) {
  const std::uint64_t bytes = BytesOf(before, names);
  if (options.json) {
    Json document = JsonDocument("prune");
    document["directory"] = options.directory;
    document["dry_run"] = options.dry_run;
    document["removed"] = names;
    document["bytes"] = bytes;
    return Print(JsonText(document));
  }
  std::string text;
  for (const std::string& name : names) {
    text += fmt::format("{} {}\n", options.dry_run ? "would remove" : "removed", Escaped(name));
  }
  text += fmt::format("{}: {} of {}{}\n", Escaped(options.directory),
                      Counted(names.size(), "checkpoint"), SizeText(bytes),
                      options.dry_run ? " would be removed" : " removed");
  return Print(text);
}

ExitStatus Prune(const PruneOptions& options) {
  // Looked at before it is opened for writing, which would make a checkpoint directory of whatever
  // was named by mistake.
  auto before = OpenDirectory(options.directory);
  if (!before) return Fail(before.error());
  if (before->single) {
    return Fail({.code = ErrorCode::kInvalidArgument,
                 .operation = "prune",
                 .path = options.directory,
                 .detail = "this is one checkpoint",
                 .advice = "name the directory where it lies"});
  }
  const commit::RetentionPolicy policy{
      .keep_last = options.keep_last,
      .keep_every = options.keep_every == 0 ? std::nullopt : std::optional(options.keep_every)};
  const auto access = options.dry_run ? commit::Root::Access::kRead : commit::Root::Access::kWrite;
  const auto root = commit::Root::Open(options.directory, access);
  if (!root) return Fail(root.error());
  if (!(*root)->lock_warning().empty()) Complain((*root)->lock_warning());
  const auto names = commit::Prune(**root, policy, options.dry_run, file::RealFileOps());
  if (!names) return Fail(names.error());
  return Report(options, *before, *names);
}

}  // namespace

void AddPrune(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("prune", "Remove old checkpoints, never the newest complete one");
  command->footer(R"(Of a step that was saved several times only the newest is kept. Damaged and
unfinished checkpoints are neither counted nor removed. Refused while a job writes there.

Examples:
  fastpersist prune runs/gpt --keep-last 3 --dry-run
  fastpersist prune runs/gpt --keep-last 3 --keep-every 1000)");
  auto options = std::make_shared<PruneOptions>();
  command->add_option("DIR", options->directory, "A directory of checkpoints")->required();
  command->add_option("--keep-last", options->keep_last, "So many of the newest complete ones stay")
      ->required()
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 40U));
  command->add_option("--keep-every", options->keep_every, "Steps divisible by it stay besides")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 62U));
  command->add_flag("--dry-run", options->dry_run, "Only say what would be removed");
  command->add_flag("--json", options->json, "One JSON document (docs/cli.md)");
  command->callback([options, &action] { action = [options] { return Prune(*options); }; });
}

}  // namespace fastpersist::cli
