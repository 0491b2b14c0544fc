// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <thread>
#include <utility>

#include "base/append_sentence.h"
#include "base/fork_guard.h"
#include "base/signals_blocked.h"
#include "checkpoint/save_stream.h"
#include "commit/catalog.h"
#include "commit/generation.h"
#include "commit/target.h"

namespace fastpersist::checkpoint {
namespace {

void AddTo(SaveInfo& sum, const SaveInfo& one) {
  sum.bytes += one.bytes;
  sum.staged_bytes += one.staged_bytes;
  sum.in_place_bytes += one.in_place_bytes;
  sum.seconds.plan += one.seconds.plan;
  sum.seconds.fill += one.seconds.fill;
  sum.seconds.write += one.seconds.write;
  sum.seconds.sync += one.seconds.sync;
  sum.seconds.commit += one.seconds.commit;
  base::AppendSentence(sum.warning, one.warning);
}

commit::ManifestStream Describe(const std::string& name, const std::string& root,
                                const SavedStream& saved) {
  return {
      .name = name,
      .format = "torch",
      .size = saved.info.bytes,
      .crc = saved.crc,
      .record_crcs = saved.record_crcs,
      .parts = {
          {.root = root, .file = name, .offset = 0, .length = saved.info.bytes, .crc = saved.crc}}};
}

Error GivenUp() {
  return {.code = ErrorCode::kAbandoned,
          .operation = "save",
          .detail = "the checkpointer was closed before the save was approved",
          .advice = "close() waits for saves in flight"};
}

}  // namespace

// Apart, so that a forked child can leave it alone: its thread is not there, and destroying a
// condition that the thread waits for would wait for that thread.
class CheckpointWriter::Worker {
 public:
  Worker(std::shared_ptr<const commit::Root> root, Options options,
         commit::RetentionPolicy retention, Environment environment)
      : root_(std::move(root)),
        options_(options),
        retention_(retention),
        environment_(std::move(environment)) {
    // Signals are the program's; its threads take them.
    const base::SignalsBlocked blocked;
    thread_ = std::thread([this] { Work(); });
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  Worker(Worker&&) = delete;
  Worker& operator=(Worker&&) = delete;
  ~Worker() {
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
      for (const auto& ticket : queue_) ticket->RejectUndecided(GivenUp());
      changed_.notify_all();
    }
    thread_.join();
  }

  [[nodiscard]] bool OwnedHere() const { return ::getpid() == owner_; }

  void Add(std::shared_ptr<CheckpointTicket> ticket) {
    const std::scoped_lock lock(mutex_);
    queue_.push_back(std::move(ticket));
    changed_.notify_all();
  }

 private:
  void Work();
  [[nodiscard]] Result<CheckpointInfo> Write(CheckpointTicket& ticket);
  [[nodiscard]] Result<void> WriteStreams(CheckpointTicket& ticket,
                                          const commit::Generation& generation,
                                          CheckpointInfo& info, commit::Manifest& manifest);
  [[nodiscard]] Result<CheckpointInfo> WriteInto(CheckpointTicket& ticket,
                                                 commit::Generation& generation);
  void RetireOlder(CheckpointInfo& info);

  std::shared_ptr<const commit::Root> root_;
  Options options_;
  commit::RetentionPolicy retention_;
  Environment environment_;
  pid_t owner_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<CheckpointTicket>> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

CheckpointWriter::CheckpointWriter(std::shared_ptr<const commit::Root> root, Options options,
                                   commit::RetentionPolicy retention, Environment environment)
    : worker_(
          std::make_unique<Worker>(std::move(root), options, retention, std::move(environment))) {}

CheckpointWriter::~CheckpointWriter() {
  if (!worker_->OwnedHere()) (void)worker_.release();  // leaked on purpose
}

Result<std::shared_ptr<CheckpointTicket>> CheckpointWriter::Submit(CheckpointRequest request) {
  if (auto alive = base::CheckNotForked(); !alive) return std::unexpected(alive.error());
  auto ticket = std::make_shared<CheckpointTicket>(std::move(request));
  worker_->Add(ticket);
  return ticket;
}

void CheckpointWriter::Worker::Work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    // It stays in the queue until it is done: closing must reach it.
    const auto ticket = queue_.front();
    lock.unlock();
    ticket->Finish(Write(*ticket));
    lock.lock();
    queue_.pop_front();
  }
}

Result<CheckpointInfo> CheckpointWriter::Worker::Write(CheckpointTicket& ticket) {
  if (auto rejected = ticket.rejected()) return std::unexpected(*std::move(rejected));
  auto generation = commit::Generation::Begin(*root_, ticket.step(), *environment_.files);
  if (!generation) return std::unexpected(std::move(generation.error()));
  return WriteInto(ticket, *generation);
}

Result<void> CheckpointWriter::Worker::WriteStreams(CheckpointTicket& ticket,
                                                    const commit::Generation& generation,
                                                    CheckpointInfo& info,
                                                    commit::Manifest& manifest) {
  for (std::size_t i = 0; i < ticket.gates_.size(); ++i) {
    const CheckpointStream& stream = ticket.request_.streams[i];
    if (auto rejected = ticket.rejected()) return std::unexpected(*std::move(rejected));
    const commit::Target target{
        .path = fmt::format("{}/{}", generation.path(), stream.name),
        .directory = base::UniqueFd(::fcntl(generation.fd(), F_DUPFD_CLOEXEC, 0)),
        .name = stream.name,
        .fresh = true};
    if (!target.directory.valid()) {
      return std::unexpected(commit::StorageError("open directory", generation.path(), errno));
    }
    auto saved = SaveToTarget(*stream.stream, target, options_, environment_,
                              {.gate = ticket.gates_[i].get(), .written = &ticket.written_});
    if (!saved) return std::unexpected(std::move(saved.error()));
    ticket.written_ = 0;
    ticket.before_ += stream.stream->size();
    if (i == 0) {
      info.save = saved->info;
      info.crc = saved->crc;
    } else {
      AddTo(info.save, saved->info);
    }
    manifest.streams.push_back(Describe(stream.name, root_->id(), *saved));
  }
  return {};
}

Result<CheckpointInfo> CheckpointWriter::Worker::WriteInto(CheckpointTicket& ticket,
                                                           commit::Generation& generation) {
  const auto start = Clock::now();
  CheckpointInfo info;
  info.generation = generation.name();
  info.step = ticket.step();
  commit::Manifest manifest{.metadata = ticket.request_.metadata};
  if (auto written = WriteStreams(ticket, generation, info, manifest); !written) {
    return std::unexpected(std::move(written.error()));
  }
  for (const auto& gate : ticket.gates_) {
    if (auto error = gate->error()) return std::unexpected(*std::move(error));
    info.captured_bytes += gate->captured_bytes();
  }
  if (auto rejected = ticket.Verdict()) return std::unexpected(*std::move(rejected));
  const auto commit_start = Clock::now();
  auto sequence = generation.Commit(std::move(manifest));
  if (!sequence) return std::unexpected(std::move(sequence.error()));
  info.sequence = *sequence;
  info.save.path = generation.path();
  base::AppendSentence(info.save.warning, generation.warning());
  RetireOlder(info);
  const std::chrono::duration<double> commit = Clock::now() - commit_start;
  const std::chrono::duration<double> total = Clock::now() - start;
  info.save.seconds.commit += commit.count();
  info.save.seconds.total = total.count();
  return info;
}

// The new checkpoint is committed whatever happens here: a failure is a warning.
void CheckpointWriter::Worker::RetireOlder(CheckpointInfo& info) {
  // A second attempt at a step replaces the first; otherwise nothing is to be done without a limit.
  const bool again = info.generation.find('.') != std::string::npos;
  if (!retention_.keep_last && !again) return;
  const auto catalog = commit::ReadCatalog(*root_, *environment_.files);
  if (!catalog) {
    base::AppendSentence(info.save.warning,
                         "old checkpoints were not retired: " + catalog.error().Message());
    return;
  }
  for (const std::size_t index : commit::ChooseRetired(*catalog, retention_)) {
    const std::string& name = (*catalog)[index].name;
    if (auto retired = commit::Retire(*root_, name, *environment_.files); retired) {
      info.retired.push_back(name);
    } else {
      base::AppendSentence(info.save.warning,
                           fmt::format("{} was not retired: {}", name, retired.error().Message()));
    }
  }
}

}  // namespace fastpersist::checkpoint
