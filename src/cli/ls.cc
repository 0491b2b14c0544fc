// SPDX-License-Identifier: Apache-2.0
// `fastpersist ls`: the checkpoints of a directory, newest first, and what is wrong with those that
// do not count. Changes nothing, and may be called while a job writes there.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "cli/app.h"
#include "cli/directory.h"
#include "cli/json_output.h"
#include "cli/terminal.h"

namespace fastpersist::cli {
namespace {

struct LsOptions {
  std::string directory;
  bool json = false;
};

ExitStatus List(const LsOptions& options) {
  const auto directory = OpenDirectory(options.directory);
  if (!directory) return Fail(directory.error());
  if (!options.json) {
    if (directory->checkpoints.empty()) {
      return Print(fmt::format("{}: no checkpoints\n", Escaped(options.directory)));
    }
    return Print(CheckpointsText(directory->checkpoints));
  }
  Json document = JsonDocument("ls");
  document["directory"] = options.directory;
  document["id"] = directory->root->id();
  Json& checkpoints = document["checkpoints"] = Json::array();
  for (const auto& checkpoint : directory->checkpoints) {
    checkpoints.push_back(CheckpointJson(checkpoint));
  }
  return Print(JsonText(document));
}

}  // namespace

void AddLs(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("ls", "List the checkpoints of a directory, newest first");
  command->footer(R"(A checkpoint is complete when its manifest can be read and every part is there
with its size; verify compares the checksums too.

Examples:
  fastpersist ls runs/gpt
  fastpersist ls --json runs/gpt | jq '.checkpoints[] | select(.state == "complete") | .step')");
  auto options = std::make_shared<LsOptions>();
  command->add_option("DIR", options->directory, "A directory of checkpoints")->required();
  command->add_flag("--json", options->json, "One JSON document (docs/cli.md)");
  command->callback([options, &action] { action = [options] { return List(*options); }; });
}

}  // namespace fastpersist::cli
