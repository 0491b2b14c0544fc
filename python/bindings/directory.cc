// SPDX-License-Identifier: Apache-2.0
// The GIL is released during input and output.
#include "directory.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "commit/catalog.h"
#include "commit/retention.h"
#include "errors.h"
#include "file/input_file.h"
#include "layout/zip_reader.h"
#include "unlocked.h"

namespace nb = nanobind;

namespace fastpersist::python {
namespace {

using commit::CatalogEntry;
using commit::Root;

// As os.fsdecode does it: names in a directory may be any bytes.
nb::object FileName(const std::string& name) {
  PyObject* object =
      PyUnicode_DecodeFSDefaultAndSize(name.data(), static_cast<Py_ssize_t>(name.size()));
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

std::string FromFileName(const nb::str& name) {
  const nb::object encoded = nb::steal(PyUnicode_EncodeFSDefault(name.ptr()));
  if (!encoded.is_valid()) throw nb::python_error();
  const auto bytes = nb::cast<nb::bytes>(encoded);
  return {bytes.c_str(), bytes.size()};
}

// Sentences, which may name files.
nb::object Sentence(const std::string& text) {
  PyObject* object =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

nb::list FileNames(const std::vector<std::string>& names) {
  nb::list list;
  for (const std::string& name : names) list.append(FileName(name));
  return list;
}

nb::list Streams(const commit::Manifest& manifest) {
  nb::list list;
  for (const commit::ManifestStream& stream : manifest.streams) {
    nb::list parts;
    for (const commit::Part& part : stream.parts) {
      nb::dict dict;
      dict["root"] = Sentence(part.root);
      dict["file"] = FileName(part.file);
      dict["offset"] = part.offset;
      dict["length"] = part.length;
      dict["crc"] = part.crc;
      parts.append(std::move(dict));
    }
    nb::dict dict;
    dict["name"] = FileName(stream.name);
    dict["format"] = Sentence(stream.format);
    dict["size"] = stream.size;
    dict["crc"] = stream.crc;
    dict["record_crcs"] = nb::cast(stream.record_crcs);
    dict["parts"] = std::move(parts);
    list.append(std::move(dict));
  }
  return list;
}

nb::dict EntryDict(const CatalogEntry& entry) {
  nb::dict dict;
  dict["name"] = FileName(entry.name);
  dict["step"] = entry.step;
  dict["state"] = std::string(commit::StateName(entry.state));
  dict["reason"] = Sentence(entry.reason);
  dict["bytes"] = entry.bytes;
  dict["sequence"] = entry.sequence ? nb::cast(*entry.sequence) : nb::none();
  const bool known = entry.manifest.has_value();
  dict["metadata"] = known ? Sentence(entry.manifest->metadata) : nb::none();
  dict["created"] = known ? Sentence(entry.manifest->created) : nb::none();
  dict["job"] = known ? Sentence(entry.manifest->job) : nb::none();
  dict["world_size"] = known ? nb::cast(entry.manifest->world_size) : nb::none();
  dict["streams"] = known ? nb::object(Streams(*entry.manifest)) : nb::object(nb::list());
  return dict;
}

// What a file says of itself, without its data: to be compared with its manifest.
nb::list RecordChecksums(const nb::bytes& path) {
  const std::string name(path.c_str(), path.size());
  const layout::ZipDirectory directory = Unwrap(Unlocked([&]() -> Result<layout::ZipDirectory> {
    const auto file = file::InputFile::Open(name, file::RealFileOps());
    if (!file) return std::unexpected(file.error());
    return layout::ReadZipDirectory(*file);
  }));
  nb::list list;
  for (const layout::ArchiveRecord& record : directory.records) {
    list.append(nb::make_tuple(Sentence(record.name), record.crc));
  }
  return list;
}

nb::list Catalog(const SharedRoot& self) {
  const auto root = self.Opened();
  const auto catalog =
      Unwrap(Unlocked([&] { return commit::ReadCatalog(*root, file::RealFileOps()); }));
  nb::list list;
  for (const CatalogEntry& entry : catalog) list.append(EntryDict(entry));
  return list;
}

void Retire(const SharedRoot& self, const nb::str& generation) {
  const auto root = self.Opened();
  const std::string name = FromFileName(generation);
  const auto done = Unlocked([&] { return commit::Retire(*root, name, file::RealFileOps()); });
  if (!done) Raise(done.error());
}

nb::tuple RemoveLeftovers(const SharedRoot& self) {
  const auto root = self.Opened();
  const auto found =
      Unwrap(Unlocked([&] { return commit::RemoveLeftovers(*root, file::RealFileOps()); }));
  return nb::make_tuple(FileNames(found.removed), FileNames(found.kept));
}

nb::list Prune(const SharedRoot& self, std::optional<std::uint64_t> keep_last,
               std::optional<std::uint64_t> keep_every, bool dry_run) {
  const auto root = self.Opened();
  const commit::RetentionPolicy policy{.keep_last = keep_last, .keep_every = keep_every};
  return FileNames(
      Unwrap(Unlocked([&] { return commit::Prune(*root, policy, dry_run, file::RealFileOps()); })));
}

}  // namespace

std::shared_ptr<Root> SharedRoot::Opened() const {
  if (root == nullptr) {
    Error error{.code = ErrorCode::kInvalidArgument, .operation = "use the directory"};
    error.path = path;
    error.detail = "it was closed";
    Raise(error);
  }
  return root;
}

void BindDirectory(nb::module_& m) {
  nb::class_<SharedRoot>(m, "Root")
      .def(
          "__init__",
          [](SharedRoot* self, const nb::bytes& path, bool write) {
            const std::string name(path.c_str(), path.size());
            auto opened = Unlocked([&] {
              return Root::Open(name, write ? Root::Access::kWrite : Root::Access::kRead);
            });
            new (self) SharedRoot{.path = name, .root = Unwrap(std::move(opened))};
          },
          nb::arg("path"), nb::arg("write"))
      .def_prop_ro("path", [](const SharedRoot& self) { return ToBytes(self.Opened()->path()); })
      .def_prop_ro("id", [](const SharedRoot& self) { return self.Opened()->id(); })
      .def_prop_ro("lock_warning",
                   [](const SharedRoot& self) { return self.Opened()->lock_warning(); })
      .def("catalog", &Catalog)
      .def("retire", &Retire, nb::arg("name"))
      .def("remove_leftovers", &RemoveLeftovers)
      .def("prune", &Prune, nb::arg("keep_last").none(), nb::arg("keep_every").none(),
           nb::arg("dry_run"))
      .def("close", [](SharedRoot& self) { self.root.reset(); });
  m.def("record_checksums", &RecordChecksums, nb::arg("path"));
}

}  // namespace fastpersist::python
