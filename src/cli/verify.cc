// SPDX-License-Identifier: Apache-2.0
// `fastpersist verify`: reads a whole file, compares every checksum, and names every damage.
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>

#include "cli/app.h"
#include "cli/directory.h"
#include "cli/json_output.h"
#include "cli/progress_bar.h"
#include "cli/terminal.h"
#include "fastpersist/file.h"

namespace fastpersist::cli {
namespace {

struct VerifyOptions {
  std::string file;
  bool quick = false;
  bool json = false;
};

// What was found, whether the file could be opened or not.
struct Findings {
  std::optional<Format> format;  // of a file that could be opened
  std::uint64_t bytes = 0;
  std::size_t tensors = 0;
  Verification verification;
};

Json Document(const VerifyOptions& options, const Findings& findings) {
  const Verification& found = findings.verification;
  Json document = JsonDocument("verify");
  document["file"] = options.file;
  document["format"] = nullptr;
  if (findings.format) {
    document["format"] = *findings.format == Format::kTorch ? "torch" : "safetensors";
  }
  document["quick"] = options.quick;
  document["good"] = found.damages.empty();
  document["bytes"] = findings.bytes;
  document["tensor_count"] = findings.tensors;
  document["checked_records"] = found.checked_records;
  document["unchecked_records"] = found.unchecked_records;
  Json& damages = document["damages"] = Json::array();
  for (const Error& damage : found.damages) damages.push_back(ToJson(damage));
  document["read"] = {{"bytes", found.info.bytes},
                      {"seconds", found.info.seconds},
                      {"engine", EngineName(found.info.engine)},
                      {"direct", found.info.direct}};
  return document;
}

std::string Verdict(const VerifyOptions& options, const Findings& findings) {
  const Verification& found = findings.verification;
  const std::string file = Escaped(options.file);
  std::string text;
  for (const Error& damage : found.damages) {
    text += fmt::format("damaged: {}\n", Escaped(damage.Message()));
  }
  const std::string speed =
      found.info.bytes == 0
          ? ""
          : fmt::format(" ({} in {:.2f} s, {})", SizeText(found.info.bytes), found.info.seconds,
                        RateText(found.info.bytes, found.info.seconds));
  if (!found.damages.empty()) {
    return text +
           fmt::format("{}: {} found{}\n", file, Counted(found.damages.size(), "damage"), speed);
  }
  const std::string tensors = Counted(findings.tensors, "tensor");
  if (options.quick) {
    return fmt::format("{}: structure and sizes are good, {}; no data was read\n", file, tensors);
  }
  if (findings.format == Format::kSafetensors) {
    return fmt::format(
        "{}: structure is good, {} read without error; the format carries no checksums{}\n", file,
        tensors, speed);
  }
  if (found.checked_records == 0 && found.unchecked_records > 0) {
    return fmt::format(
        "{}: structure is good, {} read without error; the file was written with checksums "
        "switched off, so nothing could be compared{}\n",
        file, tensors, speed);
  }
  return fmt::format("{}: good, {}, the checksums of all {} agree{}\n", file, tensors,
                     Counted(found.checked_records, "record"), speed);
}

ExitStatus Report(const VerifyOptions& options, const Findings& findings) {
  const ExitStatus status =
      findings.verification.damages.empty() ? ExitStatus::kGood : ExitStatus::kDamaged;
  if (options.json) return Print(JsonText(Document(options, findings)), status);
  return Print(Verdict(options, findings), status);
}

ExitStatus Verify(const VerifyOptions& options) {
  if (IsDirectory(options.file)) {
    return VerifyDirectory(options.file, options.quick, options.json);
  }
  Findings findings;
  const auto file = Open(options.file);
  if (!file && file.error().code != ErrorCode::kCorrupt) return Fail(file.error());
  if (!file) {  // so damaged that there is no more to be said
    findings.verification.damages.push_back(file.error());
    return Report(options, findings);
  }
  findings.format = file->format();
  findings.bytes = file->size();
  findings.tensors = file->tensors().size();
  if (!options.quick) {
    ProgressBar bar("verifying");
    auto found = file->Verify(
        kFromTheDevice, [&bar](std::uint64_t done, std::uint64_t all) { bar.Update(done, all); });
    if (!found) return Fail(found.error());
    findings.verification = *std::move(found);
  }
  return Report(options, findings);
}

}  // namespace

void AddVerify(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "verify", "Read a file or all checkpoints of a directory and compare every checksum");
  command->footer(R"(Goes on after a damage and names each on a line of its own. Reads past the page
cache where the file system can.

Examples:
  fastpersist verify model.pt
  fastpersist verify --quick model.pt    structure and sizes only, in milliseconds
  fastpersist verify runs/gpt            every complete checkpoint
  fastpersist verify runs/gpt/step-00000200)");
  auto options = std::make_shared<VerifyOptions>();
  command
      ->add_option("FILE", options->file,
                   "A PyTorch or safetensors file, or a directory of checkpoints")
      ->required();
  command->add_flag("--quick", options->quick, "Structure and sizes only; no data is read");
  command->add_flag("--json", options->json, "One JSON document (docs/cli.md)");
  command->callback([options, &action] { action = [options] { return Verify(*options); }; });
}

}  // namespace fastpersist::cli
