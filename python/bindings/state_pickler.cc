// SPDX-License-Identifier: Apache-2.0
#include "state_pickler.h"

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "layout/pickle_opcodes.h"
#include "storages.h"
#include "tensor_access.h"

namespace fastpersist::python {
namespace {

namespace nb = nanobind;
using layout::PickleOpcodes;

// Deeper nesting is left to CPython's pickler, which knows the interpreter's recursion limit.
constexpr int kMaxDepth = 200;

class StatePickler {
 public:
  StatePickler(const TorchTypes& types, Storages& storages) : types_(types), storages_(storages) {
    // The same objects that torch's source uses: CPython interns identifier-like constants.
    storage_word_ = nb::steal(PyUnicode_InternFromString("storage"));
    cpu_word_ = nb::steal(PyUnicode_InternFromString("cpu"));
    ordered_dict_ = nb::module_::import_("collections").attr("OrderedDict");
  }

  std::string Pickle(nb::handle state) && {
    Save(state, 0);
    return std::move(out_).Finish();
  }

 private:
  void Save(nb::handle object, int depth) {
    PyObject* const p = object.ptr();
    if (p == Py_None) return out_.None();
    if (p == Py_True || p == Py_False) return out_.Bool(p == Py_True);
    if (PyLong_CheckExact(p)) return SaveInt(p);
    if (PyFloat_CheckExact(p)) return out_.Float(PyFloat_AS_DOUBLE(p));
    if (const auto known = memo_.find(p); known != memo_.end()) return out_.Get(known->second);
    if (PyUnicode_CheckExact(p)) return SaveText(p);
    if (depth > kMaxDepth) throw Unusual{"containers nested very deeply"};
    SaveComposite(object, depth);
  }

  // Python code may run while a state is pickled (signal handlers, torch function modes) and change
  // it: what is at work or known by its address is held, and a container that changes ends the
  // attempt.
  void SaveComposite(nb::handle object, int depth) {
    const nb::object held = nb::borrow(object);
    PyObject* const p = object.ptr();
    const nb::handle type = object.type();
    if (type.is(types_.tensor)) {
      SaveTensor(object);
      Remember(p);
    } else if (type.is(types_.parameter)) {
      SaveParameter(object);
    } else if (PyDict_CheckExact(p)) {
      SaveDict(p, depth);
    } else if (PyList_CheckExact(p)) {
      SaveList(p, depth);
    } else if (PyTuple_CheckExact(p)) {
      SaveTuple(p, depth);
    } else if (type.is(ordered_dict_)) {
      SaveOrderedDict(object, depth);
    } else {
      throw Unusual{std::string("an object of type ") + Py_TYPE(p)->tp_name};
    }
  }

  // Objects that live as long as the state: known again by their address.
  void Remember(PyObject* object) {
    alive_.push_back(nb::borrow(object));  // an address must not be used again while it is known
    memo_.emplace(object, out_.Put());
  }

  void SaveInt(PyObject* object) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) throw Unusual{"an integer beyond 64 bits"};
    out_.Int(value);
  }

  void SaveText(PyObject* object) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) {
      PyErr_Clear();
      throw Unusual{"a string with lone surrogates"};
    }
    if (size > Py_ssize_t{0xFFFFFFFF}) throw Unusual{"a string beyond 4 GiB"};
    out_.Unicode({text, static_cast<std::size_t>(size)});
    Remember(object);
  }

  void SaveGlobal(nb::handle object, std::string_view module, std::string_view name) {
    if (const auto known = memo_.find(object.ptr()); known != memo_.end()) {
      return out_.Get(known->second);
    }
    out_.Global(module, name);
    Remember(object.ptr());
  }

  void SaveDict(PyObject* dict, int depth) {
    out_.EmptyDict();
    Remember(dict);
    SaveExactItems(dict, depth);
  }

  // A full last batch is followed by an empty one: _pickle.c, batch_dict_exact.
  void SaveExactItems(PyObject* dict, int depth) {
    const Py_ssize_t size = PyDict_GET_SIZE(dict);
    if (size == 0) return;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t at = 0;
    if (size == 1) {
      PyDict_Next(dict, &at, &key, &value);
      SavePair(key, value, depth);
      return out_.SetItem();
    }
    std::size_t in_batch = 0;
    do {
      in_batch = 0;
      out_.Mark();
      while (in_batch < PickleOpcodes::kBatch && PyDict_Next(dict, &at, &key, &value) != 0) {
        SavePair(key, value, depth);
        ++in_batch;
      }
      out_.SetItems();
      if (PyDict_GET_SIZE(dict) != size) throw Unusual{"a dict that changed meanwhile"};
    } while (in_batch == PickleOpcodes::kBatch);
  }

  void SavePair(nb::handle key, nb::handle value, int depth) {
    const nb::object held_key = nb::borrow(key);
    const nb::object held_value = nb::borrow(value);
    Save(key, depth + 1);
    Save(value, depth + 1);
  }

  void SaveList(PyObject* list, int depth) {
    out_.EmptyList();
    Remember(list);
    const Py_ssize_t size = PyList_GET_SIZE(list);
    if (size == 1) {
      Save(PyList_GET_ITEM(list, 0), depth + 1);
      return out_.Append();
    }
    for (Py_ssize_t at = 0; at < size;) {
      out_.Mark();
      for (std::size_t i = 0; i < PickleOpcodes::kBatch && at < size; ++i, ++at) {
        if (PyList_GET_SIZE(list) != size) throw Unusual{"a list that changed meanwhile"};
        Save(PyList_GET_ITEM(list, at), depth + 1);
      }
      out_.Appends();
    }
  }

  void SaveTuple(PyObject* tuple, int depth) {
    const Py_ssize_t size = PyTuple_GET_SIZE(tuple);
    if (size == 0) return out_.EmptyTuple();
    if (size > 3) out_.Mark();
    for (Py_ssize_t i = 0; i < size; ++i) Save(PyTuple_GET_ITEM(tuple, i), depth + 1);
    // A tuple that contains itself through a list was written while its items were.
    if (const auto known = memo_.find(tuple); known != memo_.end()) {
      if (size > 3) out_.PopMark();
      for (Py_ssize_t i = 0; size <= 3 && i < size; ++i) out_.Pop();
      return out_.Get(known->second);
    }
    out_.Tuple(static_cast<std::size_t>(size));
    Remember(tuple);
  }

  void SaveEmptyOrderedDict() {
    SaveGlobal(ordered_dict_, "collections", "OrderedDict");
    out_.EmptyTuple();
    out_.Reduce();
  }

  // Through its __reduce__: the items come from an iterator, attributes are its state.
  void SaveOrderedDict(nb::handle object, int depth) {
    const auto reduced = nb::cast<nb::tuple>(object.attr("__reduce__")());
    SaveEmptyOrderedDict();
    Remember(object.ptr());
    SaveIteratedItems(nb::iter(reduced[4]), depth);
    const nb::handle state = reduced[2];
    if (state.is_none()) return;
    if (!PyDict_CheckExact(state.ptr())) throw Unusual{"an OrderedDict with unusual attributes"};
    if (const auto known = memo_.find(state.ptr()); known != memo_.end()) {
      out_.Get(known->second);
    } else {
      SaveDict(state.ptr(), depth + 1);
    }
    out_.Build();
  }

  // _pickle.c, batch_dict: a single item is set by itself, in the last batch too.
  void SaveIteratedItems(nb::iterator items, int depth) {
    std::optional<nb::object> next = Next(items);
    std::size_t in_batch = 0;
    do {
      if (!next) return;
      const nb::object first = *std::exchange(next, Next(items));
      if (!next) {
        SaveItem(first, depth);
        return out_.SetItem();
      }
      out_.Mark();
      SaveItem(first, depth);
      in_batch = 1;
      while (next) {
        SaveItem(*next, depth);
        ++in_batch;
        next = Next(items);
        if (in_batch == PickleOpcodes::kBatch) break;
      }
      out_.SetItems();
    } while (in_batch == PickleOpcodes::kBatch);
  }

  static std::optional<nb::object> Next(nb::iterator& items) {
    PyObject* item = PyIter_Next(items.ptr());
    if (item == nullptr) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      return std::nullopt;
    }
    return nb::steal(item);
  }

  void SaveItem(nb::handle pair, int depth) {
    SavePair(PyTuple_GET_ITEM(pair.ptr(), 0), PyTuple_GET_ITEM(pair.ptr(), 1), depth);
  }

  void SaveParameter(nb::handle parameter) {
    RefusePythonState(parameter, names_);
    SaveGlobal(types_.rebuild_parameter, "torch._utils", "_rebuild_parameter");
    SaveTensor(parameter.attr(names_.data));
    out_.Put();  // the tensor above is a temporary
    out_.Bool(IsTrue(parameter, names_.requires_grad));
    SaveEmptyOrderedDict();
    out_.Put();
    out_.Tuple(3);
    out_.Put();
    out_.Reduce();
    Remember(parameter.ptr());
  }

  // Leaves the tensor on the stack; the caller numbers it.
  void SaveTensor(nb::handle tensor) {
    const nb::object dtype = tensor.attr(names_.dtype);
    PyObject* kind = PyDict_GetItem(types_.storage_kinds.ptr(), dtype.ptr());
    if (kind == nullptr) throw Unusual{"a tensor of an unusual type"};
    RefuseUnusual(tensor, types_, names_);
    const auto item_size = nb::cast<std::uint64_t>(nb::handle(PyTuple_GET_ITEM(kind, 1)));
    const nb::object size = Call(tensor, names_.size);
    const nb::object stride = Call(tensor, names_.stride);
    const Place place = PlaceTensor(tensor, dtype, item_size, size, stride);

    SaveGlobal(types_.rebuild_tensor, "torch._utils", "_rebuild_tensor_v2");
    out_.Mark();
    SavePersistentId(PyTuple_GET_ITEM(kind, 0), place, item_size);
    out_.Int(static_cast<std::int64_t>(place.offset));
    SaveTemporaryInts(size);
    SaveTemporaryInts(stride);
    out_.Bool(IsTrue(tensor, names_.requires_grad));
    SaveEmptyOrderedDict();  // hooks are not saved
    out_.Put();
    out_.Tuple(6);
    out_.Put();
    out_.Reduce();
  }

  Place PlaceTensor(nb::handle tensor, const nb::object& dtype, std::uint64_t item_size,
                    nb::handle size, nb::handle stride) {
    const nb::object owner = Call(tensor, names_.untyped_storage);
    const auto identity = nb::cast<std::uint64_t>(owner.attr(names_.cdata));
    Storage* storage = storages_.Find(identity);
    if (storage == nullptr) {
      const auto bytes = nb::cast<std::uint64_t>(Call(owner, names_.nbytes));
      const auto address = bytes == 0 ? 0 : nb::cast<std::uintptr_t>(Call(owner, names_.data_ptr));
      storage = storages_.Add(identity,
                              {.owner = owner, .dtype = dtype, .address = address, .size = bytes});
      if (storage == nullptr) throw Unusual{"memory that is seen as two types"};
    } else if (storage->address != 0 && !storage->dtype.is(dtype)) {
      throw Unusual{"memory that is seen as two types"};
    }
    const auto offset = nb::cast<std::uint64_t>(Call(tensor, names_.storage_offset));
    const std::uint64_t begin = offset * item_size;
    const ByteRange range{begin, begin + Span(size, stride) * item_size};
    if (!storages_.compact()) storage->ranges.push_back(range);
    const Place place = storages_.PlaceOf(identity, range, item_size);
    // A storage that was shrunk (resize_(0)) under a tensor, or swapped between two passes.
    if (range.first < range.second &&
        place.offset * item_size + (range.second - range.first) > place.body->size) {
      throw Unusual{"a tensor that reaches beyond its storage"};
    }
    return place;
  }

  void SavePersistentId(nb::handle storage_class, const Place& place, std::uint64_t item_size) {
    out_.Mark();
    Save(storage_word_, 0);
    const nb::str name = nb::cast<nb::str>(storage_class.attr("__name__"));
    SaveGlobal(storage_class, "torch", name.c_str());
    Save(place.body->key, 0);
    Save(cpu_word_, 0);
    out_.Int(static_cast<std::int64_t>(place.body->size / item_size));
    out_.Tuple(5);
    out_.Put();
    out_.PersistentId();
  }

  // A tuple of ints that torch makes anew each time.
  void SaveTemporaryInts(nb::handle tuple) {
    const Py_ssize_t size = PyTuple_GET_SIZE(tuple.ptr());
    if (size == 0) return out_.EmptyTuple();
    if (size > 3) out_.Mark();
    for (Py_ssize_t i = 0; i < size; ++i) SaveInt(PyTuple_GET_ITEM(tuple.ptr(), i));
    out_.Tuple(static_cast<std::size_t>(size));
    out_.Put();
  }

  const TorchTypes& types_;
  Storages& storages_;
  TensorNames names_;
  nb::object storage_word_;
  nb::object cpu_word_;
  nb::object ordered_dict_;
  PickleOpcodes out_;
  std::unordered_map<PyObject*, std::uint32_t> memo_;
  std::vector<nb::object> alive_;  // everything in memo_
};

}  // namespace

nb::object PickleState(nb::handle state, const TorchTypes& types, bool compact) {
  Storages storages;
  try {
    std::string pickle = StatePickler(types, storages).Pickle(state);
    const std::uint64_t referenced = storages.ReferencedBytes();
    if (compact) {
      storages.Compact();
      pickle = StatePickler(types, storages).Pickle(state);
    }
    return nb::make_tuple(nb::bytes(pickle.data(), pickle.size()), storages.Records(),
                          storages.Owners(), referenced);
  } catch (const Unusual& unusual) {
    return nb::str(unusual.what.c_str());
  }
}

}  // namespace fastpersist::python
