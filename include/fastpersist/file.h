// SPDX-License-Identifier: Apache-2.0
// Open: names, types and shapes of what a checkpoint file holds, without reading its data. Read:
// tensors into memory of the caller, in parallel, directly, every checksum compared.
//
// PyTorch files (torch.save since 1.6, and our own) and safetensors files, told apart by content.
// Nothing in a file is ever executed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fastpersist/error.h"
#include "fastpersist/options.h"
#include "fastpersist/save.h"
#include "fastpersist/state.h"
#include "fastpersist/version.h"

namespace fastpersist {
inline namespace v0 {

/// One tensor in a file.
struct TensorInfo {
  std::string name;            ///< Path in the state, joined by dots: "wte", "optim.state.0.step".
  std::string dtype_name;      ///< As torch names it: "float32", "float8_e4m3fn", "quint8".
  std::optional<DType> dtype;  ///< The same, where DType has it.
  std::vector<std::int64_t> shape;    ///< Sizes; {} is a scalar.
  std::vector<std::int64_t> strides;  ///< As stored, in elements. Read gives row-major.
  std::uint64_t bytes = 0;            ///< Of its elements: what Read writes.
  std::string storage;                ///< Tensors with equal storages share memory, as torch does.
  std::uint64_t storage_offset = 0;   ///< Where its first element lies in the storage, in bytes.
  std::string device;                 ///< Where it was saved: "cpu", "cuda:0", "meta".
};

/// An entry of the state that is no tensor.
struct ValueInfo {
  std::string name;     ///< As for tensors.
  std::string text;     ///< Short, for people: "3", "'adam'"; what would be called if opaque.
  bool opaque = false;  ///< An object that only Python can make.
};

/// Where Read puts one tensor.
struct ReadTarget {
  std::string_view name;             ///< TensorInfo::name.
  std::span<std::byte> destination;  ///< Exactly TensorInfo::bytes.
};

/// What a finished read or check reports.
struct ReadInfo {
  std::uint64_t bytes = 0;            ///< Read from the file.
  std::uint64_t staged_bytes = 0;     ///< Copied through staging memory.
  std::uint64_t in_place_bytes = 0;   ///< Read straight into their final memory.
  double seconds = 0;                 ///< From the call to its return.
  Engine engine = Engine::kBuffered;  ///< The engine that finished.
  std::string engine_reason;          ///< Why this engine, in a sentence.
  bool direct = false;                ///< True when the page cache was bypassed to the end.
  std::string warning;                ///< Something the user should know once; mostly empty.
};

/// Bytes done, bytes in all. Called now and then by the thread that reads.
using Progress = std::function<void(std::uint64_t done, std::uint64_t all)>;

/// What Verify found.
struct Verification {
  std::vector<Error> damages;           ///< Empty: all good. At most 1,000 are listed.
  std::uint64_t checked_records = 0;    ///< Whose checksum was compared.
  std::uint64_t unchecked_records = 0;  ///< Read, but the format has no checksum (safetensors).
  ReadInfo info;                        ///< How it was read.
};

/// An open checkpoint file. Cheap to move. Thread-safe: any number of threads may read at once. The
/// file must not be changed meanwhile; one that is replaced by a rename stays readable.
class FASTPERSIST_EXPORT File {
 public:
  File(File&&) noexcept;             ///< The other one can only be destroyed.
  File& operator=(File&&) noexcept;  ///< Closes this one first.
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  [[nodiscard]] const std::string& path() const;  ///< As it was opened.
  [[nodiscard]] std::uint64_t size() const;       ///< Of the file, in bytes.
  [[nodiscard]] Format format() const;            ///< By its contents, whatever its name.
  /// In the order of the state; names are unique.
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const;
  /// What is no tensor, likewise.
  [[nodiscard]] const std::vector<ValueInfo>& values() const;
  /// safetensors only.
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const;
  /// Null when there is no such tensor.
  [[nodiscard]] const TensorInfo* Find(std::string_view name) const;

  /// Reads one tensor, row-major, into destination. kNotFound, kInvalidArgument (size), kCorrupt
  /// (naming tensor, offset, expected and found checksum), kStorage. After an error the contents of
  /// destination are undefined.
  [[nodiscard]] Result<ReadInfo> Read(std::string_view name, std::span<std::byte> destination,
                                      const Options& options = {}) const;
  /// The same for several at once, in one pass over the file: what loading a checkpoint is.
  [[nodiscard]] Result<ReadInfo> Read(std::span<const ReadTarget> targets,
                                      const Options& options = {}) const;

  /// Reads everything and compares every checksum, goes on after a damage, and keeps nothing.
  /// Damage is not an error of this call; kStorage is.
  [[nodiscard]] Result<Verification> Verify(const Options& options = {},
                                            const Progress& progress = {}) const;

 private:
  friend FASTPERSIST_EXPORT Result<File> Open(const std::filesystem::path&);
  struct Impl;
  explicit File(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Opens a file and reads its structure: milliseconds, whatever its size. kNotFound, kStorage,
/// kCorrupt, kUnsupportedFile (a recognised kind that is not read, such as a TorchScript archive).
[[nodiscard]] FASTPERSIST_EXPORT Result<File> Open(const std::filesystem::path& path);

}  // namespace v0
}  // namespace fastpersist
