// SPDX-License-Identifier: Apache-2.0
// What error codes are called where programs read them: the exceptions' factory in Python, and the
// JSON of the command line.
#pragma once

#include <string_view>

#include "fastpersist/error.h"

namespace fastpersist::base {

/// Such as "not_found".
[[nodiscard]] std::string_view ErrorCodeName(ErrorCode code);

}  // namespace fastpersist::base
