// SPDX-License-Identifier: Apache-2.0
// What saving and reading use of the world; tests put faults and recorders here.
#pragma once

#include "engine/choose.h"
#include "file/file_ops.h"

namespace fastpersist::checkpoint {

struct Environment {
  const file::FileOps* files = &file::RealFileOps();
  engine::EngineFactory make_engine = engine::MakeEngine;
};

}  // namespace fastpersist::checkpoint
