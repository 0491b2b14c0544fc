// SPDX-License-Identifier: Apache-2.0
// `fastpersist convert`: the tensors of a file, bit for bit, in the other format. The input is
// checked whole, then streamed into a save like any other: direct, atomic, durable.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/opened_file.h"
#include "checkpoint/save_stream.h"
#include "cli/app.h"
#include "cli/convert_checks.h"
#include "cli/convert_source.h"
#include "cli/interrupt.h"
#include "cli/json_output.h"
#include "cli/progress_bar.h"
#include "cli/terminal.h"
#include "layout/dict_of_tensors.h"
#include "layout/file_dtypes.h"
#include "layout/safetensors.h"
#include "layout/torch_container.h"

namespace fastpersist::cli {
namespace {

using layout::Contents;
using layout::StoredTensor;

constexpr std::uint64_t kTorchAlignment = 64;  // torch's default storage_alignment

// Says that the tensors are torch's; Hugging Face's readers look for it.
const std::map<std::string, std::string> kPlainMetadata{{"format", "pt"}};

struct ConvertOptions {
  std::string input;
  std::string output;
  ConvertChoices choices;
  bool force = false;
  bool json = false;
};

std::string_view NameOf(Format format) {
  return format == Format::kTorch ? "torch" : "safetensors";
}

std::unexpected<Error> Refuse(ErrorCode code, const std::string& path, std::string detail,
                              std::string advice = "") {
  return std::unexpected(Error{.code = code,
                               .operation = "convert",
                               .path = path,
                               .detail = std::move(detail),
                               .advice = std::move(advice)});
}

std::optional<Format> FormatBySuffix(const std::string& path) {
  if (path.ends_with(".safetensors")) return Format::kSafetensors;
  for (const std::string_view suffix : {".pt", ".pth", ".bin", ".ckpt"}) {
    if (path.ends_with(suffix)) return Format::kTorch;
  }
  return std::nullopt;
}

// Which format to write, if the output may be written at all.
Result<Format> CheckOutput(const ConvertOptions& options) {
  constexpr auto kUsage = ErrorCode::kInvalidArgument;
  const auto format = FormatBySuffix(options.output);
  if (!format) {
    return Refuse(kUsage, options.output, "the suffix names no format",
                  "use .safetensors, or .pt, .pth, .bin, .ckpt");
  }
  struct stat in{};
  struct stat out{};
  if (::stat(options.output.c_str(), &out) != 0) return *format;
  if (::stat(options.input.c_str(), &in) == 0 && in.st_dev == out.st_dev &&
      in.st_ino == out.st_ino) {
    return Refuse(kUsage, options.output, "input and output are the same file",
                  "name another output");
  }
  if (!options.force) {
    return Refuse(kUsage, options.output, "the output exists", "--force replaces it");
  }
  return *format;
}

class Conversion {
 public:
  explicit Conversion(const ConvertOptions& options) : options_(options) {}

  Result<void> Run() {
    const auto start = std::chrono::steady_clock::now();
    const auto format = CheckOutput(options_);
    if (!format) return std::unexpected(format.error());
    format_ = *format;
    auto opened = checkpoint::OpenedFile::Open(options_.input);
    if (!opened) return std::unexpected(opened.error());
    if (auto checked = CheckInput(**opened); !checked) return checked;
    contents_ = (*opened)->contents();  // anew: checking may have located the bodies
    auto written = Write((*opened)->source());
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    seconds_ = elapsed.count();
    return written;
  }

  [[nodiscard]] ExitStatus Report() const {
    for (const std::string& warning : warnings_) Complain("warning: " + warning);
    if (options_.json) return Print(JsonText(Document()));
    return Print(fmt::format("{}: {}, {} in {:.2f} s ({})\n", Escaped(options_.output),
                             Counted(contents_->tensors.size(), "tensor"), SizeText(info_.bytes),
                             seconds_, RateText(info_.bytes, seconds_)));
  }

 private:
  // Everything that can be wrong with the input shows here, before the output is touched.
  Result<void> CheckInput(checkpoint::OpenedFile& file) {
    contents_ = file.contents();
    const bool is_torch = contents_->kind == Contents::Kind::kTorch;
    if (is_torch == (format_ == Format::kTorch)) {
      return Refuse(ErrorCode::kInvalidArgument, options_.input,
                    fmt::format("it is a {} file already", NameOf(format_)),
                    "name an output of the other format, or copy the file");
    }
    const auto obstacles = FindObstacles(*contents_, format_, options_.choices);
    if (!obstacles.empty()) {
      return Refuse(ErrorCode::kUnsupportedState, options_.input,
                    fmt::format("{}", fmt::join(obstacles, "; ")));
    }
    Warn();
    ProgressBar bar("checking");
    auto found =
        file.Verify({}, [&bar](std::uint64_t done, std::uint64_t all) { bar.Update(done, all); });
    if (!found) return std::unexpected(found.error());
    if (found->damages.empty()) return {};
    Error damage = found->damages.front();
    damage.advice = fmt::format("the input is damaged ({} in all; see fastpersist verify)",
                                Counted(found->damages.size(), "damage"));
    return std::unexpected(std::move(damage));
  }

  void Warn() {
    dropped_ = FindNonTensors(*contents_);
    if (!dropped_.empty()) {
      warnings_.push_back("left out what is no tensor: " + Quoted(dropped_));
    }
    for (const SharedMemory& shared : FindSharedMemory(*contents_)) {
      duplicated_.push_back(shared.tensor->name);
    }
    if (!duplicated_.empty()) {
      warnings_.push_back("written out though they shared memory: " + Quoted(duplicated_));
    }
    if (!contents_->metadata.empty() && contents_->metadata != kPlainMetadata) {
      warnings_.emplace_back("the metadata is lost: a PyTorch file has no place for it");
    }
    if (IsNested(*contents_)) {
      warnings_.emplace_back("the state was nested; its names are now joined by dots");
      const auto numbered = FindNumbered(*contents_);
      if (!numbered.empty()) {
        warnings_.push_back("numbered, because another entry has the same name: " +
                            Quoted(numbered));
      }
    }
  }

  [[nodiscard]] Result<layout::Stream> LayOutSafetensors() const {
    std::vector<layout::SafetensorsEntry> entries;
    entries.reserve(contents_->tensors.size());
    for (const StoredTensor& tensor : contents_->tensors) {
      entries.push_back({.name = tensor.name,
                         .dtype = std::string(layout::FindTorchDtype(tensor.dtype)->safetensors),
                         .shape = tensor.shape,
                         .pulled = BodyOf(tensor)});
    }
    return layout::LayOutSafetensors(std::move(entries), kPlainMetadata);
  }

  [[nodiscard]] Result<layout::Stream> LayOutTorch() const {
    std::vector<layout::PulledTensor> tensors;
    tensors.reserve(contents_->tensors.size());
    for (const StoredTensor& tensor : contents_->tensors) {
      tensors.push_back({.name = tensor.name,
                         .type = layout::FindTorchDtype(tensor.dtype),
                         .shape = tensor.shape,
                         .body = BodyOf(tensor)});
    }
    std::string pickle;
    const auto records = layout::DictOfTensorsRecords(tensors, kTorchAlignment, pickle);
    return layout::LayOutTorchContainer(
        records, {.prefix = layout::ArchivePrefix(options_.output), .alignment = kTorchAlignment});
  }

  [[nodiscard]] layout::PulledBody BodyOf(const StoredTensor& tensor) const {
    return {.pull_id = static_cast<std::uint32_t>(&tensor - contents_->tensors.data()),
            .length = tensor.bytes};
  }

  Result<void> Write(const file::InputFile& file) {
    auto stream = format_ == Format::kSafetensors ? LayOutSafetensors() : LayOutTorch();
    if (!stream) return std::unexpected(stream.error());
    ProgressBar bar("converting");
    const std::uint64_t all = stream->size();
    const auto source = std::make_shared<TensorSource>(
        file, *contents_, [&bar, all](std::uint64_t done) { bar.Update(done, all); });
    if (auto unchanged = source->CheckUnchanged(); !unchanged) return unchanged;
    stream->set_pulled(source);
    const InterruptDeferred deferred;
    auto info = checkpoint::SaveStream(*stream, options_.output, {});
    if (!info) return std::unexpected(info.error());
    info_ = *std::move(info);
    if (!info_.warning.empty()) warnings_.push_back(info_.warning);
    return {};
  }

  [[nodiscard]] Json Document() const {
    Json document = JsonDocument("convert");
    document["input"] = options_.input;
    document["output"] = options_.output;
    document["format"] = NameOf(format_);
    document["tensor_count"] = contents_->tensors.size();
    document["bytes"] = info_.bytes;
    document["seconds"] = seconds_;
    document["engine"] = EngineName(info_.engine);
    document["direct"] = info_.direct;
    document["dropped"] = dropped_;
    document["duplicated"] = duplicated_;
    document["warnings"] = warnings_;
    return document;
  }

  const ConvertOptions& options_;
  Format format_ = Format::kTorch;
  std::shared_ptr<const Contents> contents_;
  std::vector<std::string> warnings_;
  std::vector<std::string> dropped_;
  std::vector<std::string> duplicated_;
  SaveInfo info_;
  double seconds_ = 0;
};

ExitStatus Convert(const ConvertOptions& options) {
  Conversion conversion(options);
  if (auto done = conversion.Run(); !done) {
    if (const int signal = InterruptDeferred::Noted(); signal != 0) {
      Complain("interrupted");
      return static_cast<ExitStatus>(static_cast<int>(ExitStatus::kInterrupted) + signal);
    }
    return Fail(done.error());
  }
  return conversion.Report();
}

}  // namespace

void AddConvert(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("convert", "Write the tensors of a file in the other format, bit for bit");
  command->footer(R"(The suffix of OUT decides: .safetensors, or .pt, .pth, .bin, .ckpt for PyTorch.
IN is checked whole first; OUT appears complete or not at all. What the other
format cannot hold is refused with its name. Memory stays small, but for tensors
that are not row-major: each of them is in memory while it is written.

Examples:
  fastpersist convert model.pt model.safetensors
  fastpersist convert --tensors-only --duplicate-shared checkpoint.pt model.safetensors
  fastpersist convert --force model.safetensors model.pt)");
  auto options = std::make_shared<ConvertOptions>();
  command->add_option("IN", options->input, "A PyTorch or safetensors file")->required();
  command->add_option("OUT", options->output, "The file to write")->required();
  command->add_flag("--force", options->force, "Replace OUT if it exists");
  command->add_flag("--tensors-only", options->choices.tensors_only,
                    "Leave out entries that are no tensors");
  command->add_flag("--duplicate-shared", options->choices.duplicate_shared,
                    "Write out each of the tensors that share memory");
  command->add_flag("--json", options->json, "One JSON document (docs/cli.md)");
  command->callback([options, &action] { action = [options] { return Convert(*options); }; });
}

}  // namespace fastpersist::cli
