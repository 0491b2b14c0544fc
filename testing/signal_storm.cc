// SPDX-License-Identifier: Apache-2.0
#include "testing/signal_storm.h"

#include <sys/time.h>

#include <atomic>

namespace fastpersist::testing {
namespace {

std::atomic<unsigned> g_handled{0};

// 0 stops it.
void InterruptEvery(suseconds_t microseconds) {
  const itimerval timer{.it_interval = {.tv_usec = microseconds},
                        .it_value = {.tv_usec = microseconds}};
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

}  // namespace

SignalStorm::SignalStorm() {
  g_handled = 0;
  struct sigaction action{};
  action.sa_handler = [](int) { ++g_handled; };
  ::sigaction(SIGALRM, &action, &alarm_before_);
  ::sigaction(SIGCHLD, &action, &child_before_);
  InterruptEvery(1000);
}

SignalStorm::~SignalStorm() {
  InterruptEvery(0);
  ::sigaction(SIGALRM, &alarm_before_, nullptr);
  ::sigaction(SIGCHLD, &child_before_, nullptr);
}

unsigned SignalStorm::Count() { return g_handled; }

}  // namespace fastpersist::testing
