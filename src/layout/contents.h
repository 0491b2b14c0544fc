// SPDX-License-Identifier: Apache-2.0
// What a checkpoint file holds and where, without its data: the same value for PyTorch and
// safetensors files. Everything in it was checked against the size of the file: storages lie within
// it and do not overlap, tensors lie within their storages.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fastpersist/error.h"
#include "layout/byte_source.h"
#include "layout/pickle_reader.h"
#include "layout/zip_reader.h"

namespace fastpersist::layout {

/// A contiguous run of bytes in the file that tensors view: a record data/N, or one tensor of a
/// safetensors file.
struct StoredStorage {
  std::string name;                  ///< "data/0", or the tensor's name.
  std::uint64_t offset = 0;          ///< In the file.
  std::uint64_t size = 0;            ///< In bytes.
  std::optional<std::uint32_t> crc;  ///< CRC-32, if the file has checksums.
  /// Index into Contents::archive.records, or kNoRecord for safetensors.
  std::uint32_t record = UINT32_MAX;
};

/// One tensor: a strided view of a storage.
struct StoredTensor {
  /// Path in the state, joined by dots: "model.wte", "optim.state.0.step"; "tensor" when the state
  /// is nothing but a tensor. See StateLeaf::name for equal and for overlong names.
  std::string name;
  /// As torch names it: "float32", "float8_e4m3fn", "quint8". What torch does not have is called as
  /// in the file.
  std::string dtype;
  std::uint32_t item_size = 0;  ///< Bytes of an element; 0 when the type is not known here.
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  ///< In elements.
  std::uint32_t storage = 0;  ///< Index into Contents::storages; kNoStorage on the meta device.
  std::uint64_t offset = 0;   ///< Of the first element in the storage, in bytes.
  /// Elements times item_size; in safetensors files what the file has for it, whatever the type.
  std::uint64_t bytes = 0;
  std::string device;      ///< Where it was saved: "cpu", "cuda:0", "meta".
  bool conjugate = false;  ///< Lazy bits: the bytes are of the other value.
  bool negative = false;
};
inline constexpr std::uint32_t kNoStorage = UINT32_MAX;

/// Something in the state that is no tensor.
struct StoredValue {
  std::string name;     ///< As for tensors; "value" when the state is nothing else.
  std::string text;     ///< Short: "3", "'adam'", "0.1", or what it would be made by.
  bool opaque = false;  ///< Not understood: would be made by calling text ("module name").
};

struct Contents {
  enum class Kind : std::uint8_t { kTorch, kSafetensors };
  Kind kind = Kind::kTorch;
  std::vector<StoredStorage> storages;          ///< In ascending order of offset.
  std::vector<StoredTensor> tensors;            ///< In the order of the state; names are unique.
  std::vector<StoredValue> values;              ///< Likewise.
  std::map<std::string, std::string> metadata;  ///< safetensors only.

  /// False for safetensors files, and for PyTorch files written with checksums switched off, which
  /// state 0 for every record: there is nothing to compare.
  bool checksums = true;

  // PyTorch only:
  ZipDirectory archive;
  std::string prefix;  ///< Of the record names, without the slash.
  std::string pickle;  ///< data.pkl, its checksum compared.
  PickleTree tree;     ///< Of the pickle.
  std::string byteorder = "little";
  std::uint64_t alignment = 64;  ///< What .storage_alignment states; 64 without it.
  std::string format_version;    ///< .format_version; empty before torch 2.7.
};

/// Reads the structure of a file: a PyTorch zip file or a safetensors file, told apart by its first
/// bytes. The records data.pkl, byteorder, version and the like are read and compared with their
/// checksums. Errors: kCorrupt, kUnsupportedFile (TorchScript archives, legacy files, other zips),
/// kStorage.
[[nodiscard]] Result<Contents> ReadContents(const ByteSource& source);

/// The parts, in files of their own.
[[nodiscard]] Result<Contents> ReadTorchFile(const ByteSource& source);
[[nodiscard]] Result<Contents> ReadSafetensorsFile(const ByteSource& source);

/// After LocateBodies: storages take the bodies' offsets from the archive.
void AdoptBodyOffsets(Contents& contents);

}  // namespace fastpersist::layout
