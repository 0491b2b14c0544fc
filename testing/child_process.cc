// SPDX-License-Identifier: Apache-2.0
#include "testing/child_process.h"

#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <map>
#include <string_view>
#include <system_error>
#include <utility>

namespace fastpersist::testing {
namespace {

constexpr const char* kVariable = "FASTPERSIST_TEST_ROLE";
constexpr char kSeparator = '\x1f';
constexpr int kReportFd = 3;
constexpr uid_t kNobody = 65534;

std::map<std::string, Role>& Roles() {
  static std::map<std::string, Role> roles;
  return roles;
}

void Require(bool works, const char* what) {
  if (!works) throw std::system_error(errno, std::generic_category(), what);
}

// Runs before any test; in a child it runs instead of them.
class RoleEnvironment : public ::testing::Environment {
 public:
  void SetUp() override {
    const char* value = std::getenv(kVariable);
    if (value == nullptr) return;
    Arguments words(1);
    for (const char* at = value; *at != '\0'; ++at) {
      if (*at == kSeparator) {
        words.emplace_back();
      } else {
        words.back() += *at;
      }
    }
    const auto role = Roles().find(words.front());
    std::exit(role == Roles().end() ? 127 : role->second({words.begin() + 1, words.end()}));
  }
};

[[maybe_unused]] ::testing::Environment* const kRoleEnvironment =
    ::testing::AddGlobalTestEnvironment(new RoleEnvironment);

// Ours without GoogleTest's settings: the child has nothing to filter, shard or report.
std::vector<std::string> ChildVariables(const std::string& role, const Arguments& arguments) {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    if (!text.starts_with("GTEST_") && !text.starts_with("TESTBRIDGE_")) {
      variables.emplace_back(text);
    }
  }
  std::string value = std::string(kVariable) + '=' + role;
  for (const std::string& argument : arguments) value += kSeparator + argument;
  variables.push_back(std::move(value));
  return variables;
}

}  // namespace

RegisterRole::RegisterRole(const std::string& name, Role role) { Roles()[name] = std::move(role); }

ChildProcess::ChildProcess(const std::string& role, const Arguments& arguments) {
  std::array<int, 2> ends{};
  Require(::pipe2(ends.data(), O_CLOEXEC) == 0, "pipe2");
  pipe_.Reset(ends[0]);
  const base::UniqueFd write_end(ends[1]);

  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, write_end.get(), kReportFd);
  ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);

  std::vector<std::string> variables = ChildVariables(role, arguments);
  std::vector<char*> environment;
  environment.reserve(variables.size() + 1);
  for (std::string& variable : variables) environment.push_back(variable.data());
  environment.push_back(nullptr);
  std::string program = "fastpersist_tests";
  std::array<char*, 2> words{program.data(), nullptr};
  errno =
      ::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, words.data(), environment.data());
  const int error = errno;
  ::posix_spawn_file_actions_destroy(&actions);
  errno = error;
  Require(error == 0, "posix_spawn");
}

ChildProcess::~ChildProcess() {
  if (pid_ < 0) return;
  Kill();
  (void)Wait();
}

bool ChildProcess::ReadReport() {
  std::array<char, 4096> piece{};
  const ssize_t size = ::read(pipe_.get(), piece.data(), piece.size());
  if (size > 0) report_.append(piece.data(), static_cast<std::size_t>(size));
  return size > 0 || (size < 0 && errno == EINTR);
}

void ChildProcess::WaitForReport() {
  while (report_.empty() && ReadReport()) {
  }
}

void ChildProcess::Kill() const { ::kill(pid_, SIGKILL); }

ChildResult ChildProcess::Wait() {
  while (ReadReport()) {
  }
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  ChildResult result{.report = std::move(report_)};
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  return result;
}

ChildResult RunRole(const std::string& role, const Arguments& arguments) {
  return ChildProcess(role, arguments).Wait();
}

void Report(const std::string& line) {
  const std::string text = line + '\n';
  Require(::write(kReportFd, text.data(), text.size()) == static_cast<ssize_t>(text.size()),
          "write the report");
}

void GiveUpPrivileges() {
  if (::geteuid() != 0) return;
  Require(::setgroups(0, nullptr) == 0, "setgroups");
  Require(::setresgid(kNobody, kNobody, kNobody) == 0, "setresgid");
  Require(::setresuid(kNobody, kNobody, kNobody) == 0, "setresuid");
  // A process that changed its user is hidden from its own leak checker otherwise.
  Require(::prctl(PR_SET_DUMPABLE, 1) == 0, "prctl");
}

}  // namespace fastpersist::testing
