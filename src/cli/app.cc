// SPDX-License-Identifier: Apache-2.0
#include "cli/app.h"

#include <fmt/format.h>

#include <csignal>
#include <exception>
#include <new>
#include <string>

#include "cli/interrupt.h"
#include "cli/terminal.h"
#include "fastpersist/version.h"

namespace fastpersist::cli {
namespace {

constexpr auto kFooter = R"(Examples:
  fastpersist inspect model.pt                    what is inside
  fastpersist verify model.pt                     read it all, compare every checksum
  fastpersist convert model.pt model.safetensors  the same tensors in the other format
  fastpersist ls runs/gpt                         checkpoints of a run, newest first
  fastpersist prune runs/gpt --keep-last 3        removes older ones
  fastpersist bench /mnt/checkpoints              how fast saving and loading are there

Exit status: 0 good, 1 damaged or not as expected, 2 usage, 3 I/O error.)";

ExitStatus Usage(const CLI::App& app, std::string sentence) {
  while (!sentence.empty() && (sentence.back() == '.' || sentence.back() == '\n')) {
    sentence.pop_back();
  }
  const auto chosen = app.get_subcommands();
  const std::string command = chosen.empty() ? "" : " " + chosen.front()->get_name();
  Complain(fmt::format("{}; see fastpersist{} --help", sentence, command));
  return ExitStatus::kUsage;
}

ExitStatus ParseAndRun(int argc, char** argv) {
  CLI::App app(
      "Looks into checkpoint files and directories (PyTorch, safetensors), checks and converts.",
      "fastpersist");
  app.require_subcommand(1);
  app.set_version_flag("--version", "fastpersist " FASTPERSIST_VERSION_STRING);
  app.footer(kFooter);
  Action action;
  AddInspect(app, action);
  AddVerify(app, action);
  AddConvert(app, action);
  AddLs(app, action);
  AddPrune(app, action);
  AddBench(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return Print(app.help());
  } catch (const CLI::CallForVersion& version) {
    return Print(fmt::format("{}\n", version.what()));
  } catch (const CLI::ParseError& error) {
    return Usage(app, error.what());
  }
  return action();
}

}  // namespace

int Run(int argc, char** argv) noexcept {
  try {
    // A reader that has gone is seen where we write.
    (void)std::signal(SIGPIPE, SIG_IGN);
    WatchForInterrupts();
    return static_cast<int>(ParseAndRun(argc, argv));
  } catch (const std::bad_alloc&) {
    Complain("there is not enough memory");
  } catch (const std::exception& error) {
    Complain(error.what());
  }
  return static_cast<int>(ExitStatus::kStorage);
}

}  // namespace fastpersist::cli
