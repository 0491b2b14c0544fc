// SPDX-License-Identifier: Apache-2.0
#include "engine/libaio_engine.h"

#include <libaio.h>

#include <algorithm>
#include <cerrno>
#include <vector>

namespace fastpersist::engine {
namespace {

Error Refused(const char* operation, int negative_errno) {
  return {.operation = operation,
          .system_errno = -negative_errno,
          .detail = negative_errno == -EAGAIN ? "fs.aio-max-nr is used up"
                                              : "native asynchronous I/O cannot be used here"};
}

class LibaioEngine final : public IoEngine {
 public:
  LibaioEngine() = default;
  LibaioEngine(const LibaioEngine&) = delete;
  LibaioEngine& operator=(const LibaioEngine&) = delete;
  LibaioEngine(LibaioEngine&&) = delete;
  LibaioEngine& operator=(LibaioEngine&&) = delete;
  ~LibaioEngine() override {
    if (context_ != nullptr) ::io_destroy(context_);
  }

  Result<void> Open(unsigned depth) {
    int error = -EAGAIN;
    for (unsigned tried = depth; tried > 0 && error == -EAGAIN; tried /= 2) {
      error = ::io_setup(static_cast<int>(tried), &context_);
      depth_ = tried;
    }
    if (error < 0) return std::unexpected(Refused("io_setup", error));
    blocks_.resize(depth_);
    for (iocb& block : blocks_) free_.push_back(&block);
    events_.resize(depth_);
    return Probe();
  }

  [[nodiscard]] Engine kind() const override { return Engine::kLibaio; }
  [[nodiscard]] unsigned depth() const override { return depth_; }

  Result<Submitted> Submit(const IoRequest& request, IoCompletion* completed) override {
    if (free_.empty()) return Submitted::kBusy;
    iocb* block = free_.back();
    const auto offset = static_cast<long long>(request.offset);
    if (request.kind == IoRequest::Kind::kWrite) {
      ::io_prep_pwrite(block, request.fd, request.data, request.length, offset);
    } else {
      ::io_prep_pread(block, request.fd, request.data, request.length, offset);
    }
    block->data = reinterpret_cast<void*>(request.tag);
    int submitted = 0;
    do {
      submitted = ::io_submit(context_, 1, &block);
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
    const auto room = static_cast<long>(std::min(out.size(), events_.size()));
    const int count = ::io_getevents(context_, 1, room, events_.data(), nullptr);
    if (count == -EINTR) return 0;
    if (count < 0) return std::unexpected(Refused("io_getevents", count));
    for (int i = 0; i < count; ++i) {
      const io_event& event = events_[static_cast<std::size_t>(i)];
      out[static_cast<std::size_t>(i)] = {.tag = reinterpret_cast<std::uint64_t>(event.data),
                                          .result = static_cast<std::int64_t>(event.res)};
      free_.push_back(event.obj);
    }
    return static_cast<std::size_t>(count);
  }

 private:
  // A sandbox may refuse submission or reaping only; ask both for nothing.
  Result<void> Probe() {
    if (const int error = ::io_submit(context_, 0, nullptr); error < 0) {
      return std::unexpected(Refused("io_submit", error));
    }
    timespec no_wait{};
    const int error = ::io_getevents(context_, 0, 1, events_.data(), &no_wait);
    if (error < 0 && error != -EINTR) return std::unexpected(Refused("io_getevents", error));
    return {};
  }

  io_context_t context_ = nullptr;
  unsigned depth_ = 0;
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
