// SPDX-License-Identifier: Apache-2.0
// Which ranges of a checkpoint file are read for which storages, and what is compared in each: the
// knowledge of layout turned into work for pipeline.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "layout/contents.h"
#include "pipeline/range_checker.h"
#include "plan/read_plan.h"

namespace fastpersist::checkpoint {

/// Checks for whole storages (indices into contents.storages, ascending): of PyTorch files local
/// header, body and descriptor, what lies behind it apart; of safetensors files the body alone. The
/// contents must outlive the plan; file is for messages.
[[nodiscard]] pipeline::RangeChecker::Plan ChecksFor(const layout::Contents& contents,
                                                     std::span<const std::uint32_t> storages,
                                                     const std::string& file);
/// The same for every record of the file, storages or not.
[[nodiscard]] pipeline::RangeChecker::Plan ChecksForAll(const layout::Contents& contents,
                                                        const std::string& file);

/// Leaves of the bodies only what is delivered, without a checksum; headers and descriptors stay.
void OnlyDelivered(pipeline::RangeChecker::Plan& checks);

/// The ranges as such, for the plan.
[[nodiscard]] std::vector<plan::Range> WantedRanges(const pipeline::RangeChecker::Plan& checks);

}  // namespace fastpersist::checkpoint
