// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/opened_file.h"

#include <algorithm>
#include <utility>

#include "base/fork_guard.h"
#include "checkpoint/buffer_sizes.h"
#include "checkpoint/read_ranges.h"
#include "checkpoint/stored_checks.h"
#include "memory/prefault.h"

namespace fastpersist::checkpoint {
namespace {

constexpr std::size_t kMostDamages = 1000;

}  // namespace

Result<std::shared_ptr<OpenedFile>> OpenedFile::Open(const std::string& path,
                                                     const Environment& environment) {
  if (auto alive = base::CheckNotForked(); !alive) return std::unexpected(alive.error());
  auto file = file::InputFile::Open(path, *environment.files);
  if (!file) return std::unexpected(file.error());
  auto contents = layout::ReadContents(*file);
  if (!contents) return std::unexpected(contents.error());
  return std::shared_ptr<OpenedFile>(
      new OpenedFile(*std::move(file), *std::move(contents), environment));
}

std::shared_ptr<const layout::Contents> OpenedFile::contents() const {
  const std::scoped_lock lock(mutex_);
  return contents_;
}

Result<void> OpenedFile::LocateBodies() {
  auto located = std::make_shared<layout::Contents>(*contents());
  if (auto done = layout::LocateBodies(file_, located->archive); !done) return done;
  layout::AdoptBodyOffsets(*located);
  const std::scoped_lock lock(mutex_);
  contents_ = std::move(located);
  return {};
}

Result<ReadInfo> OpenedFile::Run(const MakeChecks& make_checks, const Options& options,
                                 Verification& found) {
  for (bool located = false;; located = true) {
    const auto now = contents();
    pipeline::RangeChecker::Plan checks = make_checks(*now);
    checks.may_give_up = !located;
    pipeline::RangeChecker checker(checks);
    auto info =
        ReadRanges(file_, WantedRanges(checks), checks.deliveries, checker, options, environment_);
    if (!info) return info;
    if (!checker.gave_up()) {
      found.damages = checker.damages();
      found.checked_records = checker.compared();
      found.unchecked_records = checker.uncompared();
      return info;
    }
    // Headers that cannot be believed leave the bodies where they were: the next pass then says
    // which of them is damaged, and goes on with the rest.
    auto done = LocateBodies();
    if (!done && done.error().code != ErrorCode::kCorrupt) return std::unexpected(done.error());
  }
}

Result<ReadInfo> OpenedFile::ReadStorages(std::vector<std::uint32_t> storages,
                                          const Deliver& deliver, const Options& options) {
  return ReadInto(std::move(storages), deliver, /*only_delivered=*/false, options);
}

Result<ReadInfo> OpenedFile::ReadUnchecked(std::vector<std::uint32_t> storages,
                                           const Deliver& deliver, const Options& options) {
  return ReadInto(std::move(storages), deliver, /*only_delivered=*/true, options);
}

Result<ReadInfo> OpenedFile::ReadInto(std::vector<std::uint32_t> storages, const Deliver& deliver,
                                      bool only_delivered, const Options& options) {
  std::ranges::sort(storages);
  storages.erase(std::ranges::unique(storages).begin(), storages.end());
  Verification found;
  auto info = Run(
      [&](const layout::Contents& contents) {
        auto checks = ChecksFor(contents, storages, path());
        checks.deliveries = deliver(contents);
        std::ranges::stable_sort(checks.deliveries, {},
                                 [](const plan::Delivery& d) { return d.range.begin; });
        if (only_delivered) OnlyDelivered(checks);
        return checks;
      },
      options, found);
  if (info && !found.damages.empty()) return std::unexpected(found.damages.front());
  return info;
}

Result<memory::Arena> OpenedFile::ReadAll(const Options& options, ReadInfo& info,
                                          const Progress& progress) {
  auto arena = memory::Arena::Create(size());
  if (!arena) {
    arena.error().path = path();
    return arena;
  }
  Verification found;
  const auto done = [&] {
    // The block that is copied now is left to the copying.
    const std::uint64_t ahead = options.block_bytes.value_or(kDefaultBlock);
    memory::Prefault prefault(arena->memory(), ahead);
    return Run(
        [&](const layout::Contents& contents) {
          auto checks = ChecksForAll(contents, path());
          checks.deliveries.push_back({.range = {.begin = 0, .end = size()},
                                       .memory = arena->memory().data(),
                                       .fresh = true});
          checks.advance = [&](std::uint64_t bytes) {
            prefault.Reached(bytes);
            if (progress) progress(bytes, size());
          };
          return checks;
        },
        options, found);
  }();
  if (!done) return std::unexpected(done.error());
  if (!found.damages.empty()) return std::unexpected(found.damages.front());
  info = *done;
  return arena;
}

Result<Verification> OpenedFile::Verify(const Options& options, const Progress& progress) {
  Verification found;
  auto info = Run(
      [&](const layout::Contents& contents) {
        auto checks = ChecksForAll(contents, path());
        checks.most_damages = kMostDamages;
        if (progress) {
          checks.advance = [&](std::uint64_t bytes) { progress(bytes, size()); };
        }
        return checks;
      },
      options, found);
  if (!info) return std::unexpected(info.error());
  found.info = *std::move(info);
  return found;
}

}  // namespace fastpersist::checkpoint
