// SPDX-License-Identifier: Apache-2.0
#include "engine/libaio_engine.h"

#include <libaio.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <mutex>
#include <utility>
#include <vector>

namespace fastpersist::engine {
namespace {

Error Refused(const char* operation, int negative_errno) {
  return {.operation = operation,
          .system_errno = -negative_errno,
          .detail = negative_errno == -EAGAIN ? "fs.aio-max-nr is used up"
                                              : "native asynchronous I/O cannot be used here"};
}

struct Context {
  io_context_t handle = nullptr;
  unsigned depth = 0;
};

// Destroying a context waits for a grace period of the kernel, some 30 ms, as long as many a save.
// So one idle context is kept for the next save. Thread-safe: a context may be used by any thread.
class IdleContext {
 public:
  // An idle context of that depth, or an empty one.
  static Context Take(unsigned depth) {
    Kept& kept = TheKept();
    const std::scoped_lock lock(kept.mutex);
    return kept.context.depth == depth ? std::exchange(kept.context, {}) : Context{};
  }
  // Precondition: nothing is in flight.
  static void Give(Context context) {
    {
      Kept& kept = TheKept();
      const std::scoped_lock lock(kept.mutex);
      std::swap(kept.context, context);
    }
    if (context.handle != nullptr) ::io_destroy(context.handle);
  }

 private:
  struct Kept {
    std::mutex mutex;
    Context context;
  };
  static Kept& TheKept() {
    static auto* kept = new Kept;  // never destroyed: a save may run until the very end
    return *kept;
  }
};

class LibaioEngine final : public IoEngine {
 public:
  LibaioEngine() = default;
  LibaioEngine(const LibaioEngine&) = delete;
  LibaioEngine& operator=(const LibaioEngine&) = delete;
  LibaioEngine(LibaioEngine&&) = delete;
  LibaioEngine& operator=(LibaioEngine&&) = delete;
  ~LibaioEngine() override {
    if (context_.handle == nullptr) return;
    if (free_.size() == blocks_.size()) {
      IdleContext::Give(context_);
    } else {
      ::io_destroy(context_.handle);  // waits for what is in flight
    }
  }

  Result<void> Open(unsigned depth) {
    context_ = IdleContext::Take(depth);
    int error = context_.handle == nullptr ? -EAGAIN : 0;
    for (unsigned tried = depth; tried > 0 && error == -EAGAIN; tried /= 2) {
      error = ::io_setup(static_cast<int>(tried), &context_.handle);
      context_.depth = tried;
    }
    if (error < 0) return std::unexpected(Refused("io_setup", error));
    blocks_.resize(context_.depth);
    for (iocb& block : blocks_) free_.push_back(&block);
    events_.resize(context_.depth);
    auto probed = Probe();
    if (!probed) ::io_destroy(std::exchange(context_, {}).handle);  // not to be kept for others
    return probed;
  }

  [[nodiscard]] Engine kind() const override { return Engine::kLibaio; }
  [[nodiscard]] unsigned depth() const override { return context_.depth; }

  Result<Submitted> Submit(const IoRequest& request, IoCompletion* completed) override {
    if (free_.empty()) return Submitted::kBusy;
    iocb* block = free_.back();
    const auto offset = static_cast<off_t>(request.offset);
    if (request.kind == IoRequest::Kind::kWrite) {
      ::io_prep_pwrite(block, request.fd, request.data, request.length, offset);
    } else {
      ::io_prep_pread(block, request.fd, request.data, request.length, offset);
    }
    block->data = std::bit_cast<void*>(request.tag);
    int submitted = 0;
    do {
      submitted = ::io_submit(context_.handle, 1, &block);
    } while (submitted == -EINTR);
    if (submitted == 1) {
      free_.pop_back();
      return Submitted::kQueued;
    }
    if (submitted == -EPERM || submitted == -ENOSYS || submitted == -EACCES) {
      return std::unexpected(Refused("io_submit", submitted));
    }
    // The request itself was refused (EINVAL, EBADF, ...): that is its completion.
    *completed = {.tag = request.tag, .result = submitted};
    return Submitted::kCompleted;
  }

  Result<std::size_t> Reap(std::span<IoCompletion> out) override {
    const auto room = static_cast<std::int64_t>(std::min(out.size(), events_.size()));
    const int count = ::io_getevents(context_.handle, 1, room, events_.data(), nullptr);
    if (count == -EINTR) return 0;
    if (count < 0) return std::unexpected(Refused("io_getevents", count));
    for (int i = 0; i < count; ++i) {
      const io_event& event = events_[static_cast<std::size_t>(i)];
      out[static_cast<std::size_t>(i)] = {.tag = std::bit_cast<std::uint64_t>(event.data),
                                          .result = static_cast<std::int64_t>(event.res)};
      free_.push_back(event.obj);
    }
    return static_cast<std::size_t>(count);
  }

 private:
  // A sandbox may refuse submission or reaping only; ask both for nothing.
  Result<void> Probe() {
    if (const int error = ::io_submit(context_.handle, 0, nullptr); error < 0) {
      return std::unexpected(Refused("io_submit", error));
    }
    timespec no_wait{};
    const int error = ::io_getevents(context_.handle, 0, 1, events_.data(), &no_wait);
    if (error < 0 && error != -EINTR) return std::unexpected(Refused("io_getevents", error));
    return {};
  }

  Context context_;
  std::vector<iocb> blocks_;
  std::vector<iocb*> free_;
  std::vector<io_event> events_;
};

}  // namespace

Result<std::unique_ptr<IoEngine>> MakeLibaioEngine(unsigned depth) {
  auto engine = std::make_unique<LibaioEngine>();
  if (auto opened = engine->Open(depth); !opened) return std::unexpected(opened.error());
  return engine;
}

}  // namespace fastpersist::engine
