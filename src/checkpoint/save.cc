// SPDX-License-Identifier: Apache-2.0
#include "fastpersist/save.h"

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/save_stream.h"
#include "layout/dict_of_tensors.h"
#include "layout/dtype_names.h"
#include "layout/safetensors.h"
#include "layout/torch_container.h"

namespace fastpersist {
inline namespace v0 {
namespace {

constexpr std::uint64_t kTorchAlignment = 64;  // torch's default storage_alignment

Result<layout::Stream> LayOut(const State& state, const std::string& path, Format format,
                              const SaveFormat& options) {
  if (format == Format::kSafetensors) {
    std::vector<layout::SafetensorsEntry> entries;
    for (const State::Entry& entry : state.entries()) {
      entries.push_back(
          {.name = entry.name,
           .dtype = std::string(layout::SafetensorsName(entry.view.dtype)),
           .shape = entry.view.shape,
           .body = {static_cast<const std::byte*>(entry.view.data), ByteSize(entry.view)}});
    }
    return layout::LayOutSafetensors(std::move(entries), options.metadata);
  }
  if (!options.metadata.empty()) {
    return std::unexpected(Error{.code = ErrorCode::kInvalidArgument,
                                 .operation = "save",
                                 .path = path,
                                 .detail = "a PyTorch file has no place for metadata",
                                 .advice = "save as .safetensors, or put it into the state"});
  }
  std::string pickle;
  const auto records = layout::DictOfTensorsRecords(state, kTorchAlignment, pickle);
  return layout::LayOutTorchContainer(
      records, {.prefix = layout::ArchivePrefix(path), .alignment = kTorchAlignment});
}

}  // namespace

Result<SaveInfo> Save(const State& state, const std::filesystem::path& path, const Options& options,
                      const SaveFormat& format) {
  const Format by_suffix =
      path.native().ends_with(".safetensors") ? Format::kSafetensors : Format::kTorch;
  auto stream = LayOut(state, path.native(), format.format.value_or(by_suffix), format);
  if (!stream) return std::unexpected(stream.error());
  return checkpoint::SaveStream(*stream, path.native(), options);
}

}  // namespace v0
}  // namespace fastpersist
