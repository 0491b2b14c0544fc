// SPDX-License-Identifier: Apache-2.0
#include "cli/json_output.h"

#include <fmt/format.h>

#include <cstdint>
#include <optional>

#include "base/error_code_name.h"

namespace fastpersist::cli {
namespace {

constexpr int kSchema = 1;

Json Checksum(std::optional<std::uint32_t> crc) {
  return crc ? Json(fmt::format("{:08x}", *crc)) : Json(nullptr);
}

}  // namespace

Json JsonDocument(std::string_view command) { return {{"schema", kSchema}, {"command", command}}; }

Json ToJson(const Error& error) {
  return {{"code", base::ErrorCodeName(error.code)},
          {"entry", error.entry},
          {"offset", error.offset ? Json(*error.offset) : Json(nullptr)},
          {"expected_crc32", Checksum(error.expected_crc)},
          {"found_crc32", Checksum(error.found_crc)},
          {"message", error.Message()}};
}

std::string JsonText(const Json& document) {
  return document.dump(2, ' ', false, Json::error_handler_t::replace) + '\n';
}

}  // namespace fastpersist::cli
