// SPDX-License-Identifier: Apache-2.0
#include "base/error_code_name.h"

namespace fastpersist::base {

std::string_view ErrorCodeName(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid_argument";
    case ErrorCode::kUnsupportedState:
      return "unsupported_state";
    case ErrorCode::kForked:
      return "forked";
    case ErrorCode::kCorrupt:
      return "corrupt";
    case ErrorCode::kUnsupportedFile:
      return "unsupported_file";
    case ErrorCode::kNotFound:
      return "not_found";
    case ErrorCode::kMismatch:
      return "mismatch";
    case ErrorCode::kStateChanged:
      return "state_changed";
    case ErrorCode::kAbandoned:
      return "abandoned";
    case ErrorCode::kStorage:
      break;
  }
  return "storage";
}

}  // namespace fastpersist::base
