// SPDX-License-Identifier: Apache-2.0
// What a save must know of each attached tensor, asked quickly: a save asks hundreds of tensors,
// and its caller waits.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace fastpersist::python {

/// For each tensor of at least least_bytes that lies densely in host memory of this process alone:
/// (tensor, storage, address, bytes, version or None). is_dense judges those that are not
/// contiguous. Tensors that raise RuntimeError or TypeError have no memory of their own.
[[nodiscard]] nanobind::list OwnedTensors(const nanobind::list& tensors, std::uint64_t least_bytes,
                                          nanobind::handle is_dense);

}  // namespace fastpersist::python
