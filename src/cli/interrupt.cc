// SPDX-License-Identifier: Apache-2.0
#include "cli/interrupt.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "cli/exit_status.h"
#include "cli/terminal.h"

namespace fastpersist::cli {
namespace {

struct Duties {
  std::mutex mutex;
  bool deferred = false;
  std::string folder;  // empty: none
};

Duties& TheDuties() {
  // Never destroyed: the watching thread lives until the process ends.
  static auto* duties = new Duties;
  return *duties;
}

std::atomic<int> noted = 0;

void RemoveFolder(const std::string& folder) {
  if (folder.empty()) return;
  // Another thread may be about to make a file there; once the folder is gone it cannot.
  for (int attempt = 0; attempt < 100; ++attempt) {
    std::error_code error;
    std::filesystem::remove_all(folder, error);
    if (!error) return;
  }
  Complain(fmt::format("could not remove {}", folder));
}

void EndBy(int signal) {
  Duties& duties = TheDuties();
  // Kept until the end: the main thread must not go on where its folder has gone.
  const std::scoped_lock lock(duties.mutex);
  if (duties.deferred) {
    noted = signal;
    return;
  }
  RemoveFolder(duties.folder);
  Complain("interrupted");
  ::_exit(static_cast<int>(ExitStatus::kInterrupted) + signal);
}

sigset_t Watched() {
  sigset_t watched;
  sigemptyset(&watched);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action{};
    // What the parent ignores (nohup) is not to end us.
    const bool ignored = ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
    if (!ignored) sigaddset(&watched, signal);
  }
  return watched;
}

}  // namespace

void WatchForInterrupts() {
  const sigset_t watched = Watched();
  ::pthread_sigmask(SIG_BLOCK, &watched, nullptr);
  try {
    std::thread([watched] {
      for (;;) {
        int signal = 0;
        if (::sigwait(&watched, &signal) == 0) EndBy(signal);
      }
    }).detach();
  } catch (const std::system_error&) {  // no threads to be had: signals end us as they always do
    ::pthread_sigmask(SIG_UNBLOCK, &watched, nullptr);
  }
}

FolderRemovedAtEnd::FolderRemovedAtEnd(const std::string& prefix) : path_(prefix + "XXXXXX") {
  const std::scoped_lock lock(TheDuties().mutex);
  if (::mkdtemp(path_.data()) == nullptr) {
    system_errno_ = errno;
  } else {
    TheDuties().folder = path_;
  }
}

FolderRemovedAtEnd::~FolderRemovedAtEnd() {
  const std::scoped_lock lock(TheDuties().mutex);
  RemoveFolder(std::exchange(TheDuties().folder, ""));
}

InterruptDeferred::InterruptDeferred() {
  const std::scoped_lock lock(TheDuties().mutex);
  TheDuties().deferred = true;
}

InterruptDeferred::~InterruptDeferred() {
  const std::scoped_lock lock(TheDuties().mutex);
  TheDuties().deferred = false;
}

int InterruptDeferred::Noted() { return noted; }

}  // namespace fastpersist::cli
