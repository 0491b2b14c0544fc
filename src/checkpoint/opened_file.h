// SPDX-License-Identifier: Apache-2.0
// A checkpoint file that was opened: its contents, and the three ways to read its data. What the
// public File, the command line and the Python binding have in common.
//
// Thread-safe. Contents are a snapshot that stays valid; it is replaced once at most, when a local
// header shows that the archive's records do not lie back to back (layout/zip_reader.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/environment.h"
#include "fastpersist/error.h"
#include "fastpersist/file.h"
#include "fastpersist/options.h"
#include "file/input_file.h"
#include "layout/contents.h"
#include "memory/arena.h"
#include "pipeline/range_checker.h"
#include "plan/read_plan.h"

namespace fastpersist::checkpoint {

class OpenedFile {
 public:
  [[nodiscard]] static Result<std::shared_ptr<OpenedFile>> Open(
      const std::string& path, const Environment& environment = {});

  [[nodiscard]] const std::string& path() const { return file_.name(); }
  [[nodiscard]] std::uint64_t size() const { return file_.size(); }
  /// For small pieces of structure.
  [[nodiscard]] const file::InputFile& source() const { return file_; }
  [[nodiscard]] std::shared_ptr<const layout::Contents> contents() const;

  /// Where the bytes of storages go, in any order; called anew when the contents were replaced.
  using Deliver = std::function<std::vector<plan::Delivery>(const layout::Contents& contents)>;
  /// Reads these storages (indices, in any order, repeated or not) whole and checks them.
  [[nodiscard]] Result<ReadInfo> ReadStorages(std::vector<std::uint32_t> storages,
                                              const Deliver& deliver, const Options& options);
  /// Reads parts of these storages, which no checksum covers. Headers and descriptors are compared
  /// all the same: they say where the storages are.
  [[nodiscard]] Result<ReadInfo> ReadUnchecked(std::vector<std::uint32_t> storages,
                                               const Deliver& deliver, const Options& options);
  /// Reads the whole file into an arena that mirrors it, and checks every record.
  [[nodiscard]] Result<memory::Arena> ReadAll(const Options& options, ReadInfo& info,
                                              const Progress& progress = {});
  /// Reads and checks everything, and keeps nothing. Goes on after a damage.
  [[nodiscard]] Result<Verification> Verify(const Options& options, const Progress& progress);

 private:
  OpenedFile(file::InputFile file, layout::Contents contents, Environment environment)
      : file_(std::move(file)),
        contents_(std::make_shared<const layout::Contents>(std::move(contents))),
        environment_(std::move(environment)) {}

  // Makes the checks, with the deliveries, for some contents.
  using MakeChecks = std::function<pipeline::RangeChecker::Plan(const layout::Contents& contents)>;
  Result<ReadInfo> Run(const MakeChecks& make_checks, const Options& options, Verification& found);
  Result<ReadInfo> ReadInto(std::vector<std::uint32_t> storages, const Deliver& deliver,
                            bool only_delivered, const Options& options);
  Result<void> LocateBodies();

  file::InputFile file_;
  mutable std::mutex mutex_;  // guards the pointer
  std::shared_ptr<const layout::Contents> contents_;
  Environment environment_;
};

}  // namespace fastpersist::checkpoint
