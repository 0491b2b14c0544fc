// SPDX-License-Identifier: Apache-2.0
// The GIL is released while bytes move.
#include "reading.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arena_memory.h"
#include "base/crc32.h"
#include "checkpoint/opened_file.h"
#include "checkpoint/stored_checks.h"
#include "errors.h"
#include "layout/contents.h"
#include "plain_unpickler.h"

namespace nb = nanobind;

namespace fastpersist::python {
namespace {

using checkpoint::OpenedFile;
using layout::Contents;
using layout::StoredStorage;
using layout::StoredTensor;

// Text from a file: names may hold halves of surrogate pairs.
nb::object Text(const std::string& text) {
  PyObject* object =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass");
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

// The bytes of a file object, which lie in an arena.
class ArenaSource final : public layout::ByteSource {
 public:
  ArenaSource(std::shared_ptr<SharedArena> shared, std::string name)
      : shared_(std::move(shared)), name_(std::move(name)) {}
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::uint64_t size() const override { return shared_->arena.memory().size(); }
  [[nodiscard]] Result<void> Read(std::uint64_t offset, std::span<std::byte> out) const override {
    std::ranges::copy(shared_->arena.memory().subspan(offset, out.size()), out.begin());
    return {};
  }

 private:
  std::shared_ptr<SharedArena> shared_;
  std::string name_;
};

// What is open: a file, or the bytes of a file object that were read already.
class PyFile {
 public:
  static std::shared_ptr<PyFile> Open(const nb::bytes& path) {
    const std::string name(path.c_str(), path.size());
    auto opened = [&] {
      const nb::gil_scoped_release unlocked;
      return OpenedFile::Open(name);
    }();
    auto file = std::make_shared<PyFile>();
    file->file_ = Unwrap(std::move(opened));
    return file;
  }

  static std::shared_ptr<PyFile> OfArena(std::shared_ptr<SharedArena> shared,
                                         const std::string& name) {
    auto file = std::make_shared<PyFile>();
    const ArenaSource source(shared, name);
    auto contents = Unwrap(layout::ReadContents(source));
    auto checked = Check(source, contents, shared->arena);
    if (checked.gave_up) {
      if (auto done = layout::LocateBodies(source, contents.archive); !done) Raise(done.error());
      layout::AdoptBodyOffsets(contents);
      checked = Check(source, contents, shared->arena);
    }
    if (checked.damage) Raise(*checked.damage);
    file->arena_ = std::move(shared);
    file->contents_ = std::make_shared<const Contents>(std::move(contents));
    return file;
  }

  [[nodiscard]] std::shared_ptr<const Contents> contents() const {
    return file_ ? file_->contents() : contents_;
  }
  [[nodiscard]] const std::shared_ptr<OpenedFile>& file() const { return file_; }

  // All of the file, every checksum compared.
  std::shared_ptr<SharedArena> ReadAll(const Options& options) {
    if (arena_) return arena_;
    auto shared = std::make_shared<SharedArena>();
    ReadInfo info;
    auto arena = [&] {
      const nb::gil_scoped_release unlocked;
      return file_->ReadAll(options, info);
    }();
    shared->arena = Unwrap(std::move(arena));
    last_info_ = std::move(info);
    return shared;
  }

  using Piece = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uintptr_t>;
  // Pieces of storages (storage, offset in it, bytes, address); checked: the storages are read
  // whole, and compared with their checksums.
  void ReadPieces(const std::vector<Piece>& pieces, bool checked, const Options& options) {
    const auto deliver = [&](const Contents& contents) {
      std::vector<plan::Delivery> deliveries;
      deliveries.reserve(pieces.size());
      for (const auto& [storage, offset, bytes, address] : pieces) {
        const std::uint64_t begin = contents.storages[storage].offset + offset;
        deliveries.push_back({.range = {.begin = begin, .end = begin + bytes},
                              .memory = reinterpret_cast<std::byte*>(address)});
      }
      return deliveries;
    };
    CheckPieces(pieces);
    if (arena_) {  // compared with their checksums when the file object was opened
      for (const plan::Delivery& delivery : deliver(*contents_)) {
        std::ranges::copy(arena_->arena.memory().subspan(delivery.range.begin,
                                                         delivery.range.end - delivery.range.begin),
                          delivery.memory);
      }
      return;
    }
    std::vector<std::uint32_t> storages;
    for (const Piece& piece : pieces) storages.push_back(std::get<0>(piece));
    auto info = [&] {
      const nb::gil_scoped_release unlocked;
      return checked ? file_->ReadStorages(storages, deliver, options)
                     : file_->ReadUnchecked(storages, deliver, options);
    }();
    last_info_ = Unwrap(std::move(info));
  }

  // The body of a record (its name without the prefix), compared with its checksum.
  nb::bytes Record(const std::string& name) const {
    const auto now = contents();
    const auto& records = now->archive.records;
    const auto record =
        std::ranges::find(records, now->prefix + '/' + name, &layout::ArchiveRecord::name);
    if (record == records.end()) throw nb::key_error(name.c_str());
    std::string body(record->size, '\0');
    const auto out = std::as_writable_bytes(std::span(body));
    if (file_) {
      if (auto done = file_->source().Read(record->body_offset, out); !done) Raise(done.error());
    } else {
      std::ranges::copy(arena_->arena.memory().subspan(record->body_offset, record->size),
                        out.begin());
    }
    if (const std::uint32_t found = base::Crc32(out); now->checksums && found != record->crc) {
      Raise({.code = ErrorCode::kCorrupt,
             .operation = "read",
             .path = file_ ? file_->path() : std::string(),
             .offset = record->body_offset,
             .entry = record->name,
             .expected_crc = record->crc,
             .found_crc = found,
             .detail = "record '" + record->name + "' is damaged",
             .advice = "restore this file from another copy"});
    }
    return ToBytes(body);
  }

  [[nodiscard]] const ReadInfo& last_info() const { return last_info_; }

 private:
  struct Outcome {
    std::optional<Error> damage;
    bool gave_up = false;
  };

  static Outcome Check(const ArenaSource& source, const Contents& contents,
                       const memory::Arena& arena) {
    const auto checks = checkpoint::ChecksForAll(contents, source.name());
    pipeline::RangeChecker checker(checks);
    const nb::gil_scoped_release unlocked;
    (void)checker.Accept(0, arena.memory());
    Outcome outcome{.gave_up = checker.gave_up()};
    if (!checker.damages().empty()) outcome.damage = checker.damages().front();
    return outcome;
  }

  void CheckPieces(const std::vector<Piece>& pieces) const {
    const auto now = contents();
    for (const auto& [storage, offset, bytes, address] : pieces) {
      if (storage >= now->storages.size() || offset > now->storages[storage].size ||
          bytes > now->storages[storage].size - offset) {
        throw nb::index_error("the piece does not lie within its storage");
      }
    }
  }

  std::shared_ptr<OpenedFile> file_;    // of a path, or:
  std::shared_ptr<SharedArena> arena_;  // of a file object
  std::shared_ptr<const Contents> contents_;
  ReadInfo last_info_;
};

nb::list Storages(const PyFile& file) {
  nb::list list;
  for (const StoredStorage& storage : file.contents()->storages) {
    list.append(nb::make_tuple(Text(storage.name), storage.offset, storage.size));
  }
  return list;
}

nb::list Tensors(const PyFile& file) {
  nb::list list;
  const auto contents = file.contents();
  for (const StoredTensor& tensor : contents->tensors) {
    const bool stored = tensor.storage != layout::kNoStorage;
    list.append(nb::make_tuple(
        Text(tensor.name), Text(tensor.dtype), nb::tuple(nb::cast(tensor.shape)),
        nb::tuple(nb::cast(tensor.strides)), stored ? nb::cast(tensor.storage) : nb::none(),
        tensor.offset, tensor.bytes, Text(tensor.device), tensor.conjugate, tensor.negative));
  }
  return list;
}

nb::list Values(const PyFile& file) {
  nb::list list;
  for (const layout::StoredValue& value : file.contents()->values) {
    list.append(nb::make_tuple(Text(value.name), Text(value.text), value.opaque));
  }
  return list;
}

// Names without the prefix, with offset and bytes of each body.
nb::list Records(const PyFile& file) {
  nb::list list;
  const auto contents = file.contents();
  for (const layout::ArchiveRecord& record : contents->archive.records) {
    std::string name = record.name;
    if (name.starts_with(contents->prefix + '/')) name.erase(0, contents->prefix.size() + 1);
    list.append(nb::make_tuple(Text(name), record.body_offset, record.size));
  }
  return list;
}

nb::dict InfoDict(const PyFile& file) {
  const ReadInfo& info = file.last_info();
  nb::dict dict;
  dict["bytes"] = info.bytes;
  dict["staged_bytes"] = info.staged_bytes;
  dict["in_place_bytes"] = info.in_place_bytes;
  dict["seconds"] = info.seconds;
  dict["engine"] = std::string(EngineName(info.engine));
  dict["engine_reason"] = info.engine_reason;
  dict["direct"] = info.direct;
  dict["warning"] = info.warning;
  return dict;
}

}  // namespace

void BindReading(nb::module_& m) {
  nb::class_<TorchMakers>(m, "TorchMakers")
      .def(
          "__init__",
          [](TorchMakers* self, nb::object frombuffer, nb::object empty, nb::object untyped_storage,
             nb::object rebuild_parameter, nb::object size, nb::object ordered_dict,
             nb::dict storage_dtypes, nb::object torch) {
            new (self) TorchMakers{
                std::move(frombuffer),        std::move(empty), std::move(untyped_storage),
                std::move(rebuild_parameter), std::move(size),  std::move(ordered_dict),
                std::move(storage_dtypes),    std::move(torch)};
          },
          nb::arg("frombuffer"), nb::arg("empty"), nb::arg("untyped_storage"),
          nb::arg("rebuild_parameter"), nb::arg("size"), nb::arg("ordered_dict"),
          nb::arg("storage_dtypes"), nb::arg("torch"));

  nb::class_<PyFile>(m, "File")
      .def_prop_ro("kind",
                   [](const PyFile& file) {
                     return file.contents()->kind == Contents::Kind::kTorch ? "torch"
                                                                            : "safetensors";
                   })
      .def_prop_ro("checksums", [](const PyFile& file) { return file.contents()->checksums; })
      .def_prop_ro("metadata", [](const PyFile& file) { return file.contents()->metadata; })
      .def_prop_ro("pickle", [](const PyFile& file) { return ToBytes(file.contents()->pickle); })
      .def_prop_ro("byteorder", [](const PyFile& file) { return file.contents()->byteorder; })
      .def_prop_ro("info", &InfoDict)
      .def("storages", &Storages)
      .def("tensors", &Tensors)
      .def("values", &Values)
      .def("records", &Records)
      .def("record", &PyFile::Record, nb::arg("name"))
      .def("read_all", &PyFile::ReadAll, nb::arg("options"))
      .def("read_pieces", &PyFile::ReadPieces, nb::arg("pieces"), nb::arg("checked"),
           nb::arg("options"))
      .def(
          "looks_plain",
          [](const PyFile& file, bool any_location) {
            return LooksPlain(file.contents()->tree, any_location);
          },
          nb::arg("any_location"))
      .def(
          "unpickle_plain",
          [](const PyFile& file, const std::shared_ptr<SharedArena>& arena,
             const TorchMakers& makers, bool any_location) {
            const auto contents = file.contents();
            return UnpicklePlain(*contents, arena, makers, any_location);
          },
          nb::arg("arena"), nb::arg("makers"), nb::arg("any_location"));
  m.def("open", &PyFile::Open, nb::arg("path"));
  m.def("open_arena", &PyFile::OfArena, nb::arg("arena"), nb::arg("name"));
}

}  // namespace fastpersist::python
