// SPDX-License-Identifier: Apache-2.0
// Every wait and every copy happens without the GIL. C++ threads never take it: what belongs to
// Python (the storages that are read) is held by Python until a ticket is done, and references to
// Python objects that C++ held are dropped by the next caller that has it.
#include "overlap.h"

#include <fcntl.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/fork_guard.h"
#include "base/unique_fd.h"
#include "checkpoint/checkpoint_writer.h"
#include "directory.h"
#include "errors.h"
#include "file/file_ops.h"
#include "memory/arena.h"
#include "owned_tensors.h"
#include "save_seconds.h"
#include "storage_cells.h"
#include "unlocked.h"

namespace nb = nanobind;

namespace fastpersist::python {
namespace {

using checkpoint::CheckpointTicket;
using checkpoint::CheckpointWriter;
using checkpoint::Clock;
using layout::Extent;
using layout::Stream;

constexpr std::uint64_t kCopyAlign = 64;

// A wait of that many seconds; no deadline when it is None.
Clock::time_point Deadline(std::optional<double> seconds) {
  constexpr double kForever = 1e9;
  const double wait = std::min(seconds.value_or(kForever), kForever);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                            std::chrono::duration<double>(std::max(wait, 0.0)));
}

// One bounded piece of memory for copies of what cannot be read in place. It is touched as it is
// used and kept, so that it does not grow from save to save. Used by one save at a time.
class CapturePool {
 public:
  explicit CapturePool(std::uint64_t bytes)
      : arena_(Unwrap(memory::Arena::Create(std::max<std::uint64_t>(bytes, 1)))), size_(bytes) {}

  void Reset() { used_ = 0; }

  // The address of a copy of each piece (address, bytes), in order, as far as there is room; 0 from
  // the first on that does not fit.
  std::vector<std::uintptr_t> Copy(
      const std::vector<std::pair<std::uintptr_t, std::uint64_t>>& pieces) {
    const nb::gil_scoped_release unlocked;
    std::vector<std::uintptr_t> copies;
    copies.reserve(pieces.size());
    bool room = true;
    for (const auto& [address, bytes] : pieces) {
      const std::uint64_t at = base::AlignUp(used_, kCopyAlign);
      room = room && at <= size_ && bytes <= size_ - at;
      if (!room) {
        copies.push_back(0);
        continue;
      }
      std::byte* const copy = arena_.memory().data() + at;
      std::memcpy(copy, reinterpret_cast<const void*>(address), bytes);
      copies.push_back(reinterpret_cast<std::uintptr_t>(copy));
      used_ = at + bytes;
    }
    return copies;
  }

  [[nodiscard]] std::uint64_t size() const { return size_; }
  [[nodiscard]] std::uint64_t used() const { return used_; }
  [[nodiscard]] std::span<std::byte> Spare() const {
    const std::uint64_t at = std::min(base::AlignUp(used_, kCopyAlign), size_);
    return arena_.memory().subspan(at, size_ - at);
  }

 private:
  memory::Arena arena_;
  std::uint64_t size_;
  std::uint64_t used_ = 0;
};

// References to Python objects that C++ needs no longer. Whoever drops one must have the GIL, and a
// thread that writes may hold a lock for which somebody waits who has it.
class Released {
 public:
  void Add(PyObject* object) {
    const std::scoped_lock lock(mutex_);
    objects_.push_back(object);
  }
  // Precondition: the caller has the GIL.
  void Drop() {
    std::vector<PyObject*> objects;
    {
      const std::scoped_lock lock(mutex_);
      objects.swap(objects_);
    }
    for (PyObject* const object : objects) Py_DECREF(object);
  }

 private:
  std::mutex mutex_;
  std::vector<PyObject*> objects_;
};

Released& TheReleased() {
  // Never destroyed: threads may write to the very end of the process.
  static auto* const released = new Released;
  return *released;
}

// Shares the C++ side of a Python object with threads that never take the GIL.
template <class T>
std::shared_ptr<T> Share(nb::object object) {
  T* const shared = nb::cast<T*>(object);
  PyObject* const owner = object.release().ptr();
  return {shared, [owner](const T*) { TheReleased().Add(owner); }};
}

std::optional<StorageLayout>& LearntLayout() {
  static std::optional<StorageLayout> layout;
  return layout;
}

bool LearnLayout(
    const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::uint64_t>>& storages) {
  std::vector<KnownStorage> known;
  for (const auto& [identity, address, size] : storages) known.push_back({identity, address, size});
  LearntLayout() = LearnStorageLayout(known);
  return LearntLayout().has_value();
}

// Address and size that the storage has at this moment, by the learnt layout.
std::pair<std::uintptr_t, std::uint64_t> PeekStorage(std::uintptr_t identity) {
  const auto layout = LearntLayout();
  if (!layout) return {0, 0};
  return {*reinterpret_cast<const std::uintptr_t*>(identity + layout->address),
          *reinterpret_cast<const std::uint64_t*>(identity + layout->size)};
}

// (record, name for messages, identity of the storage or 0)
using LiveTuple = std::tuple<std::uint32_t, std::string, std::uintptr_t>;
// (file name, stream, live records)
using StreamTuple = std::tuple<std::string, nb::object, std::vector<LiveTuple>>;

std::vector<pipeline::LiveExtent> LiveExtents(const Stream& stream,
                                              const std::vector<LiveTuple>& live) {
  constexpr std::size_t kNone = SIZE_MAX;
  std::vector<std::size_t> extent_of(stream.record_count(), kNone);
  for (std::size_t i = 0; i < stream.extents().size(); ++i) {
    const Extent& extent = stream.extents()[i];
    if (extent.kind == Extent::Kind::kMemory && extent.body_of != layout::kNoRecord) {
      extent_of[extent.body_of] = i;
    }
  }
  std::vector<pipeline::LiveExtent> extents;
  for (const auto& [record, name, identity] : live) {
    if (record >= extent_of.size() || extent_of[record] == kNone) continue;  // an empty one
    pipeline::LiveExtent& extent =
        extents.emplace_back(pipeline::LiveExtent{.extent = extent_of[record], .name = name});
    const auto layout = LearntLayout();
    if (identity == 0 || !layout) continue;
    extent.address = reinterpret_cast<const std::uintptr_t*>(identity + layout->address);
    extent.size = reinterpret_cast<const std::uint64_t*>(identity + layout->size);
  }
  std::ranges::sort(extents, {}, &pipeline::LiveExtent::extent);
  return extents;
}

pipeline::VerifySource ParseVerify(const std::string& word) {
  if (word == "off") return pipeline::VerifySource::kOff;
  return word == "full" ? pipeline::VerifySource::kFull : pipeline::VerifySource::kSample;
}

nb::dict ResultDict(const checkpoint::CheckpointInfo& info) {
  nb::dict result;
  result["path"] = ToBytes(info.save.path);
  result["generation"] = info.generation;
  result["step"] = info.step;
  result["sequence"] = info.sequence;
  result["crc"] = info.crc;
  result["bytes"] = info.save.bytes;
  result["in_place_bytes"] = info.save.in_place_bytes;
  result["captured_bytes"] = info.captured_bytes;
  result["engine"] = std::string(EngineName(info.save.engine));
  result["engine_reason"] = info.save.engine_reason;
  result["direct"] = info.save.direct;
  result["warning"] = ToBytes(info.save.warning);
  result["retired"] = info.retired;
  result["seconds"] = SecondsDict(info.save);
  return result;
}

Error GivenUp(const std::string& code, const std::string& detail, const std::string& advice) {
  return {.code = code == "state_changed" ? ErrorCode::kStateChanged : ErrorCode::kAbandoned,
          .operation = "save",
          .detail = detail,
          .advice = advice};
}

class PyWriter {
 public:
  PyWriter(const SharedRoot& root, const Options& options, std::optional<std::uint64_t> keep_last,
           std::optional<std::uint64_t> keep_every)
      : writer_(std::make_unique<CheckpointWriter>(
            root.root, options,
            commit::RetentionPolicy{.keep_last = keep_last, .keep_every = keep_every})) {}

  std::shared_ptr<CheckpointTicket> Submit(std::uint64_t step,
                                           const std::vector<StreamTuple>& streams,
                                           const std::string& metadata, const std::string& verify,
                                           std::uint64_t turn, const nb::object& pool) {
    if (!writer_) throw nb::value_error("the writer is closed");
    TheReleased().Drop();
    const auto spare = Share<CapturePool>(pool);
    checkpoint::CheckpointRequest request{.step = step, .metadata = metadata, .verdict = true};
    for (const auto& [name, object, live] : streams) {
      const auto stream = Share<Stream>(object);
      checkpoint::CheckpointStream& added = request.streams.emplace_back();
      added.name = name;
      added.stream = stream;
      added.memory = {
          .live = LiveExtents(*stream, live),
          .verify = ParseVerify(verify),
          .turn = turn,
          .spare = request.streams.size() == 1 ? spare->Spare() : std::span<std::byte>()};
      added.keep = spare;
    }
    const auto ticket = Unwrap(writer_->Submit(std::move(request)));
    // An exception (KeyboardInterrupt) may come before anybody holds what is returned here. Then
    // nobody gives a verdict, and the thread that writes must not wait for one.
    return {
        ticket.get(), [ticket](CheckpointTicket*) {
          if (!base::CheckNotForked()) return;  // its lock may be held by the parent's thread
          ticket->Reject(GivenUp("abandoned", "nobody holds its ticket any more", "save again"));
        }};
  }

  // Waits for what was submitted.
  void Close() {
    // Taken with the GIL held, as Submit uses it: then neither can meet the other half-way.
    std::unique_ptr<CheckpointWriter> writer = std::move(writer_);
    Unlocked([&writer] { writer.reset(); });
    TheReleased().Drop();
  }

 private:
  std::unique_ptr<CheckpointWriter> writer_;
};

// The alignment that direct writes into this directory want of memory; 1 when they are buffered.
std::uint32_t MemoryAlign(const SharedRoot& root) {
  const auto opened = root.Opened();
  const file::FileOps& files = file::RealFileOps();
  const base::UniqueFd fd(files.Open(opened->fd(), ".", O_TMPFILE | O_WRONLY, 0600));
  if (!fd.valid() || files.SetDirect(fd.get(), true) < 0) return 1;
  const plan::DeviceLimits limits = files.Limits(fd.get());
  return limits.direct ? limits.memory_align : 1;
}

// A reference more, for ever.
void KeepForever(nb::object object) { (void)object.release(); }

void BindTicket(nb::module_& m) {
  nb::class_<CheckpointTicket>(m, "CheckpointTicket")
      .def_prop_ro("step", &CheckpointTicket::step)
      .def_prop_ro("bytes", &CheckpointTicket::bytes)
      .def_prop_ro("written", &CheckpointTicket::written)
      .def_prop_ro(
          "released",
          [](CheckpointTicket& ticket) { return Unlocked([&] { return ticket.released(); }); })
      .def_prop_ro("done", &CheckpointTicket::done)
      .def(
          "wait_released",
          [](CheckpointTicket& ticket, std::optional<double> seconds, bool capture) {
            return Unlocked([&] { return ticket.WaitReleased(Deadline(seconds), capture); });
          },
          nb::arg("seconds").none(), nb::arg("capture"))
      .def(
          "wait_written",
          [](CheckpointTicket& ticket, std::optional<double> seconds) {
            return Unlocked([&] { return ticket.WaitWritten(Deadline(seconds)); });
          },
          nb::arg("seconds").none())
      .def(
          "wait_done",
          [](CheckpointTicket& ticket, std::optional<double> seconds) {
            return Unlocked([&] { return ticket.WaitDone(Deadline(seconds)); });
          },
          nb::arg("seconds").none())
      .def("approve", &CheckpointTicket::Approve)
      .def("reject",
           [](CheckpointTicket& ticket, const std::string& code, const std::string& detail,
              const std::string& advice) { ticket.Reject(GivenUp(code, detail, advice)); })
      .def("abandon",
           [](CheckpointTicket& ticket, const std::string& detail, const std::string& advice) {
             Unlocked([&] { ticket.Abandon(GivenUp("abandoned", detail, advice)); });
           })
      .def("still_the_same",
           [](CheckpointTicket& ticket, const std::vector<std::size_t>& live) {
             return Unlocked([&] { return ticket.gate().StillTheSame(live); });
           })
      .def("result", [](CheckpointTicket& ticket) {
        if (!ticket.done()) throw nb::value_error("the save is not done");
        TheReleased().Drop();
        if (!ticket.result()) Raise(ticket.result().error());
        return ResultDict(*ticket.result());
      });
}

}  // namespace

void BindOverlap(nb::module_& m) {
  nb::class_<CapturePool>(m, "CapturePool")
      .def(nb::init<std::uint64_t>(), nb::arg("bytes"))
      .def("reset", &CapturePool::Reset)
      .def("copy", &CapturePool::Copy, nb::arg("pieces"))
      .def_prop_ro("size", &CapturePool::size)
      .def_prop_ro("used", &CapturePool::used);
  m.def("learn_storage_layout", &LearnLayout, nb::arg("storages"));
  m.def("peek_storage", &PeekStorage, nb::arg("identity"));
  m.def("owned_tensors", &OwnedTensors, nb::arg("tensors"), nb::arg("least_bytes"),
        nb::arg("is_dense"));
  m.def("memory_align", &MemoryAlign, nb::arg("root"));
  m.def("keep_forever", &KeepForever, nb::arg("object").none());
  BindTicket(m);
  nb::class_<PyWriter>(m, "CheckpointWriter")
      .def(nb::init<const SharedRoot&, const Options&, std::optional<std::uint64_t>,
                    std::optional<std::uint64_t>>(),
           nb::arg("root"), nb::arg("options"), nb::arg("keep_last").none(),
           nb::arg("keep_every").none())
      .def("submit", &PyWriter::Submit, nb::arg("step"), nb::arg("streams"), nb::arg("metadata"),
           nb::arg("verify"), nb::arg("turn"), nb::arg("spare"))
      .def("close", &PyWriter::Close);
}

}  // namespace fastpersist::python
