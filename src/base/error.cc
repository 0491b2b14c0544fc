// SPDX-License-Identifier: Apache-2.0
#include "fastpersist/error.h"

#include <fmt/format.h>

#include <system_error>

namespace fastpersist {
inline namespace v0 {

std::string Error::Message() const {
  std::string message = operation.empty() ? std::string("save failed") : operation + " failed";
  if (!path.empty()) message += fmt::format(" on {}", path);
  if (offset) message += fmt::format(" at offset {}", *offset);
  if (system_errno != 0) {
    message +=
        fmt::format(": {} (errno {})", std::generic_category().message(system_errno), system_errno);
  }
  if (!detail.empty()) message += ": " + detail;
  if (!advice.empty()) message += "; " + advice;
  return message;
}

}  // namespace v0
}  // namespace fastpersist
