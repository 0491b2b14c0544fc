// SPDX-License-Identifier: Apache-2.0
#include "engine/threads_engine.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/signals_blocked.h"
#include "engine/buffered_engine.h"

namespace fastpersist::engine {
namespace {

class ThreadsEngine final : public IoEngine {
 public:
  ThreadsEngine() = default;
  ThreadsEngine(const ThreadsEngine&) = delete;
  ThreadsEngine& operator=(const ThreadsEngine&) = delete;
  ThreadsEngine(ThreadsEngine&&) = delete;
  ThreadsEngine& operator=(ThreadsEngine&&) = delete;
  ~ThreadsEngine() override {
    {
      const std::scoped_lock lock(mutex_);
      closing_ = true;
    }
    work_.notify_all();
  }  // std::jthread joins

  Result<void> Open(unsigned depth) {
    const base::SignalsBlocked blocked;
    try {
      for (unsigned i = 0; i < depth; ++i) {
        threads_.emplace_back([this] { Work(); });
        ::pthread_setname_np(threads_.back().native_handle(), "fastpersist-io");
      }
    } catch (const std::system_error& error) {
      if (threads_.empty()) {
        return std::unexpected(Error{.operation = "start a thread",
                                     .system_errno = error.code().value(),
                                     .detail = "no thread can be started"});
      }
    }
    const std::scoped_lock lock(mutex_);
    requests_.reserve(threads_.size());
    completions_.reserve(threads_.size());
    return {};
  }

  [[nodiscard]] Engine kind() const override { return Engine::kThreads; }
  [[nodiscard]] unsigned depth() const override { return static_cast<unsigned>(threads_.size()); }

  Result<Submitted> Submit(const IoRequest& request, IoCompletion* /*completed*/) override {
    {
      const std::scoped_lock lock(mutex_);
      if (in_flight_ == threads_.size()) return Submitted::kBusy;
      ++in_flight_;
      requests_.push_back(request);
    }
    work_.notify_one();
    return Submitted::kQueued;
  }

  Result<std::size_t> Reap(std::span<IoCompletion> out) override {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return !completions_.empty(); });
    std::size_t count = 0;
    while (count < out.size() && count < completions_.size()) {
      out[count] = completions_[count];
      ++count;
    }
    completions_.erase(completions_.begin(),
                       completions_.begin() + static_cast<std::ptrdiff_t>(count));
    in_flight_ -= count;
    return count;
  }

 private:
  void Work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return closing_ || !requests_.empty(); });
      if (requests_.empty()) return;
      const IoRequest request = requests_.front();
      requests_.erase(requests_.begin());
      lock.unlock();
      const std::int64_t result = MoveBytes(request);
      lock.lock();
      completions_.push_back({.tag = request.tag, .result = result});
      done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  // Never longer than there are threads, and reserved: nothing is allocated for an operation.
  std::vector<IoRequest> requests_;
  std::vector<IoCompletion> completions_;
  std::size_t in_flight_ = 0;
  bool closing_ = false;
  std::vector<std::jthread> threads_;  // last: joined before the rest goes
};

}  // namespace

Result<std::unique_ptr<IoEngine>> MakeThreadsEngine(unsigned depth) {
  auto engine = std::make_unique<ThreadsEngine>();
  if (auto opened = engine->Open(depth); !opened) return std::unexpected(opened.error());
  return engine;
}

}  // namespace fastpersist::engine
