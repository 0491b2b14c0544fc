// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/read_ranges.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fork_closed.h"
#include "base/fork_guard.h"
#include "base/unique_fd.h"
#include "checkpoint/buffer_sizes.h"
#include "checkpoint/staging_lease.h"
#include "engine/buffered_engine.h"
#include "pipeline/read_stream.h"

namespace fastpersist::checkpoint {
namespace {

// With this much of a file in the page cache, copying from there is faster than the device.
constexpr double kMostlyCached = 0.8;
// A copy from the page cache is bound by the processor: more threads than that gain little.
constexpr unsigned kCopyThreads = 4;
constexpr plan::DeviceLimits kBuffered{.memory_align = 1, .offset_align = 1, .direct = false};

using Refused = std::vector<std::pair<Engine, std::string>>;
using Clock = std::chrono::steady_clock;

// The descriptor that data is read from, and what it demands.
class DataFile {
 public:
  DataFile(const file::InputFile& file, const Options& options, const file::FileOps& files)
      : files_(files), fd_(file.fd()) {
    if (!options.direct || options.engine == Engine::kBuffered) return;
    cached_ = options.engine == Engine::kAuto &&
              files.CachedShare(file.fd(), file.size()) >= kMostlyCached;
    if (cached_) return;
    // Through /proc, so that it is the same file even if its name is another's by now.
    const std::string name = fmt::format("/proc/self/fd/{}", file.fd());
    const int fd = files.Open(AT_FDCWD, name.c_str(), O_RDONLY | O_DIRECT, 0);
    fell_back_ = fd < 0;
    if (fell_back_) return;
    own_ = base::UniqueFd(fd);
    fork_closed_ = base::ForkClosed(fd);
    fd_ = fd;
    limits_ = files.ReadLimits(fd);
    if (limits_.direct) return;
    fell_back_ = true;
    fork_closed_ = base::ForkClosed();
    own_ = base::UniqueFd();
    fd_ = file.fd();
  }

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] const plan::DeviceLimits& limits() const { return limits_; }
  [[nodiscard]] bool fell_back() const { return fell_back_; }
  /// Not direct, because most of it is in memory already.
  [[nodiscard]] bool cached() const { return cached_; }
  /// How many blocks are best in flight.
  [[nodiscard]] unsigned Depth() const {
    if (cached_) return kCopyThreads;
    const bool copied = !limits_.direct || files_.ProcessorCopies(fd_);
    return copied ? kCopiedDepth : kDefaultDepth;
  }
  [[nodiscard]] int LeaveDirect() const { return files_.SetDirect(fd_, false); }

 private:
  const file::FileOps& files_;
  int fd_;
  base::UniqueFd own_;
  base::ForkClosed fork_closed_;  // after own_: unregistered before it is closed
  plan::DeviceLimits limits_ = kBuffered;
  bool fell_back_ = false;
  bool cached_ = false;
};

// One attempt to read everything, with one engine.
class ReadAttempt {
 public:
  ReadAttempt(const file::InputFile& file, const Options& options, const Environment& environment,
              ReadInfo& info)
      : file_(file), options_(options), environment_(environment), info_(info) {}

  Result<void> Run(std::span<const plan::Range> wanted, std::span<const plan::Delivery> deliveries,
                   pipeline::ByteSink& sink, const Refused& refused, bool staged_only) {
    const DataFile data(file_, options_, *environment_.files);
    const plan::DeviceLimits& limits = data.limits();
    const std::uint64_t span = wanted.empty() ? 0 : wanted.back().end - wanted.front().begin;
    const unsigned depth = options_.queue_depth ? *options_.queue_depth : data.Depth();
    // One more than are in flight: it is looked at meanwhile.
    const std::uint64_t staging_bytes = std::min(
        (std::uint64_t{depth} + 1) * options_.block_bytes.value_or(kDefaultBlock), kDefaultStaging);
    BufferSizes sizes = ChooseSizes(options_, limits, span, staging_bytes);
    const plan::ReadPlanOptions plan_options{
        .limits = limits,
        .block_bytes = sizes.block,
        .min_in_place_bytes = staged_only ? UINT64_MAX : kMinInPlace,
        .coalesce_bytes = std::max<std::uint64_t>(limits.offset_align, std::uint64_t{128} << 10)};
    plan::ReadPlan plan = plan::PlanReads(wanted, deliveries, plan_options);

    std::optional<StagingLease> lease;
    std::span<std::byte> staging;
    unsigned slots = depth + 2;  // some wait to be looked at while the others are in flight
    if (plan.staged_bytes > 0) {
      auto taken = StagingLease::Take(sizes.staging, sizes.align);
      if (!taken) return Failed(std::move(taken.error()));
      lease.emplace(*std::move(taken));
      const std::uint64_t block = sizes.block;
      sizes.FitInto(lease->pool().memory().size());
      if (sizes.block != block) {  // memory is short
        auto shorter = plan_options;
        shorter.block_bytes = sizes.block;
        plan = plan::PlanReads(wanted, deliveries, shorter);
      }
      staging = lease->pool().memory().first(sizes.staging);
      slots = static_cast<unsigned>(sizes.staging / sizes.block);
    }
    auto choice = Choose(data, depth, refused);
    if (staging.size() >= kMinRegistered) (void)choice.engine->RegisterMemory(staging);
    const Engine chosen = choice.engine->kind();
    info_.staged_bytes = plan.staged_bytes;
    info_.in_place_bytes = plan.in_place_bytes;
    info_.bytes = plan.staged_bytes + plan.in_place_bytes;

    auto outcome = pipeline::ReadStream(plan, sizes.block, slots,
                                        {.fd = data.fd(),
                                         .path = file_.name(),
                                         .limits = limits,
                                         .leave_direct = [&] { return data.LeaveDirect(); },
                                         .kind = engine::IoRequest::Kind::kRead},
                                        choice.engine, staging, sink);
    // A read that nobody can wait for may still land in the memory: that must not be used anew.
    if (outcome.reads_lost && lease) std::move(*lease).Abandon();
    if (outcome.engine_failed && !outcome.reads_lost) failed_engine_ = chosen;
    if (outcome.error) return Failed(*std::move(outcome.error));
    Describe(choice, lease, data, outcome.left_direct);
    return {};
  }

  /// The engine that failed as such; kAuto if none did.
  [[nodiscard]] Engine failed_engine() const { return failed_engine_; }

 private:
  [[nodiscard]] engine::EngineChoice Choose(const DataFile& data, unsigned depth,
                                            const Refused& refused) const {
    if (!data.cached()) {
      return engine::ChooseEngine(options_.engine, data.limits().direct, depth,
                                  environment_.make_engine, refused);
    }
    std::string reason = "the file is in the page cache";
    const auto failed = std::ranges::find(refused, Engine::kThreads, &Refused::value_type::first);
    if (failed != refused.end()) {
      reason += fmt::format("; threads: {}", failed->second);
    } else {
      auto threads = environment_.make_engine(Engine::kThreads, std::min(depth, kCopyThreads));
      if (threads) return {.engine = *std::move(threads), .reason = std::move(reason)};
      reason += fmt::format("; threads: {}", threads.error().Message());
    }
    return {.engine = std::make_unique<engine::BufferedEngine>(),
            .reason = std::move(reason),
            .fell_back = true};
  }

  [[nodiscard]] Result<void> Failed(Error error) const {
    error.path = file_.name();
    return std::unexpected(std::move(error));
  }

  void Describe(const engine::EngineChoice& choice, const std::optional<StagingLease>& lease,
                const DataFile& data, const std::string& left_direct) {
    info_.engine = choice.engine->kind();
    info_.direct = data.limits().direct && left_direct.empty();
    info_.engine_reason = options_.direct ? choice.reason : "direct I/O was switched off";
    if (!left_direct.empty()) info_.engine_reason = left_direct;
    const std::string shortcoming = lease ? lease->pool().shortcoming() : "";
    if (!shortcoming.empty()) info_.engine_reason += "; " + shortcoming;
    const bool slower = data.fell_back() || !left_direct.empty() || choice.fell_back;
    if (slower) {
      info_.warning =
          fmt::format("reading with {}: {}", EngineName(info_.engine), info_.engine_reason);
    }
  }

  const file::InputFile& file_;
  const Options& options_;
  const Environment& environment_;
  ReadInfo& info_;
  Engine failed_engine_ = Engine::kAuto;
};

}  // namespace

Result<ReadInfo> ReadRanges(const file::InputFile& file, std::span<const plan::Range> wanted,
                            std::span<const plan::Delivery> deliveries, pipeline::ByteSink& sink,
                            const Options& options, const Environment& environment) {
  const auto start = Clock::now();
  if (auto valid = Validate(options); !valid) return std::unexpected(valid.error());
  if (auto alive = base::CheckNotForked(); !alive) return std::unexpected(alive.error());
  ReadInfo info;
  Refused refused;
  bool staged_only = false;
  for (;;) {
    ReadAttempt attempt(file, options, environment, info);
    auto done = attempt.Run(wanted, deliveries, sink, refused, staged_only);
    if (done) break;
    if (attempt.failed_engine() != Engine::kAuto) {
      refused.emplace_back(attempt.failed_engine(), done.error().Message());
    } else if (done.error().system_errno == EFAULT && info.in_place_bytes > 0 && !staged_only) {
      staged_only = true;  // memory that a device cannot reach (mapped device memory, say)
    } else {
      return std::unexpected(std::move(done.error()));
    }
    sink.Restart();
  }
  info.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return info;
}

}  // namespace fastpersist::checkpoint
