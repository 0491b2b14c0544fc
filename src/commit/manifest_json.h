// SPDX-License-Identifier: Apache-2.0
// What writing and reading of manifests have in common: the JSON type and the canonical text that
// the manifest's checksum covers.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace fastpersist::commit {

/// Keys sorted by bytes.
using Json = nlohmann::json;

/// Without white space, keys sorted, only control characters, quotes and backslashes escaped.
[[nodiscard]] std::string CanonicalText(const Json& json);
[[nodiscard]] std::uint32_t CanonicalCrc(const Json& json);

}  // namespace fastpersist::commit
