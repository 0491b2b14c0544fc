// SPDX-License-Identifier: Apache-2.0
// The public File: names to storages, storages to ranges, and views to row-major memory.
#include "fastpersist/file.h"

#include <fmt/format.h>

#include <unordered_map>
#include <utility>

#include "checkpoint/opened_file.h"
#include "layout/dtype_names.h"
#include "layout/gather.h"

namespace fastpersist {
inline namespace v0 {

using layout::Contents;
using layout::StoredTensor;

struct File::Impl {
  std::shared_ptr<checkpoint::OpenedFile> file;
  std::vector<TensorInfo> tensors;
  std::vector<ValueInfo> values;
  std::unordered_map<std::string_view, std::size_t> index;  // views into tensors
  std::map<std::string, std::string> metadata;
};

namespace {

TensorInfo Describe(const Contents& contents, const StoredTensor& tensor) {
  return {.name = tensor.name,
          .dtype_name = tensor.dtype,
          .dtype = layout::DTypeOfName(tensor.dtype),
          .shape = tensor.shape,
          .strides = tensor.strides,
          .bytes = tensor.bytes,
          .storage = tensor.storage == layout::kNoStorage ? std::string()
                                                          : contents.storages[tensor.storage].name,
          .storage_offset = tensor.offset,
          .device = tensor.device};
}

// Why the bytes in the file are not the values of the tensor; empty when they are.
std::string WhyNotReadable(const Contents& contents, const StoredTensor& tensor) {
  if (tensor.storage == layout::kNoStorage) return "is on the meta device and has no data";
  if (tensor.item_size == 0) return fmt::format("has a type not known here ({})", tensor.dtype);
  if (tensor.conjugate || tensor.negative) return "is a lazy conjugate or negation";
  if (contents.byteorder != "little") return "was written on a big-endian machine";
  return {};
}

// One tensor on its way from the file to row-major memory.
struct Transfer {
  const StoredTensor* tensor = nullptr;
  std::span<std::byte> destination;
  std::vector<std::byte> scratch;  // of a view that is not row-major: its span in the storage
};

Error ReadError(const std::string& path, ErrorCode code, std::string_view name, std::string detail,
                std::string advice) {
  return {.code = code,
          .operation = "read",
          .path = path,
          .entry = std::string(name),
          .detail = std::move(detail),
          .advice = std::move(advice)};
}

Result<std::vector<Transfer>> Prepare(const File& file, const Contents& contents,
                                      std::span<const ReadTarget> targets) {
  std::vector<Transfer> transfers;
  transfers.reserve(targets.size());
  for (const ReadTarget& target : targets) {
    const TensorInfo* info = file.Find(target.name);
    if (info == nullptr) {
      return std::unexpected(ReadError(file.path(), ErrorCode::kNotFound, target.name,
                                       fmt::format("there is no tensor '{}'", target.name),
                                       "see File::tensors() or fastpersist inspect"));
    }
    const StoredTensor& tensor =
        contents.tensors[static_cast<std::size_t>(info - file.tensors().data())];
    if (const std::string why = WhyNotReadable(contents, tensor); !why.empty()) {
      return std::unexpected(ReadError(file.path(), ErrorCode::kUnsupportedFile, target.name,
                                       fmt::format("tensor '{}' {}", target.name, why),
                                       "load it with PyTorch"));
    }
    if (target.destination.size() != tensor.bytes) {
      return std::unexpected(
          ReadError(file.path(), ErrorCode::kInvalidArgument, target.name,
                    fmt::format("tensor '{}' has {} bytes, its destination {}", target.name,
                                tensor.bytes, target.destination.size()),
                    "give exactly TensorInfo::bytes"));
    }
    if (tensor.bytes == 0) continue;
    Transfer& transfer =
        transfers.emplace_back(Transfer{.tensor = &tensor, .destination = target.destination});
    if (!layout::IsRowMajor(tensor.shape, tensor.strides)) {
      transfer.scratch.resize(layout::SpanBytes(tensor.shape, tensor.strides, tensor.item_size));
    }
  }
  return transfers;
}

std::vector<plan::Delivery> Deliveries(const Contents& contents, std::span<Transfer> transfers) {
  std::vector<plan::Delivery> deliveries;
  deliveries.reserve(transfers.size());
  for (Transfer& transfer : transfers) {
    const std::span<std::byte> memory =
        transfer.scratch.empty() ? transfer.destination : std::span(transfer.scratch);
    const std::uint64_t begin =
        contents.storages[transfer.tensor->storage].offset + transfer.tensor->offset;
    deliveries.push_back(
        {.range = {.begin = begin, .end = begin + memory.size()}, .memory = memory.data()});
  }
  return deliveries;
}

}  // namespace

Result<File> Open(const std::filesystem::path& path) {
  auto file = checkpoint::OpenedFile::Open(path.native());
  if (!file) return std::unexpected(file.error());
  auto impl = std::make_unique<File::Impl>();
  impl->file = *std::move(file);
  const auto contents = impl->file->contents();
  impl->tensors.reserve(contents->tensors.size());
  for (const StoredTensor& tensor : contents->tensors) {
    impl->tensors.push_back(Describe(*contents, tensor));
  }
  for (std::size_t i = 0; i < impl->tensors.size(); ++i) {
    impl->index.emplace(impl->tensors[i].name, i);
  }
  for (const layout::StoredValue& value : contents->values) {
    impl->values.push_back({.name = value.name, .text = value.text, .opaque = value.opaque});
  }
  impl->metadata = contents->metadata;
  return File(std::move(impl));
}

File::File(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
File::File(File&&) noexcept = default;
File& File::operator=(File&&) noexcept = default;
File::~File() = default;

const std::string& File::path() const { return impl_->file->path(); }
std::uint64_t File::size() const { return impl_->file->size(); }
const std::vector<TensorInfo>& File::tensors() const { return impl_->tensors; }
const std::vector<ValueInfo>& File::values() const { return impl_->values; }

Format File::format() const {
  return impl_->file->contents()->kind == Contents::Kind::kTorch ? Format::kTorch
                                                                 : Format::kSafetensors;
}

const std::map<std::string, std::string>& File::metadata() const { return impl_->metadata; }

const TensorInfo* File::Find(std::string_view name) const {
  const auto at = impl_->index.find(name);
  return at == impl_->index.end() ? nullptr : &impl_->tensors[at->second];
}

Result<ReadInfo> File::Read(std::string_view name, std::span<std::byte> destination,
                            const Options& options) const {
  const ReadTarget target{.name = name, .destination = destination};
  return Read({&target, 1}, options);
}

Result<ReadInfo> File::Read(std::span<const ReadTarget> targets, const Options& options) const {
  const auto contents = impl_->file->contents();
  auto transfers = Prepare(*this, *contents, targets);
  if (!transfers) return std::unexpected(transfers.error());
  std::vector<std::uint32_t> storages;
  for (const Transfer& transfer : *transfers) storages.push_back(transfer.tensor->storage);
  auto info = impl_->file->ReadStorages(
      std::move(storages), [&](const Contents& now) { return Deliveries(now, *transfers); },
      options);
  if (!info) return info;
  for (const Transfer& transfer : *transfers) {
    if (transfer.scratch.empty()) continue;
    layout::Gather(transfer.scratch.data(), transfer.tensor->shape, transfer.tensor->strides,
                   transfer.tensor->item_size, transfer.destination);
  }
  return info;
}

Result<Verification> File::Verify(const Options& options, const Progress& progress) const {
  return impl_->file->Verify(options, progress);
}

}  // namespace v0
}  // namespace fastpersist
