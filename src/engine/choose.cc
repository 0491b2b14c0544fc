// SPDX-License-Identifier: Apache-2.0
#include "engine/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "engine/buffered_engine.h"
#include "engine/libaio_engine.h"
#include "engine/threads_engine.h"
#include "engine/uring_engine.h"

namespace fastpersist::engine {
namespace {

constexpr std::array kOrder{Engine::kUring, Engine::kLibaio, Engine::kThreads, Engine::kBuffered};

void AddReason(std::string& reasons, Engine kind, std::string_view why) {
  if (!reasons.empty()) reasons += "; ";
  reasons += fmt::format("{}: {}", EngineName(kind), why);
}

}  // namespace

Result<std::unique_ptr<IoEngine>> MakeEngine(Engine kind, unsigned depth) {
  switch (kind) {
    case Engine::kUring:
      return MakeUringEngine(depth);
    case Engine::kLibaio:
      return MakeLibaioEngine(depth);
    case Engine::kThreads:
      return MakeThreadsEngine(depth);
    case Engine::kAuto:
    case Engine::kBuffered:
      break;
  }
  return std::make_unique<BufferedEngine>();
}

EngineChoice ChooseEngine(Engine wanted, bool direct, unsigned depth, const EngineFactory& factory,
                          const std::vector<std::pair<Engine, std::string>>& refused) {
  if (wanted == Engine::kBuffered) {
    return {.engine = std::make_unique<BufferedEngine>(), .reason = "buffered was asked for"};
  }
  if (!direct) {
    return {.engine = std::make_unique<BufferedEngine>(), .reason = "the file takes no direct I/O"};
  }
  std::string reasons;
  const auto* kind = wanted == Engine::kAuto ? kOrder.begin() : std::ranges::find(kOrder, wanted);
  for (; *kind != Engine::kBuffered; ++kind) {
    const auto known = std::ranges::find(refused, *kind, &std::pair<Engine, std::string>::first);
    if (known != refused.end()) {
      AddReason(reasons, *kind, known->second);
      continue;
    }
    auto engine = factory(*kind, depth);
    if (engine) {
      if (!reasons.empty()) {
        return {.engine = *std::move(engine),
                .reason = fmt::format("the next after {}", reasons),
                .fell_back = true};
      }
      return {.engine = *std::move(engine),
              .reason = wanted == Engine::kAuto ? "the first choice, and it works here"
                                                : "it was asked for"};
    }
    AddReason(reasons, *kind, engine.error().Message());
  }
  return {.engine = std::make_unique<BufferedEngine>(),
          .reason = fmt::format("nothing else works here ({})", reasons),
          .fell_back = true};
}

}  // namespace fastpersist::engine
