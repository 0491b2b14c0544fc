// SPDX-License-Identifier: Apache-2.0
// `fastpersist bench`: what a storage can do, and what saving and loading reach there, measured
// with the same blocks and engine, one round after the other, so that the share says what checksums
// and formats cost. Raw reading has more in flight than loading, which holds little memory: it is
// the limit of the device.
//
//   raw write   the same pipeline without record or checksum, synced
//   save        fastpersist::Save of a dict of tensors
//   raw read    every byte of the saved file into staging memory, looked at by nobody
//   load        File::Read of all tensors into memory, checksums compared
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/buffer_sizes.h"
#include "checkpoint/read_ranges.h"
#include "checkpoint/save_stream.h"
#include "cli/app.h"
#include "cli/interrupt.h"
#include "cli/json_output.h"
#include "cli/progress_bar.h"
#include "cli/terminal.h"
#include "fastpersist/fastpersist.h"

namespace fastpersist::cli {
namespace {

constexpr std::uint64_t kTensorBytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kLong = std::uint64_t{256} << 20;       // a step may take over a second
constexpr std::size_t kMemoryAlignment = std::size_t{2} << 20;  // a huge page

struct BenchOptions {
  std::string folder;
  std::uint64_t bytes = std::uint64_t{1} << 30;
  unsigned rounds = 3;
  std::string engine = "auto";
  bool json = false;
};

enum Step : std::uint8_t { kRawWrite, kSave, kRawRead, kLoad, kSteps };
constexpr std::array<const char*, kSteps> kKeys{"raw_write", "save", "raw_read", "load"};
constexpr std::array<const char*, kSteps> kTitles{"raw write", "save", "raw read", "load"};

struct Freed {
  void operator()(std::byte* memory) const { std::free(memory); }
};

double Median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Takes bytes and does nothing with them.
class NobodyLooks final : public pipeline::ByteSink {
 public:
  void Restart() override {}
  [[nodiscard]] bool Accept(std::uint64_t /*offset*/,
                            std::span<const std::byte> /*bytes*/) override {
    return true;
  }
};

class Bench {
 public:
  explicit Bench(const BenchOptions& options) : options_(options), bar_("measuring") {
    save_options_.engine = *ParseEngine(options.engine);
  }

  Result<void> Run() {
    if (auto made = MakeData(); !made) return made;
    const FolderRemovedAtEnd folder(options_.folder + "/.fastpersist-bench-");
    if (folder.system_errno() != 0) {
      return std::unexpected(Error{.code = ErrorCode::kStorage,
                                   .operation = "make a folder",
                                   .path = options_.folder,
                                   .system_errno = folder.system_errno()});
    }
    for (unsigned round = 0; round < options_.rounds; ++round) {
      if (auto done = Round(folder.path()); !done) return done;
    }
    return {};
  }

  [[nodiscard]] ExitStatus Report() const {
    if (options_.json) return Print(JsonText(Document()));
    Table table("lrl");
    for (std::size_t step = 0; step < kSteps; ++step) {
      const bool raw = step == kRawWrite || step == kRawRead;
      const std::string share =
          raw ? "" : fmt::format("{:.0f} % of raw", 100 * seconds(step - 1) / seconds(step));
      table.Add({kTitles.at(step), RateText(options_.bytes, seconds(step)), share});
    }
    return Print(fmt::format(
        "{}: {}, median of {}\n{} in {}, {} in flight; {}\n{}", Escaped(options_.folder),
        SizeText(options_.bytes), Counted(options_.rounds, "round"),
        save_info_.direct ? "direct I/O" : "buffered I/O", SizeText(block_bytes()),
        checkpoint::kDefaultDepth, EngineText(), table.Text()));
  }

 private:
  Result<void> MakeData() {
    const std::uint64_t rounded = (options_.bytes + kMemoryAlignment - 1) / kMemoryAlignment;
    memory_.reset(
        static_cast<std::byte*>(std::aligned_alloc(kMemoryAlignment, rounded * kMemoryAlignment)));
    if (memory_ == nullptr) {
      return std::unexpected(
          Error{.operation = "bench", .system_errno = ENOMEM, .advice = "choose a smaller --size"});
    }
    // Noise, so that no storage compresses it or leaves out what it has already.
    std::uint64_t state = 0x9E3779B97F4A7C15U ^ static_cast<std::uint64_t>(::getpid());
    for (std::uint64_t at = 0; at < rounded * kMemoryAlignment; at += sizeof(state)) {
      state ^= state << 13U;
      state ^= state >> 7U;
      state ^= state << 17U;
      std::memcpy(memory_.get() + at, &state, sizeof(state));
    }
    for (std::uint64_t at = 0; at < options_.bytes; at += kTensorBytes) {
      const std::uint64_t bytes = std::min(kTensorBytes, options_.bytes - at);
      names_.push_back(fmt::format("tensor.{}", names_.size()));
      const TensorView view{.data = memory_.get() + at,
                            .dtype = DType::kUint8,
                            .shape = {static_cast<std::int64_t>(bytes)}};
      if (auto added = state_.Add(names_.back(), view); !added) return added;
    }
    return {};
  }

  Result<void> Round(const std::string& folder) {
    const std::string raw = folder + "/raw";
    const std::string saved = folder + "/saved.pt";
    if (auto done = Timed(kRawWrite, [&] { return RawWrite(raw); }); !done) return done;
    // Only one of the files exists at a time.
    (void)::unlink(raw.c_str());
    if (auto done = Timed(kSave, [&] { return Save(saved); }); !done) return done;
    if (auto done = Timed(kRawRead, [&] { return RawRead(saved); }); !done) return done;
    if (auto done = Timed(kLoad, [&] { return Load(saved); }); !done) return done;
    (void)::unlink(saved.c_str());
    return {};
  }

  template <class Work>
  Result<void> Timed(Step step, const Work& work) {
    if (options_.bytes >= kLong) bar_.Show(done_bytes_, options_.bytes * kSteps * options_.rounds);
    const auto start = std::chrono::steady_clock::now();
    if (auto done = work(); !done) return done;
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    times_.at(step).push_back(elapsed.count());
    done_bytes_ += options_.bytes;
    bar_.Update(done_bytes_, options_.bytes * kSteps * options_.rounds);
    return {};
  }

  Result<void> RawWrite(const std::string& path) const {
    layout::StreamBuilder builder;
    builder.AddMemory({memory_.get(), options_.bytes});
    const auto info =
        checkpoint::SaveStream(std::move(builder).Finish(0, nullptr), path, save_options_);
    if (!info) return std::unexpected(info.error());
    return {};
  }

  Result<void> Save(const std::string& path) {
    auto info = fastpersist::Save(state_, path, save_options_);
    if (!info) return std::unexpected(info.error());
    save_info_ = *std::move(info);
    return {};
  }

  Result<void> RawRead(const std::string& path) const {
    const auto file = file::InputFile::Open(path, file::RealFileOps());
    if (!file) return std::unexpected(file.error());
    Forget(*file);
    const plan::Range all{.begin = 0, .end = file->size()};
    NobodyLooks sink;
    Options options = save_options_;
    options.queue_depth = checkpoint::kDefaultDepth;
    const auto info = checkpoint::ReadRanges(*file, {&all, 1}, {}, sink, options);
    if (!info) return std::unexpected(info.error());
    return {};
  }

  Result<void> Load(const std::string& path) {
    const auto opened = file::InputFile::Open(path, file::RealFileOps());
    if (!opened) return std::unexpected(opened.error());
    Forget(*opened);
    const auto file = Open(path);
    if (!file) return std::unexpected(file.error());
    // Into the memory that it came from: the same bytes are there afterwards.
    std::vector<ReadTarget> targets;
    for (std::size_t i = 0; i < names_.size(); ++i) {
      const std::uint64_t at = i * kTensorBytes;
      targets.push_back(
          {.name = names_[i],
           .destination = {memory_.get() + at, std::min(kTensorBytes, options_.bytes - at)}});
    }
    auto info = file->Read(targets, save_options_);
    if (!info) return std::unexpected(info.error());
    return {};
  }

  // Where the page cache is not bypassed, reading is to be cold all the same.
  static void Forget(const file::InputFile& file) {
    (void)::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  }

  [[nodiscard]] double seconds(std::size_t step) const { return Median(times_.at(step)); }
  [[nodiscard]] std::uint64_t block_bytes() const {
    return std::min(checkpoint::kDefaultBlock, options_.bytes);
  }
  [[nodiscard]] std::string EngineText() const {
    return fmt::format("engine {}: {}", EngineName(save_info_.engine),
                       Escaped(save_info_.engine_reason));
  }

  [[nodiscard]] Json Document() const {
    Json document = JsonDocument("bench");
    document["folder"] = options_.folder;
    document["bytes"] = options_.bytes;
    document["rounds"] = options_.rounds;
    document["engine"] = EngineName(save_info_.engine);
    document["engine_reason"] = save_info_.engine_reason;
    document["direct"] = save_info_.direct;
    document["block_bytes"] = block_bytes();
    document["queue_depth"] = checkpoint::kDefaultDepth;
    for (std::size_t step = 0; step < kSteps; ++step) {
      document[kKeys.at(step)] = {
          {"seconds", times_.at(step)},
          {"bytes_per_second", static_cast<double>(options_.bytes) / seconds(step)}};
    }
    return document;
  }

  const BenchOptions& options_;
  Options save_options_;
  ProgressBar bar_;
  std::unique_ptr<std::byte, Freed> memory_;
  State state_;
  std::vector<std::string> names_;
  SaveInfo save_info_;
  std::array<std::vector<double>, kSteps> times_;
  std::uint64_t done_bytes_ = 0;
};

ExitStatus RunBench(const BenchOptions& options) {
  Bench bench(options);
  if (auto done = bench.Run(); !done) return Fail(done.error());
  return bench.Report();
}

}  // namespace

void AddBench(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "bench", "Measure what the storage of a folder can do, and what saving reaches there");
  command->footer(R"(Writes and reads one temporary file in DIR, which is removed at the end, and
needs as much memory and free space as --size says.

Examples:
  fastpersist bench /mnt/checkpoints
  fastpersist bench --size 8G --rounds 5 --engine libaio /mnt/checkpoints)");
  auto options = std::make_shared<BenchOptions>();
  command->add_option("DIR", options->folder, "A folder on the storage in question")->required();
  command->add_option("--size", options->bytes, "Bytes, or with K, M, G: powers of 1024 (1G)")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::Range(std::uint64_t{4096}, std::uint64_t{1} << 40U));
  command->add_option("--rounds", options->rounds, "The median of so many counts (3)")
      ->check(CLI::Range(1U, 100U));
  command->add_option("--engine", options->engine, "auto, uring, libaio, threads, buffered (auto)")
      ->check(CLI::IsMember({"auto", "uring", "libaio", "threads", "buffered"}));
  command->add_flag("--json", options->json, "One JSON document (docs/cli.md)");
  command->callback([options, &action] { action = [options] { return RunBench(*options); }; });
}

}  // namespace fastpersist::cli
