// SPDX-License-Identifier: Apache-2.0
// A state at one moment, as a stream: memory that its owner lends is read where it lies, everything
// else is copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fastpersist/error.h"
#include "fastpersist/state.h"
#include "layout/stream.h"
#include "pipeline/memory_gate.h"

namespace fastpersist::checkpoint {

struct StateSnapshot {
  std::shared_ptr<const layout::Stream> stream;  ///< A PyTorch file.
  std::vector<pipeline::LiveExtent> live;        ///< What is read where it lies.
  std::uint64_t unfit_bytes = 0;                 ///< Of these: what found no room for a copy.
  std::span<std::byte> spare;                    ///< The memory that was not used.
};

/// Copies what is not named in live into memory. Names that share one memory are live together or
/// not at all. The state is needed no more afterwards; its live memory and `memory` are, for as
/// long as the stream is. kInvalidArgument: a name that is not in the state.
[[nodiscard]] Result<StateSnapshot> TakeSnapshot(const State& state,
                                                 std::span<const std::string> live,
                                                 std::span<std::byte> memory);

}  // namespace fastpersist::checkpoint
