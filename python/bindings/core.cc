// SPDX-License-Identifier: Apache-2.0
// fastpersist._core: streams and saving for Python. Thin: arguments in, values out. The GIL is
// released while bytes move; an Error becomes the exception that the Python package registered.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "arena_memory.h"
#include "checkpoint/save_stream.h"
#include "commit/publish.h"
#include "commit/target.h"
#include "directory.h"
#include "errors.h"
#include "fastpersist/fastpersist.h"
#include "layout/safetensors.h"
#include "layout/torch_container.h"
#include "overlap.h"
#include "pipeline/filler.h"
#include "reading.h"
#include "save_seconds.h"
#include "state_pickler.h"
#include "unlocked.h"

namespace nb = nanobind;

namespace {

using fastpersist::Result;
using fastpersist::layout::Extent;
using fastpersist::layout::Stream;
using fastpersist::python::Raise;
using fastpersist::python::SecondsDict;
using fastpersist::python::Unlocked;
using fastpersist::python::Unwrap;

// The memory of a tensor: (address, bytes). Kept alive by the caller.
std::span<const std::byte> View(std::uintptr_t address, std::uint64_t size) {
  return {reinterpret_cast<const std::byte*>(address), size};
}

std::string_view ToText(nb::handle text) {
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (utf8 == nullptr) throw nb::python_error();
  return {utf8, static_cast<std::size_t>(size)};
}

// A record is (name, bytes) or (name, (address, size)). Plain C API: there may be 100,000 of them.
std::vector<fastpersist::layout::Record> ToRecords(const nb::list& items) {
  std::vector<fastpersist::layout::Record> records;
  records.reserve(items.size());
  for (const nb::handle item : items) {
    if (!PyTuple_Check(item.ptr()) || PyTuple_GET_SIZE(item.ptr()) != 2) {
      throw nb::type_error("a record is a tuple of name and body");
    }
    auto& record = records.emplace_back();
    record.name = ToText(PyTuple_GET_ITEM(item.ptr(), 0));
    PyObject* body = PyTuple_GET_ITEM(item.ptr(), 1);
    if (PyBytes_Check(body)) {
      record.body = {reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(body)),
                     static_cast<std::size_t>(PyBytes_GET_SIZE(body))};
      continue;
    }
    if (!PyTuple_Check(body) || PyTuple_GET_SIZE(body) != 2) {
      throw nb::type_error("a record's body is bytes, or a tuple of address and size");
    }
    const std::uint64_t address = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(body, 0));
    const std::uint64_t size = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(body, 1));
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    record.body = View(address, size);
    record.in_memory = true;
  }
  return records;
}

using TensorTuple =
    std::tuple<std::string, std::string, std::vector<std::int64_t>, std::uintptr_t, std::uint64_t>;

// Streams sequentially through one buffer; for file objects.
class Reader {
 public:
  explicit Reader(std::shared_ptr<const Stream> stream)
      : stream_(std::move(stream)), filler_(*stream_) {}

  // At most size bytes; empty at the end.
  nb::bytes Read(std::uint64_t size) {
    const std::uint64_t left = stream_->size() - filler_.offset();
    const std::uint64_t length = std::min(size, left);
    PyObject* bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(length));
    if (bytes == nullptr) throw nb::python_error();
    auto* data = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes));
    {
      const nb::gil_scoped_release unlocked;
      filler_.Fill({data, length});
    }
    return nb::steal<nb::bytes>(bytes);
  }

 private:
  std::shared_ptr<const Stream> stream_;
  fastpersist::pipeline::Filler filler_;
};

nb::list Extents(const Stream& stream) {
  static constexpr const char* kKinds[] = {"memory", "generated", "late", "pulled"};
  nb::list extents;
  for (const Extent& extent : stream.extents()) {
    const bool body = extent.body_of != fastpersist::layout::kNoRecord;
    extents.append(nb::make_tuple(extent.offset, extent.length,
                                  kKinds[static_cast<std::size_t>(extent.kind)],
                                  body ? nb::cast(extent.body_of) : nb::none()));
  }
  return extents;
}

// The bytes of extent number index (not memory), for the given record checksums.
nb::bytes RenderExtent(const Stream& stream, std::size_t index,
                       const std::vector<std::uint32_t>& crcs) {
  const Extent& extent = stream.extents()[index];
  std::vector<std::byte> out(extent.length);
  if (extent.kind == Extent::Kind::kLate) {
    std::vector<fastpersist::layout::RecordDigest> digests(stream.record_count());
    for (std::size_t i = 0; i < std::min(digests.size(), crcs.size()); ++i)
      digests[i].crc = crcs[i];
    stream.late()->Render(extent.late_id, digests, out);
  } else {
    std::copy_n(extent.bytes, extent.length, out.begin());
  }
  return nb::bytes(out.data(), out.size());
}

fastpersist::SaveInfo Save(const Stream& stream, const nb::bytes& path,
                           const fastpersist::Options& options) {
  const std::string target(path.c_str(), path.size());
  Result<fastpersist::SaveInfo> result = [&] {
    const nb::gil_scoped_release unlocked;
    return fastpersist::checkpoint::SaveStream(stream, target, options);
  }();
  return Unwrap(std::move(result));
}

// A target that somebody else (torch.save) writes through fileno(). Opening a FIFO waits for its
// reader, which may be a thread of ours.
class PyPublication {
 public:
  PyPublication(const nb::bytes& path, const fastpersist::Options& options)
      : options_(options),
        target_(Unwrap(Unlocked([text = std::string(path.c_str(), path.size())] {
          return fastpersist::commit::ResolveTarget(text, fastpersist::file::RealFileOps());
        }))),
        publication_(Unwrap(Unlocked([this] {
          return fastpersist::commit::Publication::Begin(target_, options_,
                                                         fastpersist::file::RealFileOps());
        }))) {}

  [[nodiscard]] int fileno() const { return publication_->fd(); }
  void Publish(std::uint64_t size) {
    std::string warning;
    const Result<void> done = [&]() -> Result<void> {
      const nb::gil_scoped_release unlocked;
      if (auto sealed = publication_->Seal(size); !sealed) return sealed;
      return publication_->Publish(warning);
    }();
    if (!done) Raise(done.error());
  }
  void Close() { publication_.reset(); }

 private:
  fastpersist::Options options_;
  fastpersist::commit::Target target_;
  std::optional<fastpersist::commit::Publication> publication_;
};

fastpersist::Options MakeOptions(const std::string& engine,
                                 std::optional<std::uint64_t> block_bytes,
                                 std::optional<std::uint32_t> queue_depth,
                                 std::optional<std::uint64_t> staging_bytes, bool direct, bool sync,
                                 bool atomic, std::uint32_t retries) {
  const auto parsed = fastpersist::ParseEngine(engine);
  if (!parsed) {
    Raise({.code = fastpersist::ErrorCode::kInvalidArgument,
           .operation = "options",
           .detail = "engine '" + engine + "' is unknown",
           .advice = "use auto, uring, libaio, threads or buffered"});
  }
  fastpersist::Options options{.engine = *parsed,
                               .block_bytes = block_bytes,
                               .queue_depth = queue_depth,
                               .staging_bytes = staging_bytes,
                               .direct = direct,
                               .sync = sync,
                               .atomic = atomic,
                               .retries = retries};
  if (auto valid = fastpersist::Validate(options); !valid) Raise(valid.error());
  return options;
}

}  // namespace

NB_MODULE(_core, m) {
  // Tensors that live until the interpreter goes, as models do, are no leak.
  nb::set_leak_warnings(false);
  m.attr("__version__") = FASTPERSIST_VERSION_STRING;
  fastpersist::python::BindErrors(m);
  fastpersist::python::BindArena(m);
  fastpersist::python::BindReading(m);
  fastpersist::python::BindDirectory(m);
  fastpersist::python::BindOverlap(m);

  nb::class_<Stream>(m, "Stream")
      .def_prop_ro("size", &Stream::size)
      .def("extents", &Extents)
      .def("render", &RenderExtent, nb::arg("index"), nb::arg("crcs"));
  nb::class_<Reader>(m, "Reader")
      .def(nb::init<std::shared_ptr<const Stream>>())
      .def("read", &Reader::Read, nb::arg("size"));
  nb::class_<fastpersist::Options>(m, "Options");
  nb::class_<PyPublication>(m, "Publication")
      .def(nb::init<const nb::bytes&, const fastpersist::Options&>())
      .def("fileno", &PyPublication::fileno)
      .def("publish", &PyPublication::Publish, nb::arg("size"))
      .def("close", &PyPublication::Close);

  nb::class_<fastpersist::SaveInfo>(m, "SaveInfo")
      .def_ro("bytes", &fastpersist::SaveInfo::bytes)
      .def_ro("staged_bytes", &fastpersist::SaveInfo::staged_bytes)
      .def_ro("in_place_bytes", &fastpersist::SaveInfo::in_place_bytes)
      .def_prop_ro("seconds", &SecondsDict)
      .def_prop_ro("engine",
                   [](const fastpersist::SaveInfo& info) {
                     return std::string(fastpersist::EngineName(info.engine));
                   })
      .def_ro("engine_reason", &fastpersist::SaveInfo::engine_reason)
      .def_ro("direct", &fastpersist::SaveInfo::direct)
      .def_ro("warning", &fastpersist::SaveInfo::warning);

  m.def("options", &MakeOptions, nb::arg("engine"), nb::arg("block_bytes").none(),
        nb::arg("queue_depth").none(), nb::arg("staging_bytes").none(), nb::arg("direct"),
        nb::arg("sync"), nb::arg("atomic"), nb::arg("retries"));
  m.def(
      "torch_stream",
      [](const nb::list& records, const std::string& prefix, std::uint64_t alignment) {
        const auto converted = ToRecords(records);
        return std::make_shared<Stream>(Unwrap(fastpersist::layout::LayOutTorchContainer(
            converted, {.prefix = prefix, .alignment = alignment})));
      },
      nb::arg("records"), nb::arg("prefix"), nb::arg("alignment"));
  m.def(
      "safetensors_stream",
      [](const std::vector<TensorTuple>& tensors,
         const std::map<std::string, std::string>& metadata) {
        std::vector<fastpersist::layout::SafetensorsEntry> entries;
        for (const auto& [name, dtype, shape, address, size] : tensors) {
          entries.push_back(
              {.name = name, .dtype = dtype, .shape = shape, .body = View(address, size)});
        }
        return std::make_shared<Stream>(
            Unwrap(fastpersist::layout::LayOutSafetensors(std::move(entries), metadata)));
      },
      nb::arg("tensors"), nb::arg("metadata"));
  using fastpersist::python::TorchTypes;
  nb::class_<TorchTypes>(m, "TorchTypes")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::dict>(),
           nb::arg("tensor"), nb::arg("parameter"), nb::arg("rebuild_tensor"),
           nb::arg("rebuild_parameter"), nb::arg("strided"), nb::arg("storage_kinds"));
  m.def("pickle_state", &fastpersist::python::PickleState, nb::arg("state").none(),
        nb::arg("types"), nb::arg("compact"));
  m.def("archive_prefix", [](const nb::bytes& path) {
    return fastpersist::layout::ArchivePrefix({path.c_str(), path.size()});
  });
  m.def("save", &Save, nb::arg("stream"), nb::arg("path"), nb::arg("options"));
}
