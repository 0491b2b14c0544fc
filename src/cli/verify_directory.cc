// SPDX-License-Identifier: Apache-2.0
// `fastpersist verify` on a directory: structure and sizes of every checkpoint, then one pass over
// each file, in which the checksums of its records and that of the whole file are compared.
#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32.h"
#include "checkpoint/opened_file.h"
#include "checkpoint/read_ranges.h"
#include "checkpoint/stored_checks.h"
#include "cli/directory.h"
#include "cli/progress_bar.h"
#include "cli/terminal.h"
#include "commit/manifest.h"
#include "file/file_ops.h"
#include "file/input_file.h"

namespace fastpersist::cli {
namespace {

using commit::CatalogEntry;
using commit::GenerationState;

// The checksum of all bytes; shows them to another sink on the way.
class WholeFile final : public pipeline::ByteSink {
 public:
  WholeFile(pipeline::ByteSink* records, std::function<void(std::uint64_t)> advance)
      : records_(records), advance_(std::move(advance)) {}
  void Restart() override {
    crc_ = 0;
    if (records_ != nullptr) records_->Restart();
    more_records_ = true;
  }
  [[nodiscard]] bool Accept(std::uint64_t offset, std::span<const std::byte> bytes) override {
    crc_ = base::Crc32(bytes, crc_);
    if (records_ != nullptr && more_records_) more_records_ = records_->Accept(offset, bytes);
    advance_(offset + bytes.size());
    return true;
  }
  [[nodiscard]] std::uint32_t crc() const { return crc_; }

 private:
  pipeline::ByteSink* records_;
  std::function<void(std::uint64_t)> advance_;
  bool more_records_ = true;
  std::uint32_t crc_ = 0;
};

struct Findings {
  std::vector<std::string> verified;  // names of checkpoints
  std::vector<Error> damages;
  std::uint64_t bytes = 0;  // read
  double seconds = 0;
};

class Verifier {
 public:
  explicit Verifier(const Directory& directory) : directory_(directory), bar_("verifying") {
    for (const CatalogEntry& checkpoint : directory.checkpoints) {
      if (checkpoint.state == GenerationState::kComplete) all_ += checkpoint.bytes;
    }
  }

  // Errors are of the system; damage is among the findings.
  Result<void> Run(bool quick) {
    for (const CatalogEntry& checkpoint : directory_.checkpoints) {
      if (checkpoint.state == GenerationState::kComplete) {
        if (auto done = quick ? Result<void>() : ReadAll(checkpoint); !done) return done;
        findings_.verified.push_back(checkpoint.name);
      } else if (checkpoint.state == GenerationState::kDamaged ||
                 checkpoint.state == GenerationState::kNewer) {
        findings_.damages.push_back({.code = ErrorCode::kCorrupt,
                                     .operation = "verify",
                                     .path = directory_.root->path() + '/' + checkpoint.name,
                                     .detail = checkpoint.reason});
      }
    }
    return {};
  }
  [[nodiscard]] const Findings& findings() const { return findings_; }

 private:
  Result<void> ReadAll(const CatalogEntry& checkpoint) {
    for (const commit::ManifestStream& stream : checkpoint.manifest->streams) {
      std::uint32_t crc = 0;
      for (const commit::Part& part : stream.parts) {
        // A part alone is a file with records of its own.
        auto found =
            ReadPart(directory_.Path(checkpoint, part.file), part, stream.parts.size() == 1);
        if (!found) return std::unexpected(found.error());
        crc = base::CombineCrc32(crc, part.crc, part.length);
      }
      if (crc != stream.crc) {
        findings_.damages.push_back(
            Differs(directory_.Path(checkpoint, stream.name), stream.crc, crc,
                    "the checksums of its parts are not that of the whole stream"));
      }
    }
    return {};
  }

  Result<void> ReadPart(const std::string& path, const commit::Part& part, bool alone) {
    std::shared_ptr<checkpoint::OpenedFile> opened;
    if (alone) {
      auto file = checkpoint::OpenedFile::Open(path);
      // Its bytes are compared all the same.
      if (!file && file.error().code == ErrorCode::kStorage) return std::unexpected(file.error());
      if (file) {
        opened = *std::move(file);
      } else {
        findings_.damages.push_back(file.error());
      }
    }
    const std::size_t before = findings_.damages.size();
    auto crc = opened != nullptr ? ReadWithRecords(*opened) : ReadBytes(path);
    if (!crc) return std::unexpected(crc.error());
    if (*crc != part.crc && findings_.damages.size() == before) {
      findings_.damages.push_back(Differs(path, part.crc, *crc, "its bytes have changed"));
    }
    return {};
  }

  Result<std::uint32_t> ReadWithRecords(checkpoint::OpenedFile& file) {
    const auto contents = file.contents();
    auto checks = checkpoint::ChecksForAll(*contents, file.path());
    checks.most_damages = 1000;
    pipeline::RangeChecker records(checks);
    auto crc = Read(file.source(), &records);
    for (const Error& damage : records.damages()) findings_.damages.push_back(damage);
    return crc;
  }

  Result<std::uint32_t> ReadBytes(const std::string& path) {
    const auto file = file::InputFile::Open(path, file::RealFileOps());
    if (!file) return std::unexpected(file.error());
    return Read(*file, nullptr);
  }

  Result<std::uint32_t> Read(const file::InputFile& file, pipeline::ByteSink* records) {
    const std::uint64_t before = findings_.bytes;
    WholeFile sink(records, [&](std::uint64_t bytes) { bar_.Update(before + bytes, all_); });
    if (file.size() > 0) {
      const plan::Range all{.begin = 0, .end = file.size()};
      const auto info = checkpoint::ReadRanges(file, {&all, 1}, {}, sink, kFromTheDevice);
      if (!info) return std::unexpected(info.error());
      findings_.seconds += info->seconds;
    }
    findings_.bytes += file.size();
    return sink.crc();
  }

  static Error Differs(const std::string& path, std::uint32_t expected, std::uint32_t found,
                       std::string detail) {
    Error error{.code = ErrorCode::kCorrupt, .operation = "verify", .path = path};
    error.expected_crc = expected;
    error.found_crc = found;
    error.detail = std::move(detail);
    error.advice = "restore another checkpoint, or this file from another copy";
    return error;
  }

  const Directory& directory_;
  ProgressBar bar_;
  std::uint64_t all_ = 0;
  Findings findings_;
};

std::string Text(const std::string& path, bool quick, const Findings& findings) {
  std::string text;
  for (const Error& damage : findings.damages) {
    text += fmt::format("damaged: {}\n", Escaped(damage.Message()));
  }
  const std::string speed =
      findings.bytes == 0
          ? ""
          : fmt::format(" ({} in {:.2f} s, {})", SizeText(findings.bytes), findings.seconds,
                        RateText(findings.bytes, findings.seconds));
  std::string verdict = fmt::format("{} found", Counted(findings.damages.size(), "damage"));
  if (findings.damages.empty()) {
    verdict = quick ? "structure and sizes are good; no data was read" : "every checksum agrees";
    if (findings.verified.empty()) verdict = "there is no complete checkpoint";
  }
  return text + fmt::format("{}: {} looked at, {}{}\n", Escaped(path),
                            Counted(findings.verified.size(), "complete checkpoint"), verdict,
                            speed);
}

Json Document(const std::string& path, bool quick, const Directory& directory,
              const Findings& findings) {
  Json document = JsonDocument("verify");
  document["directory"] = path;
  document["quick"] = quick;
  document["good"] = findings.damages.empty() && !findings.verified.empty();
  Json& checkpoints = document["checkpoints"] = Json::array();
  for (const CatalogEntry& checkpoint : directory.checkpoints) {
    checkpoints.push_back(CheckpointJson(checkpoint));
  }
  document["verified"] = findings.verified;
  Json& damages = document["damages"] = Json::array();
  for (const Error& damage : findings.damages) {
    Json json = ToJson(damage);
    json["file"] = damage.path;
    damages.push_back(std::move(json));
  }
  document["read"] = {{"bytes", findings.bytes}, {"seconds", findings.seconds}};
  return document;
}

}  // namespace

ExitStatus VerifyDirectory(const std::string& path, bool quick, bool json) {
  const auto directory = OpenDirectory(path);
  if (!directory) return Fail(directory.error());
  Verifier verifier(*directory);
  if (auto done = verifier.Run(quick); !done) return Fail(done.error());
  const Findings& findings = verifier.findings();
  const bool good = findings.damages.empty() && !findings.verified.empty();
  const ExitStatus status = good ? ExitStatus::kGood : ExitStatus::kDamaged;
  if (json) return Print(JsonText(Document(path, quick, *directory, findings)), status);
  return Print(Text(path, quick, findings), status);
}

}  // namespace fastpersist::cli
