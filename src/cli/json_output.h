// SPDX-License-Identifier: Apache-2.0
// JSON for programs. Every document is one object that begins with "schema" and "command";
// docs/cli.md lists the keys. Keys are added within a schema, never removed or changed.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "fastpersist/error.h"

namespace fastpersist::cli {

/// Keeps the order in which keys were added.
using Json = nlohmann::ordered_json;

/// {"schema": 1, "command": command}.
[[nodiscard]] Json JsonDocument(std::string_view command);

[[nodiscard]] Json ToJson(const Error& error);

/// Bytes that are not UTF-8 (in file names) become U+FFFD.
[[nodiscard]] std::string JsonText(const Json& document);

}  // namespace fastpersist::cli
