// SPDX-License-Identifier: Apache-2.0
#include "arena_memory.h"

#include <nanobind/stl/shared_ptr.h>

#include "errors.h"

namespace nb = nanobind;

namespace fastpersist::python {
namespace {

// bytearray, numpy and torch may write: the memory is private.
int GetBuffer(PyObject* self, Py_buffer* view, int flags) {
  const std::span<std::byte> memory = nb::inst_ptr<ArenaView>(self)->memory();
  return PyBuffer_FillInfo(view, self, memory.data(), static_cast<Py_ssize_t>(memory.size()),
                           /*readonly=*/0, flags);
}

PyType_Slot view_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(GetBuffer)}, {0, nullptr}};

std::shared_ptr<SharedArena> MakeArena(std::uint64_t size) {
  auto shared = std::make_shared<SharedArena>();
  shared->arena = Unwrap(memory::Arena::Create(size));
  return shared;
}

ArenaView* ViewOf(const std::shared_ptr<SharedArena>& shared, std::uint64_t offset,
                  std::uint64_t size) {
  const std::uint64_t all = shared->arena.memory().size();
  if (offset > all || size > all - offset) {
    throw nb::index_error("the view does not lie within the arena");
  }
  return new ArenaView(shared, offset, size);
}

// All of it, writable. Keeps the arena alive, but no page from being given back.
nb::object MemoryviewOf(const std::shared_ptr<SharedArena>& shared) {
  const nb::object view =
      nb::cast(new ArenaView(shared, 0, shared->arena.memory().size(), /*owns=*/false),
               nb::rv_policy::take_ownership);
  PyObject* memoryview = PyMemoryView_FromObject(view.ptr());
  if (memoryview == nullptr) throw nb::python_error();
  return nb::steal(memoryview);
}

}  // namespace

void BindArena(nb::module_& m) {
  nb::class_<ArenaView>(m, "ArenaView", nb::type_slots(view_slots));
  nb::class_<SharedArena>(m, "Arena")
      .def_prop_ro("size", [](const SharedArena& shared) { return shared.arena.memory().size(); })
      .def("view", &ViewOf, nb::arg("offset"), nb::arg("size"), nb::rv_policy::take_ownership)
      .def("memoryview", &MemoryviewOf)
      .def("let_go", [](SharedArena& shared) { shared.releasable = true; });
  m.def("arena", &MakeArena, nb::arg("size"));
}

}  // namespace fastpersist::python
