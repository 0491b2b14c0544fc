// SPDX-License-Identifier: Apache-2.0
// The records of a PyTorch file that holds a dict of tensors, for callers without Python. The
// pickle refers to nothing but torch._utils._rebuild_tensor_v2, so torch.load(weights_only=True)
// reads it. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fastpersist/state.h"
#include "layout/dtype_names.h"
#include "layout/stream.h"
#include "layout/torch_container.h"

namespace fastpersist::layout {

/// Records in torch's order. Entries with the same address, type and size share one storage, as
/// tensors that share memory do in torch. The records refer to the state's memory and to arena,
/// which must outlive them.
[[nodiscard]] std::vector<Record> DictOfTensorsRecords(const State& state, std::uint64_t alignment,
                                                       std::string& pickle_arena);

/// A tensor whose bytes come from elsewhere: row-major, at the beginning of a storage.
struct PulledTensor {
  std::string_view name;
  const FileDtype* type = nullptr;
  std::span<const std::int64_t> shape;
  PulledBody body;  ///< Its storage, which it has for itself.
};

/// The same for tensors that are pulled. Also holds types for which torch has no typed storage.
[[nodiscard]] std::vector<Record> DictOfTensorsRecords(std::span<const PulledTensor> tensors,
                                                       std::uint64_t alignment,
                                                       std::string& pickle_arena);

}  // namespace fastpersist::layout
