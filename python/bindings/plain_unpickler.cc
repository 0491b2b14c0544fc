// SPDX-License-Identifier: Apache-2.0
#include "plain_unpickler.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace fastpersist::python {
namespace {

using layout::Contents;
using layout::kNoNode;
using layout::NodeId;
using layout::PickleNode;
using layout::PickleStorage;
using layout::PickleTensor;
using layout::PickleTree;
using Kind = PickleNode::Kind;

// Deeper states are left to torch's unpickler, which keeps a stack of its own.
constexpr unsigned kMaxDepth = 500;
// What torch's CPU memory is aligned to; its kernels may rely on it.
constexpr std::uint64_t kTorchAlignment = 64;

// Ends the attempt; carries the reason.
struct NotPlain {
  std::string reason;
};

nb::object Checked(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

nb::object Call(nb::handle function, std::initializer_list<PyObject*> arguments) {
  return Checked(PyObject_Vectorcall(function.ptr(), arguments.begin(), arguments.size(), nullptr));
}

nb::object CallMethod(nb::handle object, nb::handle name, std::vector<PyObject*> arguments = {}) {
  arguments.insert(arguments.begin(), object.ptr());
  return Checked(
      PyObject_VectorcallMethod(name.ptr(), arguments.data(), arguments.size(), nullptr));
}

nb::object IntTuple(std::span<const std::int64_t> values) {
  nb::object tuple = Checked(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
  for (std::size_t i = 0; i < values.size(); ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i),
                     Checked(PyLong_FromLongLong(values[i])).release().ptr());
  }
  return tuple;
}

class Unpickler {
 public:
  Unpickler(const Contents& contents, std::shared_ptr<const SharedArena> arena,
            const TorchMakers& makers, bool any_location)
      : contents_(contents),
        tree_(contents.tree),
        arena_(std::move(arena)),
        makers_(makers),
        any_location_(any_location),
        built_(contents.tree.nodes.size()),
        building_(contents.tree.nodes.size()),
        frombuffer_names_(nb::make_tuple("dtype")) {
    storages_.reserve(contents.storages.size());
    for (std::size_t i = 0; i < contents.storages.size(); ++i) {
      storages_.emplace(contents.storages[i].name, StorageInUse{.index = i});
    }
  }

  nb::object Run() { return Build(tree_.root); }

 private:
  // A storage of the file, and the first tensor that was made of it.
  struct StorageInUse {
    std::size_t index = 0;
    std::string_view type;  // as the pickle called it first
    nb::object tensor;
    nb::object storage;
  };

  nb::object Build(NodeId id) {
    if (id == kNoNode) throw NotPlain{"the pickle has a hole"};
    if (built_[id].is_valid()) return built_[id];
    if (building_[id]) throw NotPlain{"a tuple contains itself"};
    if (++depth_ > kMaxDepth) throw NotPlain{"containers are nested deeply"};
    building_[id] = true;
    nb::object object = Make(id, tree_.at(id));
    building_[id] = false;
    --depth_;
    built_[id] = object;
    return object;
  }

  nb::object Make(NodeId id, const PickleNode& node) {
    switch (node.kind) {
      case Kind::kNone:
        return nb::none();
      case Kind::kBool:
        return nb::bool_(node.integer != 0);
      case Kind::kInt:
        return Checked(PyLong_FromLongLong(node.integer));
      case Kind::kBigInt:
        return Checked(PyLong_FromString(node.text.c_str(), nullptr, 10));
      case Kind::kFloat:
        return Checked(PyFloat_FromDouble(node.real));
      case Kind::kText:
        return Checked(PyUnicode_DecodeUTF8(
            node.text.data(), static_cast<Py_ssize_t>(node.text.size()), "surrogatepass"));
      case Kind::kList:
        return MakeList(id, node);
      case Kind::kTuple:
        return MakeTuple(node);
      case Kind::kSize:
        return Call(makers_.size, {MakeTuple(node).ptr()});
      case Kind::kDict:
        built_[id] = Checked(PyDict_New());
        FillDict(built_[id], node);
        return built_[id];
      case Kind::kOrderedDict:
        return MakeOrderedDict(id, node);
      case Kind::kTensor:
        return MakeTensor(node);
      case Kind::kParameter:
        return MakeParameter(node);
      default:
        throw NotPlain{"there is more than plain containers, numbers, text and tensors"};
    }
  }

  nb::object MakeList(NodeId id, const PickleNode& node) {
    built_[id] = Checked(PyList_New(0));
    for (const NodeId item : node.items) {
      if (PyList_Append(built_[id].ptr(), Build(item).ptr()) != 0) throw nb::python_error();
    }
    return built_[id];
  }

  nb::object MakeTuple(const PickleNode& node) {
    std::vector<nb::object> items;
    items.reserve(node.items.size());
    for (const NodeId item : node.items) items.push_back(Build(item));
    nb::object tuple = Checked(PyTuple_New(static_cast<Py_ssize_t>(items.size())));
    for (std::size_t i = 0; i < items.size(); ++i) {
      PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), items[i].release().ptr());
    }
    return tuple;
  }

  void FillDict(const nb::object& dict, const PickleNode& node) {
    for (std::size_t i = 0; i + 1 < node.items.size(); i += 2) {
      const nb::object key = Build(node.items[i]);
      const nb::object value = Build(node.items[i + 1]);
      if (PyObject_SetItem(dict.ptr(), key.ptr(), value.ptr()) != 0) throw nb::python_error();
    }
  }

  nb::object MakeOrderedDict(NodeId id, const PickleNode& node) {
    built_[id] = Call(makers_.ordered_dict, {});
    FillDict(built_[id], node);
    if (node.attributes != kNoNode) {
      const nb::object attributes = Build(node.attributes);
      if (!PyDict_CheckExact(attributes.ptr()))
        throw NotPlain{"an OrderedDict has a strange state"};
      built_[id].attr("__dict__").attr("update")(attributes);
    }
    return built_[id];
  }

  nb::object MakeTensor(const PickleNode& node) {
    const PickleTensor& tensor = tree_.tensors[node.detail];
    if (node.attributes != kNoNode || tensor.metadata != kNoNode) {
      throw NotPlain{"a tensor has attributes"};
    }
    const PickleStorage& storage = tree_.storages[tree_.at(tensor.storage).detail];
    const nb::object dtype = DtypeOf(tensor, storage);
    nb::object made = View(tensor, storage, dtype);
    if (tensor.requires_grad) made.attr("requires_grad") = true;
    made.attr("_backward_hooks") = Build(tensor.hooks);
    return made;
  }

  nb::object MakeParameter(const PickleNode& node) {
    if (node.attributes != kNoNode || node.items.empty() ||
        tree_.at(node.items[0]).kind != Kind::kTensor) {
      throw NotPlain{"a parameter has attributes"};
    }
    const PickleTensor& tensor = tree_.tensors[node.detail];
    return Call(makers_.rebuild_parameter,
                {Build(node.items[0]).ptr(), tensor.requires_grad ? Py_True : Py_False,
                 Build(tensor.hooks).ptr()});
  }

  // The type of the elements: of the storage, unless the tensor says it (_rebuild_tensor_v3).
  nb::object DtypeOf(const PickleTensor& tensor, const PickleStorage& storage) {
    const std::string& name = tensor.dtype.empty() ? storage.type : tensor.dtype;
    const auto known = dtypes_.find(name);
    if (known != dtypes_.end()) return known->second;
    nb::object dtype;
    if (!storage.type.starts_with("torch ") && !storage.type.starts_with("torch.storage ")) {
      throw NotPlain{"a storage is of a class that is not torch's"};
    }
    if (tensor.dtype.empty()) {
      const std::string class_name = storage.type.substr(storage.type.find(' ') + 1);
      dtype = nb::borrow(PyDict_GetItemString(makers_.storage_dtypes.ptr(), class_name.c_str()));
    } else {
      dtype = nb::getattr(makers_.torch, name.c_str(), nb::handle());
    }
    if (!dtype.is_valid() || Py_TYPE(dtype.ptr()) != dtype_type_) {
      throw NotPlain{"the type " + name + " is not known"};
    }
    dtypes_.emplace(name, dtype);
    return dtype;
  }

  nb::object View(const PickleTensor& tensor, const PickleStorage& storage,
                  const nb::object& dtype) {
    if (!any_location_ && storage.location != "cpu")
      throw NotPlain{"a tensor is of another device"};
    const auto at = storages_.find("data/" + storage.key);
    if (at == storages_.end()) throw NotPlain{"a storage is missing"};
    const layout::StoredStorage& stored = contents_.storages[at->second.index];
    if (stored.size == 0) {  // never shared: each has a storage of its own, as in torch
      const nb::object made = EmptyTensor(dtype);
      return Set(made, Call(makers_.untyped_storage, {nb::int_(0).ptr()}), tensor);
    }
    StorageInUse& in_use = at->second;
    if (in_use.type.empty()) in_use.type = storage.type;
    if (in_use.type != storage.type) throw NotPlain{"a storage has two types"};
    if (!in_use.tensor.is_valid()) {
      in_use.tensor = FromBuffer(stored, dtype);
      nb::object first = in_use.tensor;
      // Mostly a one-dimensional tensor of the whole storage, or the only one of it.
      if (IsWhole(tensor, stored, first)) return first;
      in_use.storage = CallMethod(first, untyped_storage_name_);
      return Set(first, in_use.storage, tensor);
    }
    if (!in_use.storage.is_valid()) {
      in_use.storage = CallMethod(in_use.tensor, untyped_storage_name_);
    }
    return Set(EmptyTensor(dtype), in_use.storage, tensor);
  }

  // A new tensor over the storage's part of the arena, or over a copy where torch would not find
  // the alignment that it is used to.
  nb::object FromBuffer(const layout::StoredStorage& stored, const nb::object& dtype) {
    auto view = std::make_unique<ArenaView>(arena_, stored.offset, stored.size);
    nb::object memory = nb::cast(view.release(), nb::rv_policy::take_ownership);
    const bool aligned = stored.offset % kTorchAlignment == 0;
    PyObject* arguments[] = {memory.ptr(), dtype.ptr()};
    nb::object tensor = Checked(
        PyObject_Vectorcall(makers_.frombuffer.ptr(), arguments, 1, frombuffer_names_.ptr()));
    return aligned ? tensor : nb::object(tensor.attr("clone")());
  }

  [[nodiscard]] static bool IsWhole(const PickleTensor& tensor, const layout::StoredStorage& stored,
                                    const nb::object& made) {
    if (tensor.shape.size() != 1 || tensor.offset != 0 || tensor.strides[0] != 1) return false;
    return PyObject_Size(made.ptr()) == tensor.shape[0] && stored.size > 0;
  }

  nb::object EmptyTensor(const nb::object& dtype) {
    PyObject* arguments[] = {empty_shape_.ptr(), dtype.ptr()};
    return Checked(PyObject_Vectorcall(makers_.empty.ptr(), arguments, 1, frombuffer_names_.ptr()));
  }

  nb::object Set(const nb::object& made, const nb::object& storage, const PickleTensor& tensor) {
    const nb::object offset = Checked(PyLong_FromLongLong(tensor.offset));
    const nb::object shape = IntTuple(tensor.shape);
    const nb::object strides = IntTuple(tensor.strides);
    return CallMethod(made, set_name_, {storage.ptr(), offset.ptr(), shape.ptr(), strides.ptr()});
  }

  const Contents& contents_;
  const PickleTree& tree_;
  std::shared_ptr<const SharedArena> arena_;
  const TorchMakers& makers_;
  bool any_location_;
  std::vector<nb::object> built_;
  std::vector<bool> building_;
  unsigned depth_ = 0;
  std::unordered_map<std::string, StorageInUse> storages_;
  std::unordered_map<std::string, nb::object> dtypes_;
  nb::tuple frombuffer_names_;
  nb::object empty_shape_ = nb::make_tuple(0);
  nb::object untyped_storage_name_ = nb::str("untyped_storage");
  nb::object set_name_ = nb::str("set_");
  // The class torch.dtype.
  PyTypeObject* dtype_type_ =
      Py_TYPE(PyDict_GetItemString(makers_.storage_dtypes.ptr(), "UntypedStorage"));
};

}  // namespace

bool LooksPlain(const PickleTree& tree, bool any_location) {
  if (tree.opaque) return false;
  return any_location || std::ranges::all_of(tree.storages, [](const PickleStorage& storage) {
           return storage.location == "cpu";
         });
}

nb::object UnpicklePlain(const Contents& contents, const std::shared_ptr<const SharedArena>& arena,
                         const TorchMakers& makers, bool any_location) {
  try {
    return nb::make_tuple(Unpickler(contents, arena, makers, any_location).Run());
  } catch (const NotPlain& why) {
    return nb::str(why.reason.c_str());
  }
}

}  // namespace fastpersist::python
