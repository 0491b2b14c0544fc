// SPDX-License-Identifier: Apache-2.0
// What every IoEngine promises, as rules that can be checked on any of them; src/engine/io_engine.h
// says it in words. tests/cpp/engine_contract_test.cc applies every rule to every engine, the fake
// ones included, and shows with broken engines that each rule can fail.
//
// The checks use a real file in the working directory, direct where the file system allows it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "engine/io_engine.h"
#include "testing/contract_file.h"

namespace fastpersist::testing {

/// One implementation. make may answer that it cannot be had here.
struct EngineUnderTest {
  std::string name;
  std::function<Result<std::unique_ptr<engine::IoEngine>>(unsigned depth)> make;
};

struct ContractRule {
  std::string name;  ///< A sentence.
  std::function<::testing::AssertionResult(const EngineUnderTest&, const ContractFile&,
                                           std::uint64_t seed)>
      holds;
};

inline void PrintTo(const EngineUnderTest& engine, std::ostream* out) { *out << engine.name; }
inline void PrintTo(const ContractRule& rule, std::ostream* out) { *out << rule.name; }

/// All rules. A rule makes the engines that it needs; they can be had (make succeeded before).
[[nodiscard]] const std::vector<ContractRule>& EngineContract();

}  // namespace fastpersist::testing
