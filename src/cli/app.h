// SPDX-License-Identifier: Apache-2.0
// The command line program: parses the arguments, and runs the one subcommand that they name. Each
// subcommand is a file of its own, which declares its options and returns what is to be done.
#pragma once

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <functional>

#include "cli/exit_status.h"

namespace fastpersist::cli {

/// What the command line asks for; run once all of it was understood.
using Action = std::function<ExitStatus()>;

/// Each adds its subcommand to app, whose parsing sets action.
void AddInspect(CLI::App& app, Action& action);
void AddVerify(CLI::App& app, Action& action);
void AddConvert(CLI::App& app, Action& action);
void AddLs(CLI::App& app, Action& action);
void AddPrune(CLI::App& app, Action& action);
void AddBench(CLI::App& app, Action& action);

/// The whole program; returns its exit status and lets nothing escape.
[[nodiscard]] int Run(int argc, char** argv) noexcept;

}  // namespace fastpersist::cli
