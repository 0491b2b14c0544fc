// SPDX-License-Identifier: Apache-2.0
// The public Checkpointer: a snapshot of the state goes to the background writer.
#include "fastpersist/checkpointer.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/append_sentence.h"
#include "base/fork_guard.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/found_checkpoint.h"
#include "checkpoint/state_snapshot.h"
#include "commit/catalog.h"
#include "commit/manifest.h"
#include "commit/retention.h"
#include "memory/arena.h"

namespace fastpersist {
inline namespace v0 {
namespace {

using checkpoint::CheckpointWriter;
using checkpoint::Clock;
using commit::CatalogEntry;
using commit::GenerationState;
using commit::Root;

constexpr const char* kStream = "state.pt";

const file::FileOps& Files() { return file::RealFileOps(); }

// Far enough to be never reached, near enough for the arithmetic of clocks.
Clock::time_point Deadline(std::chrono::nanoseconds timeout) {
  constexpr std::chrono::nanoseconds kNever = std::chrono::hours(24 * 365 * 30);
  return Clock::now() + std::clamp(timeout, std::chrono::nanoseconds(0), kNever);
}

Error Refused(std::string detail) {
  return {.code = ErrorCode::kInvalidArgument, .operation = "save", .detail = std::move(detail)};
}

pipeline::VerifySource Translated(VerifySource verify) {
  switch (verify) {
    case VerifySource::kOff:
      return pipeline::VerifySource::kOff;
    case VerifySource::kFull:
      return pipeline::VerifySource::kFull;
    default:
      return pipeline::VerifySource::kSample;
  }
}

Result<void> Check(const CheckpointerOptions& options) {
  if (options.keep_last == 0U || options.keep_every == 0U) {
    return std::unexpected(Error{.code = ErrorCode::kInvalidArgument,
                                 .operation = "open for checkpoints",
                                 .detail = "keep_last and keep_every are at least 1"});
  }
  return Validate(options.options);
}

// What the commit would refuse, before anything is written.
Result<void> Check(std::uint64_t step, const std::string& metadata) {
  if (step > commit::kMaxNumber) return std::unexpected(Refused("the step is too large"));
  const commit::Manifest manifest{.library = "-",
                                  .created = "-",
                                  .job = "-",
                                  .generation = "step",
                                  .step = step,
                                  .sequence = 1,
                                  .streams = {{.name = kStream,
                                               .format = "torch",
                                               .size = 1,
                                               .parts = {{.file = kStream, .length = 1}}}},
                                  .metadata = metadata};
  if (auto good = commit::CheckManifest(manifest); !good) {
    return std::unexpected(Refused(good.error().detail));
  }
  return {};
}

Result<std::vector<CatalogEntry>> Complete(const Root& root) {
  auto catalog = commit::ReadCatalog(root, Files());
  if (!catalog) return catalog;
  std::erase_if(*catalog, [](const CatalogEntry& entry) {
    return entry.state != GenerationState::kComplete;
  });
  return catalog;
}

}  // namespace

struct Ticket::Impl {
  std::shared_ptr<checkpoint::CheckpointTicket> core;
  std::string warning;
  std::atomic<bool> told = false;  // somebody asked what became of it
};

Ticket::Ticket(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

std::uint64_t Ticket::step() const { return impl_->core->step(); }

bool Ticket::WaitReleased(std::chrono::nanoseconds timeout) {
  return base::CheckNotForked() && impl_->core->WaitReleased(Deadline(timeout), /*capture=*/true);
}

bool Ticket::Wait(std::chrono::nanoseconds timeout) const {
  return base::CheckNotForked() && impl_->core->WaitDone(Deadline(timeout));
}

bool Ticket::Done() const { return Wait(std::chrono::nanoseconds(0)); }

Result<SaveInfo> Ticket::Get() const {
  if (auto alive = base::CheckNotForked(); !alive) return std::unexpected(alive.error());
  while (!Wait()) continue;
  impl_->told = true;
  const auto& result = impl_->core->result();
  if (!result) return std::unexpected(result.error());
  SaveInfo info = result->save;
  base::AppendSentence(info.warning, impl_->warning);
  return info;
}

void Ticket::Abandon(std::string_view reason) {
  if (!base::CheckNotForked()) return;
  impl_->core->Abandon({.code = ErrorCode::kAbandoned,
                        .operation = "save",
                        .detail = std::string(reason),
                        .advice = "the checkpoints before it are as they were"});
}

std::uint64_t Ticket::bytes_written() const { return impl_->core->written(); }
std::uint64_t Ticket::bytes() const { return impl_->core->bytes(); }

struct Checkpointer::Impl {
  pid_t owner = ::getpid();
  CheckpointerOptions options;
  std::string warning;
  std::mutex saving;         // one Save or Close at a time; guards all that follows but root
  mutable std::mutex mutex;  // guards root
  std::shared_ptr<const Root> root;  // null once closed
  std::unique_ptr<CheckpointWriter> writer;
  std::shared_ptr<const memory::Arena> arena;
  std::uint64_t turn = 0;
  std::shared_ptr<Ticket::Impl> last;
  std::optional<Error> untold;

  [[nodiscard]] Result<std::shared_ptr<const Root>> Opened() const {
    if (auto alive = base::CheckNotForked(); !alive) return std::unexpected(alive.error());
    const std::scoped_lock lock(mutex);
    if (root == nullptr) {
      return std::unexpected(Error{.code = ErrorCode::kInvalidArgument,
                                   .operation = "use of a checkpointer",
                                   .detail = "it is closed"});
    }
    return root;
  }

  // Waits for the save in flight.
  void FinishLast() {
    if (last == nullptr) return;
    (void)last->core->WaitDone(Deadline(kForever));
    const auto& result = last->core->result();
    if (!result && !last->told && !untold) untold = result.error();
    last = nullptr;
  }

  Result<void> MakeArena() {
    if (arena != nullptr || options.memory == 0) return {};
    auto made = memory::Arena::Create(options.memory);
    if (!made) return std::unexpected(made.error());
    arena = std::make_shared<const memory::Arena>(*std::move(made));
    return {};
  }

  Result<std::shared_ptr<Ticket::Impl>> Submit(std::uint64_t step, const SaveRequest& request,
                                               checkpoint::StateSnapshot snapshot) {
    checkpoint::CheckpointRequest submitted{.step = step, .metadata = request.metadata};
    submitted.streams.push_back({.name = kStream,
                                 .stream = std::move(snapshot.stream),
                                 .memory = {.live = std::move(snapshot.live),
                                            .verify = Translated(options.verify),
                                            .turn = turn++,
                                            .spare = snapshot.spare},
                                 .keep = arena});
    auto core = writer->Submit(std::move(submitted));
    if (!core) return std::unexpected(core.error());
    auto ticket = std::make_shared<Ticket::Impl>();
    ticket->core = *std::move(core);
    return ticket;
  }

  Result<std::shared_ptr<Ticket::Impl>> Save(std::uint64_t step, const State& state,
                                             const SaveRequest& request) {
    if (auto good = Check(step, request.metadata); !good) return std::unexpected(good.error());
    FinishLast();
    if (auto made = MakeArena(); !made) return std::unexpected(made.error());
    auto snapshot = checkpoint::TakeSnapshot(
        state, request.live, arena == nullptr ? std::span<std::byte>() : arena->memory());
    if (!snapshot) return std::unexpected(snapshot.error());
    const std::uint64_t unfit = snapshot->unfit_bytes;
    auto ticket = Submit(step, request, *std::move(snapshot));
    if (!ticket) return ticket;
    last = *ticket;
    if (unfit > 0) {
      (*ticket)->warning = fmt::format(
          "{} bytes had to be written before Save returned: they are not live, and do not fit into "
          "CheckpointerOptions::memory",
          unfit);
      (void)last->core->WaitReleased(Deadline(kForever), /*capture=*/true);
    }
    return ticket;
  }
};

Checkpointer::Checkpointer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpointer::Checkpointer(Checkpointer&&) noexcept = default;

Checkpointer& Checkpointer::operator=(Checkpointer&& other) noexcept {
  if (this != &other) {
    LetGo();
    impl_ = std::move(other.impl_);
  }
  return *this;
}

Checkpointer::~Checkpointer() { LetGo(); }

void Checkpointer::LetGo() {
  if (impl_ == nullptr) return;
  if (impl_->owner == ::getpid()) {
    [[maybe_unused]] const auto closed = Close();  // a destructor has nobody to tell
  } else {
    // Leaked on purpose: its threads and locks are the parent's.
    [[maybe_unused]] const auto* leaked = impl_.release();
  }
}

Result<Checkpointer> Checkpointer::Open(const std::filesystem::path& directory,
                                        const CheckpointerOptions& options) {
  if (auto good = Check(options); !good) return std::unexpected(good.error());
  if (auto alive = base::CheckNotForked(); !alive) return std::unexpected(alive.error());
  auto root = Root::Open(directory.native(), Root::Access::kWrite, Files());
  if (!root) return std::unexpected(root.error());
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->options.options.sync = impl->options.options.atomic = true;
  impl->root = *std::move(root);
  impl->warning = impl->root->lock_warning();
  const auto left = commit::RemoveLeftovers(*impl->root, Files());
  const auto kept = left ? left->kept : std::vector<std::string>{left.error().Message()};
  for (const std::string& what : kept) {
    base::AppendSentence(impl->warning, "what a killed run left was not removed: " + what);
  }
  impl->writer = std::make_unique<CheckpointWriter>(
      impl->root, impl->options.options,
      commit::RetentionPolicy{.keep_last = options.keep_last, .keep_every = options.keep_every});
  return Checkpointer(std::move(impl));
}

const std::string& Checkpointer::warning() const { return impl_->warning; }

Result<Ticket> Checkpointer::Save(std::uint64_t step, const State& state,
                                  const SaveRequest& request) {
  if (auto alive = base::CheckNotForked(); !alive) return std::unexpected(alive.error());
  const std::scoped_lock lock(impl_->saving);
  if (auto opened = impl_->Opened(); !opened) return std::unexpected(opened.error());
  auto ticket = impl_->Save(step, state, request);
  if (!ticket) return std::unexpected(ticket.error());
  return Ticket(*std::move(ticket));
}

Result<std::optional<std::uint64_t>> Checkpointer::LatestStep() const {
  const auto root = impl_->Opened();
  if (!root) return std::unexpected(root.error());
  const auto complete = Complete(**root);
  if (!complete) return std::unexpected(complete.error());
  if (complete->empty()) return std::nullopt;
  return complete->front().step;
}

Result<std::vector<std::uint64_t>> Checkpointer::AllSteps() const {
  const auto root = impl_->Opened();
  if (!root) return std::unexpected(root.error());
  const auto complete = Complete(**root);
  if (!complete) return std::unexpected(complete.error());
  std::set<std::uint64_t> steps;
  for (const CatalogEntry& entry : *complete) steps.insert(entry.step);
  return std::vector<std::uint64_t>(steps.begin(), steps.end());
}

Result<Checkpoint> Checkpointer::Load(std::optional<std::uint64_t> step) const {
  const auto root = impl_->Opened();
  if (!root) return std::unexpected(root.error());
  return checkpoint::FindCheckpoint(**root, step, Files());
}

Result<void> Checkpointer::Delete(std::uint64_t step) {
  const auto root = impl_->Opened();
  if (!root) return std::unexpected(root.error());
  auto catalog = commit::ReadCatalog(**root, Files());
  if (!catalog) return std::unexpected(catalog.error());
  std::erase_if(*catalog, [&](const CatalogEntry& entry) {
    const bool counts =
        entry.state == GenerationState::kComplete || entry.state == GenerationState::kDamaged;
    return entry.step != step || !counts;
  });
  if (catalog->empty()) {
    return std::unexpected(Error{.code = ErrorCode::kNotFound,
                                 .operation = "delete",
                                 .path = (*root)->path(),
                                 .detail = fmt::format("there is no checkpoint of step {}", step)});
  }
  // The newest last: none that it had replaced comes back when this is cut short.
  std::ranges::reverse(*catalog);
  for (const CatalogEntry& entry : *catalog) {
    if (auto retired = commit::Retire(**root, entry.name, Files()); !retired) return retired;
  }
  return {};
}

Result<void> Checkpointer::Close() {
  if (auto alive = base::CheckNotForked(); !alive) return alive;
  const std::scoped_lock lock(impl_->saving);
  if (impl_->writer == nullptr) return {};
  impl_->FinishLast();
  impl_->writer = nullptr;
  impl_->arena = nullptr;
  {
    const std::scoped_lock root_lock(impl_->mutex);
    impl_->root = nullptr;
  }
  if (impl_->untold) return std::unexpected(*std::exchange(impl_->untold, std::nullopt));
  return {};
}

}  // namespace v0
}  // namespace fastpersist
