// SPDX-License-Identifier: Apache-2.0
#include "engine/uring_engine.h"

#include <liburing.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork_closed.h"

namespace fastpersist::engine {
namespace {

// The kernel's limit on one registered buffer (io_uring_register(2)).
constexpr std::size_t kMaxRegistered = std::size_t{1} << 30;
// The kernel may be short of memory for a request (EAGAIN); it passes, or it does not within 10 s.
constexpr unsigned kMaxShortages = 10'000;
constexpr auto kPause = std::chrono::milliseconds(1);

Error Refused(const char* operation, int negative_errno) {
  return {.operation = operation,
          .system_errno = -negative_errno,
          .detail = "io_uring cannot be used here"};
}

// A new ring may lie where another thread's has just been unmapped. liburing maps and unmaps by
// system calls of its own, which ThreadSanitizer does not see; this pair tells it that the one came
// first.
constinit std::atomic<unsigned> rings_closed{0};

class UringEngine final : public IoEngine {
 public:
  explicit UringEngine(unsigned depth) : depth_(depth) {}
  UringEngine(const UringEngine&) = delete;
  UringEngine& operator=(const UringEngine&) = delete;
  UringEngine(UringEngine&&) = delete;
  UringEngine& operator=(UringEngine&&) = delete;
  ~UringEngine() override {
    fork_closed_ = {};
    if (!open_) return;
    rings_closed.fetch_add(1, std::memory_order_release);
    ::io_uring_queue_exit(&ring_);
  }

  Result<void> Open() {
    int error = -EINVAL;
    for (const unsigned flags :
         {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, IORING_SETUP_COOP_TASKRUN, 0U}) {
      error = ::io_uring_queue_init(depth_, &ring_, flags);
      if (error != -EINVAL) break;  // EINVAL: the kernel does not know the flags
    }
    if (error < 0) return std::unexpected(Refused("io_uring_setup", error));
    open_ = true;
    (void)rings_closed.load(std::memory_order_acquire);
    fork_closed_ = base::ForkClosed(ring_.ring_fd);
    return Probe();
  }

  [[nodiscard]] Engine kind() const override { return Engine::kUring; }
  [[nodiscard]] unsigned depth() const override { return depth_; }

  bool RegisterMemory(std::span<std::byte> memory) override {
    std::vector<iovec> pieces;
    for (std::size_t at = 0; at < memory.size(); at += kMaxRegistered) {
      pieces.push_back({.iov_base = memory.data() + at,
                        .iov_len = std::min(kMaxRegistered, memory.size() - at)});
    }
    if (::io_uring_register_buffers(&ring_, pieces.data(), static_cast<unsigned>(pieces.size())) !=
        0)
      return false;
    registered_ = memory;
    return true;
  }

  Result<Submitted> Submit(const IoRequest& request, IoCompletion* /*completed*/) override {
    if (in_flight_ == depth_) return Submitted::kBusy;
    io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
    if (sqe == nullptr) return Submitted::kBusy;
    Prepare(request, sqe);
    if (const int error = EnterPrepared(); error < 0) {
      return std::unexpected(Refused("io_uring_enter", error));
    }
    ++in_flight_;
    return Submitted::kQueued;
  }

  Result<std::size_t> Reap(std::span<IoCompletion> out) override {
    std::size_t count = Collect(out);
    if (count > 0) return count;
    // Waits only. A request whose submission failed is still in the ring and must not follow now.
    io_uring_cqe* cqe = nullptr;
    const int error = ::io_uring_wait_cqe(&ring_, &cqe);
    if (error < 0 && error != -EINTR) return std::unexpected(Refused("io_uring_enter", error));
    return Collect(out);
  }

 private:
  Result<void> Probe() {
    io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
    ::io_uring_prep_nop(sqe);
    in_flight_ = 1;
    if (const int error = EnterPrepared(); error < 0) {
      return std::unexpected(Refused("io_uring_enter", error));
    }
    IoCompletion done;
    std::size_t count = 0;
    while (count == 0) {
      auto reaped = Reap({&done, 1});
      if (!reaped) return std::unexpected(reaped.error());
      count = *reaped;
    }
    return {};
  }

  // Submits what is prepared. Retries what passes by itself.
  int EnterPrepared() {
    for (unsigned shortages = 0;;) {
      const int result = ::io_uring_submit(&ring_);
      if (result >= 0) return 0;
      if (result == -EINTR) {
        if (::io_uring_sq_ready(&ring_) == 0) return 0;
      } else if ((result == -EAGAIN || result == -EBUSY) && shortages < kMaxShortages) {
        ++shortages;
        std::this_thread::sleep_for(kPause);
      } else {
        return result;
      }
    }
  }

  std::size_t Collect(std::span<IoCompletion> out) {
    std::size_t count = 0;
    io_uring_cqe* cqe = nullptr;
    while (count < out.size() && ::io_uring_peek_cqe(&ring_, &cqe) == 0 && cqe != nullptr) {
      out[count++] = {.tag = cqe->user_data, .result = cqe->res};
      ::io_uring_cqe_seen(&ring_, cqe);
      --in_flight_;
    }
    return count;
  }

  void Prepare(const IoRequest& request, io_uring_sqe* sqe) const {
    const auto length = static_cast<unsigned>(request.length);
    const bool write = request.kind == IoRequest::Kind::kWrite;
    if (const int index = RegisteredIndex(request); index >= 0) {
      write ? ::io_uring_prep_write_fixed(sqe, request.fd, request.data, length, request.offset,
                                          index)
            : ::io_uring_prep_read_fixed(sqe, request.fd, request.data, length, request.offset,
                                         index);
    } else {
      write ? ::io_uring_prep_write(sqe, request.fd, request.data, length, request.offset)
            : ::io_uring_prep_read(sqe, request.fd, request.data, length, request.offset);
    }
    sqe->user_data = request.tag;
  }

  // Which registered piece holds the whole request; -1 if none does.
  [[nodiscard]] int RegisteredIndex(const IoRequest& request) const {
    if (registered_.empty() || request.data < registered_.data()) return -1;
    const auto at = static_cast<std::size_t>(request.data - registered_.data());
    if (at + request.length > registered_.size()) return -1;
    const std::size_t first = at / kMaxRegistered;
    return first == (at + request.length - 1) / kMaxRegistered ? static_cast<int>(first) : -1;
  }

  io_uring ring_{};
  bool open_ = false;
  base::ForkClosed fork_closed_;
  unsigned depth_;
  unsigned in_flight_ = 0;
  std::span<std::byte> registered_;
};

}  // namespace

Result<std::unique_ptr<IoEngine>> MakeUringEngine(unsigned depth) {
  auto engine = std::make_unique<UringEngine>(depth);
  if (auto opened = engine->Open(); !opened) return std::unexpected(opened.error());
  return engine;
}

}  // namespace fastpersist::engine
