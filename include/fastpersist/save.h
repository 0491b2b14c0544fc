// SPDX-License-Identifier: Apache-2.0
// Save: a state becomes one ordinary file, which PyTorch or safetensors reads.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "fastpersist/error.h"
#include "fastpersist/options.h"
#include "fastpersist/save_info.h"
#include "fastpersist/state.h"
#include "fastpersist/version.h"

namespace fastpersist {
inline namespace v0 {

/// Which ordinary file is written.
enum class Format : std::uint8_t {
  kTorch,        ///< A PyTorch zip file: a dict of tensors, read by torch.load(weights_only=True).
  kSafetensors,  ///< The safetensors format.
};

/// What goes into the file besides the tensors.
struct SaveFormat {
  std::optional<Format> format;                 ///< Default: by suffix, .safetensors or torch.
  std::map<std::string, std::string> metadata;  ///< safetensors only; refused otherwise.
};

/// Writes the state to path and returns when it is on stable storage (options.sync). The file
/// appears at path by a rename, complete or not at all; an older file there stays bit-identical on
/// failure. Thread-safe: any number of threads may save at once; two saves to one path: the last
/// rename wins. Errors: kInvalidArgument, kUnsupportedState (before the disk is touched), kStorage,
/// kForked.
[[nodiscard]] FASTPERSIST_EXPORT Result<SaveInfo> Save(const State& state,
                                                       const std::filesystem::path& path,
                                                       const Options& options = {},
                                                       const SaveFormat& format = {});

}  // namespace v0
}  // namespace fastpersist
