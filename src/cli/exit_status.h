// SPDX-License-Identifier: Apache-2.0
// What the program tells whoever started it. Documented in docs/cli.md; scripts depend on it.
#pragma once

#include <cstdint>

#include "fastpersist/error.h"

namespace fastpersist::cli {

enum class ExitStatus : std::uint8_t {
  kGood = 0,
  kDamaged = 1,        ///< The file is damaged, or holds what was not expected.
  kUsage = 2,          ///< The command line cannot be carried out.
  kStorage = 3,        ///< The operating system refused or failed something; no such file.
  kInterrupted = 128,  ///< Plus the number of the signal.
};

[[nodiscard]] constexpr ExitStatus StatusOf(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return ExitStatus::kUsage;
    case ErrorCode::kStorage:
    case ErrorCode::kForked:
    case ErrorCode::kNotFound:
      return ExitStatus::kStorage;
    case ErrorCode::kUnsupportedState:
    case ErrorCode::kCorrupt:
    case ErrorCode::kUnsupportedFile:
    case ErrorCode::kMismatch:
    case ErrorCode::kStateChanged:
    case ErrorCode::kAbandoned:
      return ExitStatus::kDamaged;
  }
  return ExitStatus::kDamaged;
}

}  // namespace fastpersist::cli
