// SPDX-License-Identifier: Apache-2.0
// Tests that need a process of their own (to be killed, to give up privileges, to fork before the
// library was used) run a role: the test program is started once more and does only that.
//
//   const RegisterRole kLoop("saves in a loop", [](const Arguments& arguments) { ...; return 0; });
//   TEST(...) { ChildProcess child("saves in a loop", {path}); ... }
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace fastpersist::testing {

using Arguments = std::vector<std::string>;
/// Returns the exit status.
using Role = std::function<int(const Arguments& arguments)>;

/// Names a role; a constant at namespace scope. Names are unique in the program.
class RegisterRole {
 public:
  RegisterRole(const std::string& name, Role role);
};

struct ChildResult {
  int exit_code = -1;  ///< -1 when a signal ended it.
  int signal = 0;      ///< 0 when it exited.
  std::string report;  ///< All that it said with Report.
};

class ChildProcess {
 public:
  /// Starts it. Standard output is discarded (GoogleTest's banner), standard error is shared.
  ChildProcess(const std::string& role, const Arguments& arguments);
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ChildProcess(ChildProcess&&) = delete;
  ChildProcess& operator=(ChildProcess&&) = delete;
  /// Kills it if it was not waited for.
  ~ChildProcess();

  /// Waits until it reported something, or ended.
  void WaitForReport();
  void Kill() const;
  [[nodiscard]] ChildResult Wait();

 private:
  bool ReadReport();

  pid_t pid_ = -1;
  base::UniqueFd pipe_;
  std::string report_;
};

/// Starts a role and waits for its end.
[[nodiscard]] ChildResult RunRole(const std::string& role, const Arguments& arguments = {});

/// In a role: sends one line to the test.
void Report(const std::string& line);

/// In a role: becomes user and group 65534 if it is root, so that permissions count.
void GiveUpPrivileges();

}  // namespace fastpersist::testing
