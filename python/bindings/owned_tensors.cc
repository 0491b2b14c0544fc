// SPDX-License-Identifier: Apache-2.0
#include "owned_tensors.h"

#include "tensor_access.h"

namespace nb = nanobind;

namespace fastpersist::python {
namespace {

struct Names {
  nb::str nbytes{"nbytes"}, is_cpu{"is_cpu"}, is_contiguous{"is_contiguous"};
  nb::str untyped_storage{"untyped_storage"}, data_ptr{"data_ptr"}, is_shared{"is_shared"};
  nb::str is_inference{"is_inference"}, version{"_version"};
};

bool Is(const nb::object& object) { return object.ptr() == Py_True; }

void AddOwned(nb::handle tensor, std::uint64_t least_bytes, nb::handle is_dense, const Names& names,
              nb::list& found) {
  const nb::object size = tensor.attr(names.nbytes);
  if (nb::cast<std::uint64_t>(size) < least_bytes || !IsTrue(tensor, names.is_cpu)) return;
  // Of sparse tensors is_contiguous may raise, and so may data_ptr.
  if (!Is(Call(tensor, names.is_contiguous)) && !nb::cast<bool>(is_dense(tensor))) return;
  const nb::object storage = Call(tensor, names.untyped_storage);
  const nb::object address = Call(tensor, names.data_ptr);
  // Other processes do not ask before they write.
  if (nb::cast<std::uint64_t>(address) == 0 || Is(Call(storage, names.is_shared))) return;
  const bool counted = !Is(Call(tensor, names.is_inference));
  found.append(nb::make_tuple(tensor, storage, address, size,
                              counted ? tensor.attr(names.version) : nb::none()));
}

}  // namespace

nb::list OwnedTensors(const nb::list& tensors, std::uint64_t least_bytes, nb::handle is_dense) {
  const Names names;
  nb::list found;
  for (const nb::handle item : tensors) {
    const nb::object tensor = nb::borrow(item);  // Python code may run and change the list
    try {
      AddOwned(tensor, least_bytes, is_dense, names, found);
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_RuntimeError) && !error.matches(PyExc_TypeError)) throw;
    }
  }
  return found;
}

}  // namespace fastpersist::python
