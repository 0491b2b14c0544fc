// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/save_stream.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/append_sentence.h"
#include "base/fork_guard.h"
#include "checkpoint/buffer_sizes.h"
#include "checkpoint/staging_lease.h"
#include "commit/publish.h"
#include "commit/target.h"
#include "file/sigpipe_blocked.h"
#include "pipeline/write_stream.h"

namespace fastpersist::checkpoint {
namespace {

constexpr plan::DeviceLimits kBuffered{.memory_align = 1, .offset_align = 1, .direct = false};

using Refused = std::vector<std::pair<Engine, std::string>>;
using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Storage errors that may pass by themselves: quotas and servers recover, other writers free space.
bool MayPass(const Error& error, const Options& options) {
  if (error.operation == "sync the directory") return false;
  // A failed sync is never repeated on the same file, and in place there is no other.
  const bool was_sync = error.operation == "fdatasync" || error.operation == "close";
  if (was_sync && !options.atomic) return false;
  return error.code == ErrorCode::kStorage &&
         (error.system_errno == EIO || error.system_errno == ENOSPC ||
          error.system_errno == EDQUOT);
}

Error GivenBack(const commit::Target& target) {
  return {.code = ErrorCode::kAbandoned,
          .operation = "save",
          .path = target.path,
          .detail = "the memory was given back before it was written"};
}

// One attempt to write and publish the file.
class Attempt {
 public:
  Attempt(const layout::Stream& stream, const commit::Target& target, const Options& options,
          const Environment& environment, const Watch& watch, SavedStream& saved)
      : stream_(stream),
        target_(target),
        options_(options),
        environment_(environment),
        watch_(watch),
        saved_(saved),
        info_(saved.info) {}

  /// staged_only: write nothing straight from the caller's memory.
  Result<void> Run(const Refused& refused, bool staged_only) {
    staged_only_ = staged_only;
    auto publication = commit::Publication::Begin(target_, options_, *environment_.files);
    if (!publication) return std::unexpected(publication.error());
    const plan::DeviceLimits limits = Limits(*publication);
    const std::uint64_t padded = base::AlignUp(stream_.size(), limits.offset_align);
    if (auto done = publication->Preallocate(stream_.size(), padded); !done) return done;
    if (auto done = Write(*publication, limits, refused); !done) return done;
    return Finish(*publication);
  }

  /// The engine that failed as such, if one did.
  [[nodiscard]] std::optional<Engine> failed_engine() const { return failed_engine_; }
  /// True when the error is of where bytes were pulled from; another attempt would meet it again.
  [[nodiscard]] bool pull_failed() const { return pull_failed_; }

 private:
  plan::DeviceLimits Limits(const commit::Publication& publication) {
    const bool wanted = options_.direct && options_.engine != Engine::kBuffered;
    if (!publication.regular() || !wanted) return kBuffered;
    if (environment_.files->SetDirect(publication.fd(), true) < 0) {
      fell_back_ = true;
      return kBuffered;
    }
    const plan::DeviceLimits limits = environment_.files->Limits(publication.fd());
    if (!limits.direct) {
      fell_back_ = true;
      (void)environment_.files->SetDirect(publication.fd(), false);
    }
    return limits;
  }

  Result<void> Write(commit::Publication& publication, const plan::DeviceLimits& limits,
                     const Refused& refused) {
    BufferSizes sizes = ChooseSizes(options_, limits, stream_.size());
    auto lease = StagingLease::Take(sizes.staging, sizes.align);
    if (!lease) {
      lease.error().path = target_.path;
      return std::unexpected(lease.error());
    }
    sizes.FitInto(lease->pool().memory().size());
    const auto staging = lease->pool().memory().first(sizes.staging);
    const plan::WritePlan plan =
        plan::PlanWrites(stream_, {.begin = 0, .end = stream_.size()},
                         {.limits = limits,
                          .block_bytes = sizes.block,
                          .min_in_place_bytes = staged_only_ ? UINT64_MAX : kMinInPlace});
    auto choice = engine::ChooseEngine(options_.engine, limits.direct,
                                       options_.queue_depth.value_or(kDefaultDepth),
                                       environment_.make_engine, refused);
    if (staging.size() >= kMinRegistered) (void)choice.engine->RegisterMemory(staging);
    const Engine chosen = choice.engine->kind();
    info_.staged_bytes = plan.staged_bytes;
    info_.in_place_bytes = plan.in_place_bytes;
    info_.seconds.plan += SecondsSince(start_);

    auto outcome = pipeline::WriteStream(
        stream_, plan, sizes.block,
        {.fd = publication.fd(),
         .path = target_.path,
         .limits = limits,
         .leave_direct = [&] { return environment_.files->SetDirect(publication.fd(), false); },
         .moved = watch_.written},
        choice.engine, staging, watch_.gate);
    info_.seconds.fill += outcome.fill_seconds;
    info_.seconds.write += outcome.write_seconds;
    // In place there is no new file to go to, and a lost write may still arrive in this one.
    const bool may_repeat = options_.atomic && !target_.special;
    if (outcome.engine_failed && (may_repeat || !outcome.writes_lost)) failed_engine_ = chosen;
    // Nothing is published of memory that changed.
    if (!outcome.error && watch_.gate != nullptr && watch_.gate->error()) {
      outcome.error = watch_.gate->error();
      outcome.pull_failed = true;
    }
    if (outcome.error) {
      pull_failed_ = outcome.pull_failed;
      if (!pull_failed_ || outcome.error->path.empty()) outcome.error->path = target_.path;
      return std::unexpected(*std::move(outcome.error));
    }
    saved_.crc = outcome.crc;
    saved_.record_crcs.clear();
    for (const auto& digest : outcome.digests) saved_.record_crcs.push_back(digest.crc);
    Describe(choice, lease->pool(), limits, outcome.left_direct);
    return {};
  }

  void Describe(const engine::EngineChoice& choice, const memory::StagingPool& pool,
                const plan::DeviceLimits& limits, const std::string& left_direct) {
    fell_back_ = fell_back_ || !left_direct.empty();
    info_.engine = choice.engine->kind();
    info_.direct = limits.direct && left_direct.empty();
    info_.engine_reason = options_.direct ? choice.reason : "direct I/O was switched off";
    if (!left_direct.empty()) info_.engine_reason = left_direct;
    const std::string& shortcoming = pool.shortcoming();
    if (!shortcoming.empty()) info_.engine_reason += "; " + shortcoming;
    const bool slower = fell_back_ || choice.fell_back || !shortcoming.empty();
    info_.warning =
        slower ? fmt::format("saving with {}: {}", EngineName(info_.engine), info_.engine_reason)
               : "";
  }

  Result<void> Finish(commit::Publication& publication) {
    const auto sync_start = Clock::now();
    if (auto sealed = publication.Seal(stream_.size()); !sealed) return sealed;
    // A file that could not be written directly should not push others out of the page cache.
    if (fell_back_) (void)::posix_fadvise(publication.fd(), 0, 0, POSIX_FADV_DONTNEED);
    info_.seconds.sync += SecondsSince(sync_start);
    const auto commit_start = Clock::now();
    std::string warning;
    if (auto published = publication.Publish(warning); !published) return published;
    base::AppendSentence(info_.warning, warning);
    info_.seconds.commit += SecondsSince(commit_start);
    return {};
  }

  const layout::Stream& stream_;
  const commit::Target& target_;
  const Options& options_;
  const Environment& environment_;
  const Watch& watch_;
  SavedStream& saved_;
  SaveInfo& info_;
  Clock::time_point start_ = Clock::now();
  bool staged_only_ = false;
  bool fell_back_ = false;
  bool pull_failed_ = false;
  std::optional<Engine> failed_engine_;
};

// Attempts until one succeeds or nothing is left to try.
Result<void> RunAttempts(const layout::Stream& stream, const commit::Target& target,
                         const Options& options, const Environment& environment, const Watch& watch,
                         SavedStream& saved) {
  Refused refused;
  std::uint32_t retries = target.special ? 0 : options.retries;  // a pipe cannot take bytes back
  bool staged_only = false;
  std::optional<Error> before;
  for (;;) {
    if (watch.gate != nullptr && !watch.gate->Begin()) {
      // Given back too early: by whoever gave the save up, or when the failed attempt had read all.
      if (!before) before = watch.gate->error();
      return std::unexpected(std::move(before).value_or(GivenBack(target)));
    }
    if (watch.written != nullptr) *watch.written = 0;
    Attempt attempt(stream, target, options, environment, watch, saved);
    auto done = attempt.Run(refused, staged_only);
    if (done) return done;
    if (const auto failed = attempt.failed_engine()) {
      refused.emplace_back(*failed, done.error().Message());
    } else if (done.error().system_errno == EFAULT && saved.info.in_place_bytes > 0 &&
               !staged_only) {
      staged_only = true;  // memory that a device cannot read (mapped device memory, say)
    } else if (retries > 0 && !attempt.pull_failed() && MayPass(done.error(), options)) {
      --retries;
    } else {
      return done;
    }
    before = std::move(done.error());
  }
}

}  // namespace

Result<SavedStream> SaveToTarget(const layout::Stream& stream, const commit::Target& target,
                                 const Options& options, const Environment& environment,
                                 const Watch& watch) {
  const auto start = Clock::now();
  std::optional<file::SigpipeBlocked> sigpipe_blocked;
  if (target.special) sigpipe_blocked.emplace();

  SavedStream saved{.info = {.path = target.path, .bytes = stream.size()}};
  auto done = RunAttempts(stream, target, options, environment, watch, saved);
  if (watch.gate != nullptr) watch.gate->Close();
  if (!done) return std::unexpected(std::move(done.error()));
  saved.info.seconds.total = SecondsSince(start);
  return saved;
}

Result<SaveInfo> SaveStream(const layout::Stream& stream, const std::string& path,
                            const Options& options, const Environment& environment) {
  const auto start = Clock::now();
  if (auto valid = Validate(options); !valid) return std::unexpected(valid.error());
  if (auto alive = base::CheckNotForked(); !alive) return std::unexpected(alive.error());
  auto target = commit::ResolveTarget(path, *environment.files);
  if (!target) return std::unexpected(target.error());
  auto saved = SaveToTarget(stream, *target, options, environment);
  if (!saved) return std::unexpected(std::move(saved.error()));
  saved->info.seconds.total = SecondsSince(start);
  return std::move(saved->info);
}

}  // namespace fastpersist::checkpoint
