// SPDX-License-Identifier: Apache-2.0
// Whether text is UTF-8, as Python and JSON demand of names: no overlong forms, no surrogates,
// nothing beyond U+10FFFF (RFC 3629). Pure.
#pragma once

#include <string_view>

namespace fastpersist::base {

[[nodiscard]] bool IsUtf8(std::string_view text);

}  // namespace fastpersist::base
