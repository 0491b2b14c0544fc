// SPDX-License-Identifier: Apache-2.0
// Which engine serves a file: the first of io_uring, libaio, threads, buffered that works here,
// with the reasons why earlier ones do not.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/io_engine.h"

namespace fastpersist::engine {

/// Makes the engine of one kind (never kAuto), or says why it cannot be had. Tests pass their own.
using EngineFactory = std::function<Result<std::unique_ptr<IoEngine>>(Engine kind, unsigned depth)>;

/// The real engines.
[[nodiscard]] Result<std::unique_ptr<IoEngine>> MakeEngine(Engine kind, unsigned depth);

struct EngineChoice {
  std::unique_ptr<IoEngine> engine;
  std::string reason;      ///< A sentence without a final period.
  bool fell_back = false;  ///< True when something that should be faster was refused.
};

/// wanted: what the user asked for; kAuto or the start of the fall-back order. direct: whether the
/// file takes direct I/O; without it only the buffered engine makes sense. refused: engines that
/// failed on this file already, with the reason. Never fails: the buffered engine always works.
[[nodiscard]] EngineChoice ChooseEngine(Engine wanted, bool direct, unsigned depth,
                                        const EngineFactory& factory,
                                        const std::vector<std::pair<Engine, std::string>>& refused);

}  // namespace fastpersist::engine
