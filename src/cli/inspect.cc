// SPDX-License-Identifier: Apache-2.0
// `fastpersist inspect`: what a file holds, from its structure alone; no tensor is read.
#include <cstdint>
#include <memory>
#include <string>

#include "checkpoint/opened_file.h"
#include "cli/app.h"
#include "cli/directory.h"
#include "cli/inspect_file.h"
#include "cli/json_output.h"
#include "cli/terminal.h"

namespace fastpersist::cli {
namespace {

// So much fits where a person looks; the rest is named by number.
constexpr std::size_t kRowsOnTerminal = 50;

struct InspectOptions {
  std::string file;
  bool json = false;
  bool all = false;
};

ExitStatus Inspect(const InspectOptions& options) {
  const bool all = options.all || !StdoutIsTerminal();
  const std::size_t rows = all ? SIZE_MAX : kRowsOnTerminal;
  if (IsDirectory(options.file)) return InspectDirectory(options.file, options.json, rows);
  const auto file = checkpoint::OpenedFile::Open(options.file);
  if (!file) return Fail(file.error());
  const auto contents = (*file)->contents();
  if (!options.json) return Print(FileText(**file, *contents, rows));
  Json document = JsonDocument("inspect");
  document["file"] = (*file)->path();
  AddFile(document, **file, *contents);
  return Print(JsonText(document));
}

}  // namespace

void AddInspect(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "inspect", "Show what a file or a checkpoint directory holds: tensors, types, shapes, steps");
  command->footer(R"(No tensor is read: the answer takes milliseconds, however large the file is.

Examples:
  fastpersist inspect model.pt
  fastpersist inspect runs/gpt
  fastpersist inspect --json model.safetensors | jq '.tensors[].name')");
  auto options = std::make_shared<InspectOptions>();
  command
      ->add_option("FILE", options->file,
                   "A PyTorch or safetensors file, or a directory of checkpoints")
      ->required();
  command->add_flag("--json", options->json, "One JSON document (docs/cli.md)");
  command->add_flag("--all", options->all, "All tensors; else a terminal gets the first 50");
  command->callback([options, &action] { action = [options] { return Inspect(*options); }; });
}

}  // namespace fastpersist::cli
