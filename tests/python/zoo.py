# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""The zoo of states: every kind of object that the format tests save, and how to compare two.

`ENTRIES` holds them all; `savable()` and `refused()` select what `torch.save` accepts and rejects,
and `parameters(entries)` wraps a selection for `pytest.mark.parametrize`. `Entry.build()` makes a
new object, deterministically: two builds in one process save to the same bytes. `same(a, b)` and
`difference(a, b)` compare bit by bit, with everything else that a round trip must keep.

States are made of what the installed torch offers (2.4 or later), never of a fixed list of dtypes.
The classes are pickled by reference, so a reader of the files needs `zoo` on its path.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import pathlib
import pickle
import random
import struct
import threading
import types
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

MIB = 1 << 20
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

Builder = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One state: its unique name, how to build it, and what torch itself makes of it."""

    name: str
    builder: Builder
    slow: bool = False  # takes seconds: tens of thousands of tensors
    min_torch: tuple[int, int] = (2, 4)
    refused: type[Exception] | None = None  # torch.save raises it
    unloadable: type[Exception] | None = None  # torch.load raises it for what torch.save wrote
    deviation: str = ""  # part of what `difference` says of the object that torch.load returns

    def build(self) -> Any:
        """Returns a new object, always the same, and leaves torch's random state alone."""
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # experimental dtypes and layouts announce themselves
            torch.manual_seed(zlib.crc32(self.name.encode()))
            return self.builder()

    def __str__(self) -> str:
        return self.name


# --- Classes whose objects are in the states ---


@dataclasses.dataclass
class Metrics:
    loss: float
    histogram: torch.Tensor


class Sample(NamedTuple):
    tokens: torch.Tensor
    label: int


class Phase(enum.Enum):
    WARMUP = 1
    DECAY = "decay"


class Slotted:
    __slots__ = ("scale", "shift")

    def __init__(self) -> None:
        self.scale = torch.ones(3)
        self.shift = 1.5


class TaggedTensor(torch.Tensor):
    """A plain subclass: the storage is the tensor's own."""


class PairTensor(torch.Tensor):
    """A wrapper subclass: it has no storage, its data are two inner tensors."""

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> PairTensor:
        return torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].left, args[0].right)
        raise NotImplementedError(str(func))


class FreshOnGetstate:
    """Its tensor comes into being while it is pickled, and nothing else refers to it."""

    def __init__(self, index: int) -> None:
        self.index, self.loaded = index, None

    def __getstate__(self) -> dict[str, Any]:
        fresh = torch.full((64,), float(self.index)) if self.loaded is None else self.loaded
        return {"index": self.index, "fresh": fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.index, self.loaded = state["index"], state["fresh"]


class FreshOnReduce:
    """As FreshOnGetstate, through __reduce__."""

    def __init__(self, index: int, loaded: torch.Tensor | None = None) -> None:
        self.index, self.loaded = index, loaded

    def __reduce__(self) -> tuple[Any, ...]:
        fresh = torch.full((64,), float(self.index)) if self.loaded is None else self.loaded
        return FreshOnReduce, (self.index, fresh)


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tril(torch.ones(3, 3, dtype=torch.bool)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.embedding(tokens)))
        return logits


# --- Tensors: dtypes ---


def _ramp(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64).to(dtype)


def _noise(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def _raw(data: bytes) -> torch.Tensor:
    """These bytes as a uint8 tensor with a storage of its own, of exactly that size."""
    return torch.tensor(list(data), dtype=torch.uint8)


def _words(width: int) -> bytes:
    """IEEE corner cases for words of 4 or 8 bytes, little-endian: both zeros, subnormals,
    infinities, NaNs with payloads, quiet and signalling. As integers, they include extremes."""
    exponent_bits, mantissa_bits = {4: (8, 23), 8: (11, 52)}[width]
    top, quiet = (1 << exponent_bits) - 1, 1 << (mantissa_bits - 1)
    words = [
        sign << (8 * width - 1) | exponent << mantissa_bits | mantissa
        for sign in (0, 1)
        for exponent in (0, 1, top - 1, top)
        for mantissa in (0, 1, quiet, quiet | 0x2A, 2 * quiet - 1)
    ]
    return struct.pack(f"<{len(words)}{'I' if width == 4 else 'Q'}", *words)


def _bit_patterns(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of an element (or half a complex one) of one or two bytes, else corners."""
    if dtype == torch.bool:
        return torch.tensor([False, True, True])
    width = dtype.itemsize // (2 if dtype.is_complex else 1)
    if width == 1:
        return _raw(bytes(range(256))).view(dtype)
    if width == 2:
        return _raw(struct.pack("<65536H", *range(65536))).view(dtype)
    return _raw(_words(width)).view(dtype)


def _quantized(dtype: torch.dtype, per_channel: bool) -> torch.Tensor:
    values = (_ramp(256) - 128).view(4, 64)
    if not per_channel:
        return torch.quantize_per_tensor(values, scale=0.5, zero_point=3, dtype=dtype)
    packed = "x" in str(dtype)  # several elements in a byte: zero points are floating-point numbers
    scales = torch.tensor([0.5, 1, 2, 4], dtype=torch.float32 if packed else torch.float64)
    zeros = torch.tensor([0, 1, 2, 3], dtype=torch.float32 if packed else torch.int64)
    return torch.quantize_per_channel(values, scales, zeros, axis=0, dtype=dtype)


def _refusal(builder: Builder) -> type[Exception] | None:
    try:
        torch.save(builder(), io.BytesIO())
    except Exception as error:
        return type(error)
    return None


def _dtype_entries() -> Iterator[Entry]:
    known = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    for dtype in known.values():
        name = str(dtype).replace("torch.", "dtype_")
        if name.startswith(("dtype_qint", "dtype_quint")):
            if not hasattr(torch, "quantize_per_channel"):
                continue  # deprecated by torch
            if "x" not in name:
                yield Entry(f"{name}_per_tensor", partial(_quantized, dtype, False))
            yield Entry(f"{name}_per_channel", partial(_quantized, dtype, True))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refusal = _refusal(partial(torch.empty, 1, dtype=dtype))
        if refusal:  # such as integers of 1 to 7 bits, for which torch has no storage
            yield Entry(name, partial(torch.empty, 1, dtype=dtype), refused=refusal)
        else:
            yield Entry(name, partial(_bit_patterns, dtype))


def _every_dtype() -> dict[str, object]:
    return {entry.name: entry.build() for entry in _dtype_entries() if not entry.refused}


# --- Tensors: views, aliases ---

_VIEWS: dict[str, Callable[[torch.Tensor], object]] = {
    "itself": lambda t: t,
    "slices": lambda t: [t[2:9], t[9:]],
    "overlapping": lambda t: [t[0:16], t[8:24]],
    "stepped": lambda t: t[1::3],
    "transposed": lambda t: t.view(4, 6).t(),
    "permuted": lambda t: t.view(2, 3, 4).permute(2, 0, 1),
    "expanded": lambda t: t[:3].view(3, 1).expand(3, 5),
    "as_strided_overlap": lambda t: t.as_strided((5, 4), (3, 1), 2),
    "empty_slice": lambda t: t[5:5],
    "last_element": lambda t: t[23],
    "channels_last": lambda t: t.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "split": lambda t: list(t.split(7)),
}


def _viewed(view: Callable[[torch.Tensor], object], with_base: bool) -> object:
    base = _ramp(24)
    return {"view": view(base), "base": base, "again": base} if with_base else view(base)


def _complex() -> torch.Tensor:
    return torch.tensor([1 + 2j, 3 - 4j, complex(0.0, -0.0)])


_ALIASES: dict[str, Builder] = {
    **{f"view_{name}_alone": partial(_viewed, view, False) for name, view in _VIEWS.items()},
    **{f"view_{name}_and_base": partial(_viewed, view, True) for name, view in _VIEWS.items()},
    "slice_of_a_big_storage": lambda: {"row": _ramp(2 * MIB)[4096:4106]},
    "forty_layers_of_one_buffer": lambda: dict(enumerate(torch.randn(4000).split(100))),
    "views_of_two_storages": lambda: [a := _ramp(9), b := _ramp(7), a[1:], b[1:], a[2:]],
    "equal_but_not_shared": lambda: [_ramp(5), _ramp(5)],
    "view_conj": lambda: {"c": (c := _complex()), "conj": c.conj()},
    "view_neg": lambda: [_complex().conj().imag, torch._neg_view(_ramp(3))],
    "view_real": lambda: [(c := _complex()).real, c.imag],
}

# One storage seen as two dtypes: torch refuses it for the dtypes that have typed storages.
_CLASHES: dict[str, Builder] = {
    "clash_complex_and_real": lambda: {"c": (c := _complex()), "r": c.real},
    "clash_float_and_int": lambda: {"f": (f := _ramp(4)), "i": f.view(torch.int32)},
    "clash_int_and_storage": lambda: [(f := _ramp(4)).view(torch.int32), f._typed_storage()],
}


# --- Tensors: sizes ---


def _tiny_tensors(count: int) -> list[torch.Tensor]:
    return [element.clone() for element in torch.arange(count, dtype=torch.int32).unbind()]


def _tiny_tensors_filling(records: int) -> list[torch.Tensor]:
    """As many as it takes for the file to have this many records, torch's own ones included."""
    buffer = io.BytesIO()
    torch.save([], buffer)
    return _tiny_tensors(records - len(zipfile.ZipFile(buffer).namelist()))


# A record that begins like a data descriptor is special to torch's serialization id.
_DESCRIPTOR = b"PK\x07\x08" + bytes(range(7, 256)) * 17

_SIZES: dict[str, Builder] = {
    "shape_0": lambda: torch.zeros(0),
    "shape_0x3": lambda: torch.zeros(0, 3),
    "shape_2x0x4": lambda: torch.zeros(2, 0, 4),
    "shape_scalar": lambda: torch.tensor(1.5),
    "only_empty_tensors": lambda: [_ramp(0), _ramp(0).view(0, 3), torch.zeros(2, 0, 4).int()],
    "no_tensors_at_all": lambda: {"step": 3, "name": "run"},
    "empties_between_others": lambda: [_ramp(5), _ramp(0), _ramp(5), torch.zeros(0, 2)],
    **{
        f"record_of_{size}_bytes": partial(_noise, size)
        for size in (0, 1, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097)
    },
    "records_of_0_to_160_bytes": lambda: [_noise(size) for size in range(161)],
    **{
        f"record_of_{mib}_mib_{label}": partial(_noise, mib * MIB + extra)
        for mib in (4, 8)
        for label, extra in (("less_1", -1), ("exactly", 0), ("plus_1", 1))
    },
    **{
        f"descriptor_signature_in_{size}_bytes": partial(_raw, _DESCRIPTOR[:size])
        for size in (4, 7, 8, 9, 64, 4096)
    },
}

_MANY_RECORDS: dict[str, Builder] = {
    "records_70000": partial(_tiny_tensors, 70_000),
    # Around the end of the 16-bit count in the end record.
    "records_65534_in_all": partial(_tiny_tensors_filling, 65_534),
    "records_65535_in_all": partial(_tiny_tensors_filling, 65_535),
    "records_65536_in_all": partial(_tiny_tensors_filling, 65_536),
}


# --- Tensors: layouts, places in memory, storages ---


def _coo(indices: list[list[int]], values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor(indices), values, shape)


def _meta() -> torch.Tensor:
    return torch.empty(3, 3, device="meta")


def _at_odd_address(size: int) -> torch.Tensor:
    """Memory that no direct write can start from."""
    return torch.frombuffer(bytearray(_noise(size + 1).numpy()), dtype=torch.uint8, offset=1)


def _element_and_three_bytes() -> torch.Tensor:
    return torch.tensor([], dtype=torch.int32).set_(_noise(7).untyped_storage(), 0, (1,), (1,))


def _inference_tensors() -> list[torch.Tensor]:
    with torch.inference_mode():
        return [_ramp(8), _ramp(8)[2:4]]


_LAYOUTS: dict[str, Builder] = {
    "sparse_coo": lambda: _coo([[0, 0, 2], [1, 1, 0]], _ramp(3), (3, 3)),
    "sparse_coo_coalesced": lambda: torch.eye(4).to_sparse(),
    "sparse_coo_hybrid": lambda: _coo([[0, 2]], torch.randn(2, 3), (4, 3)),
    "sparse_coo_without_values": lambda: torch.zeros(3, 3).to_sparse(),
    "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "sparse_csc": lambda: torch.eye(4).to_sparse_csc(),
    "sparse_bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "sparse_bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "nested_strided": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    "meta": lambda: {"shape": _meta(), "real": _ramp(4), "turned": _meta()[:, :2].t()},
    "meta_parameter": lambda: [nn.Parameter(_meta()), nn.Parameter(_ramp(3))],
    "numpy_backed": lambda: [torch.from_numpy(a := np.arange(10.0)), torch.from_numpy(a[3:])],
    "memory_at_an_odd_address": partial(_at_odd_address, 5000),
    "memory_at_an_odd_address_large": partial(_at_odd_address, 8 * MIB + 3),
    "shared_memory": lambda: {"w": (t := _ramp(1000).share_memory_()), "part": t[5:9]},
    "inference_mode": _inference_tensors,
    "storage_typed": lambda: [(t := _ramp(6))._typed_storage(), t],
    "storage_empty": lambda: [_ramp(0)._typed_storage(), _ramp(0)._typed_storage()],
}


# --- Tensors with Python around them ---


def _noted(tensor: torch.Tensor, note: object = None) -> torch.Tensor:
    tensor.__dict__["note"] = note or {"axes": ("out", "in"), "companion": _ramp(2)}
    return tensor


_PYTHON_TENSORS: dict[str, Builder] = {
    "parameter": lambda: [(p := nn.Parameter(_ramp(6))), p, p.data],
    "parameter_frozen": lambda: nn.Parameter(_ramp(6, torch.int8), requires_grad=False),
    "parameter_uninitialized": lambda: {"weight": nn.LazyLinear(4).weight},
    "tensor_and_parameter_with_attributes": lambda: [
        _noted(_ramp(6)),
        _noted(nn.Parameter(_ramp(6))),
    ],
    "requires_grad_leaf": lambda: [_ramp(3).requires_grad_(), _ramp(3)],
    "requires_grad_non_leaf": lambda: [(t := _ramp(3).requires_grad_()) * 2, t[1:]],
    "subclass": lambda: [(t := _ramp(6)), t.as_subclass(TaggedTensor)],
    "subclass_with_attributes": lambda: _noted(_ramp(6).as_subclass(TaggedTensor)),
    "subclass_without_storage": lambda: [PairTensor(t := _ramp(4), t[:]), t],
}


# --- Containers and values ---


def _recursive() -> list[Any]:
    loop: list[Any] = [_ramp(2)]
    loop.append({"parent": loop})
    return loop


def _deep() -> list[Any]:
    nest: list[Any] = []
    for _ in range(50_000):
        nest = [nest]
    return nest


def _shared_containers() -> list[Any]:
    group, pair, empty = {"lr": 0.1}, (1, [2]), list[Any]()
    return [group, group, pair, pair, pair[1], empty, {"empty": empty}, [], (), {}, {"lr": 0.1}]


_SIGNALLING_NAN = struct.unpack("<d", b"\x01\0\0\0\0\0\xf4\x7f")[0]

_VALUES: dict[str, Builder] = {
    "integers": lambda: [0, -1, 255, 65536, 1 << 31, -(1 << 63), 1 << 200, True, None],
    "floats": lambda: [0.1, -0.0, float("inf"), _SIGNALLING_NAN, 2 - 3j, complex(-0.0, 5e-324)],
    "strings": lambda: ["", "a" * 255, "b" * 256, "ä€😀", b"", b"\0\xff", bytearray(b"buffer")],
    "shared_strings": lambda: [(s := "".join(["we", "ight"])), s, "".join(["we", "ight"]), {s: s}],
    "shared_containers": _shared_containers,
    "nested": lambda: {
        "a": [1, (2, {"b": _ramp(2)})],
        (4, 5): [[], ()],
        None: {"deep": [[_ramp(1)]]},
    },
    "recursive_list": _recursive,
    "ordered_dict": lambda: collections.OrderedDict(b=_ramp(1), a=[_ramp(2)]),
    "defaultdict": lambda: collections.defaultdict(list, {"x": [_ramp(2)]}),
    "counter_and_deque": lambda: [collections.Counter({1: 2}), collections.deque([_ramp(1)], 3)],
    "sets": lambda: [{1, 2, 3}, frozenset({(1, 2)}), set()],
    "dataclass": lambda: [(m := Metrics(0.5, _ramp(4))), m],
    "namedtuple": lambda: [Sample(_ramp(3), 1), Sample(_ramp(3), 2)],
    "enum_and_slots": lambda: [Phase.WARMUP, Phase.DECAY, Slotted()],
    "library_objects": lambda: [
        pathlib.PurePosixPath("a/b"),
        uuid.UUID(int=7),
        range(3),
        slice(1, 2),
    ],
    "classes_and_functions": lambda: [Metrics, torch.relu, nn.Linear, len],
    "torch_values": lambda: [torch.device("cuda", 1), torch.bfloat16, _ramp(6).view(2, 3).shape],
    "numpy_arrays": lambda: [np.eye(2), np.zeros((0, 2)), np.array(3), np.array(["x"])],
    "numpy_arrays_unusual": lambda: [np.zeros(2, "i4,f8"), np.asfortranarray(np.ones((2, 3)))],
    "numpy_scalars": lambda: [np.float64(0.1), np.float32("nan"), np.bool_(True), np.dtype("f4")],
    "fresh_on_getstate": lambda: [FreshOnGetstate(index) for index in range(200)],
    "fresh_on_reduce": lambda: [FreshOnReduce(index) for index in range(200)],
    "every_dtype_together": _every_dtype,
}

_HOOKS = {"hook": lambda grad: grad}

_UNPICKLABLE: dict[str, tuple[Builder, type[Exception]]] = {
    "lambda": (lambda: {"weights": _ramp(3), "hook": _HOOKS["hook"]}, pickle.PicklingError),
    "lock": (lambda: {"weights": _ramp(3), "lock": threading.Lock()}, TypeError),
    "generator": (lambda: {"weights": _ramp(3), "batches": iter(x for x in "ab")}, TypeError),
    "lock_on_a_tensor": (lambda: _noted(_ramp(3), threading.Lock()), TypeError),
    "nested_too_deeply": (_deep, RecursionError),
}


# --- Training states ---

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw_amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "sgd_momentum": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "rmsprop": partial(torch.optim.RMSprop, centered=True),
    "lbfgs": partial(torch.optim.LBFGS, max_iter=2),
}


def _trained(optimizer_name: str, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = TiedModel()
    optimizer = _OPTIMIZERS[optimizer_name](model.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.arange(8)), torch.arange(8))
        loss.backward()
        return loss.item()

    for _ in range(steps):
        optimizer.step(closure)
    return model, optimizer


def _optimizer_state(optimizer_name: str, steps: int) -> dict[str, Any]:
    return _trained(optimizer_name, steps)[1].state_dict()


def _whole_run() -> dict[str, Any]:
    """What a training script saves: model, optimizer, schedule, random states, progress."""
    model, optimizer = _trained("adam")
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10).state_dict(),
        "python_rng": random.Random(7).getstate(),
        "numpy_rng": np.random.RandomState(7).get_state(),
        "torch_rng": torch.Generator().manual_seed(7).get_state(),
        "step": 3,
    }


_TRAINING: dict[str, Builder] = {
    **{f"optimizer_{name}": partial(_optimizer_state, name, 3) for name in _OPTIMIZERS},
    **{f"optimizer_{name}_unused": partial(_optimizer_state, name, 0) for name in _OPTIMIZERS},
    "module_state_dict": lambda: TiedModel().state_dict(),
    "module_whole": TiedModel,
    "module_and_optimizer_whole": lambda: _trained("adam"),
    "whole_run": _whole_run,
}


# --- The registry ---


def _entries() -> Iterator[Entry]:
    yield from _dtype_entries()
    for group in (_ALIASES, _SIZES, _LAYOUTS, _PYTHON_TENSORS, _VALUES, _TRAINING):
        yield from (Entry(name, builder) for name, builder in group.items())
    yield from (Entry(name, builder, slow=True) for name, builder in _MANY_RECORDS.items())
    yield from (Entry(name, builder, refused=RuntimeError) for name, builder in _CLASHES.items())
    for name, (builder, error) in _UNPICKLABLE.items():
        yield Entry(f"unpicklable_{name}", builder, refused=error)
    yield Entry("meta_storage", lambda: _meta().untyped_storage(), refused=NotImplementedError)
    if torch.backends.mkldnn.is_available():
        yield Entry("mkldnn", lambda: _ramp(6).to_mkldnn(), refused=NotImplementedError)
    yield Entry(
        "view_uint16_and_uint32",
        lambda: [(t := _ramp(4)).view(torch.uint16), t.view(torch.uint32)],
        min_torch=(2, 5),
    )
    yield Entry("buffer", lambda: nn.Buffer(_ramp(3)), min_torch=(2, 5))
    yield Entry("storage_with_odd_tail", _element_and_three_bytes, unloadable=RuntimeError)
    yield Entry(
        "storage_untyped", lambda: _ramp(6).untyped_storage(), deviation="became TypedStorage"
    )


ENTRIES = tuple(entry for entry in _entries() if entry.min_torch <= TORCH_VERSION)


def savable() -> list[Entry]:
    """The entries that torch.save accepts."""
    return [entry for entry in ENTRIES if not entry.refused]


def refused() -> list[Entry]:
    """The entries for which torch.save raises `entry.refused`."""
    return [entry for entry in ENTRIES if entry.refused]


def parameters(entries: Iterable[Entry]) -> list[Any]:
    """These entries for pytest.mark.parametrize: named, and the slow ones marked `slow`."""
    import pytest  # here, so that the zoo serves scripts in environments without pytest

    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(entry, id=entry.name, marks=marks[entry.slow]) for entry in entries]


# --- Comparison ---


def same(a: object, b: object) -> bool:
    """Whether `a` and `b` are equal in all that a round trip must keep; see `difference`."""
    return difference(a, b) is None


def difference(a: object, b: object) -> str | None:
    """The first difference between `a` and `b` as a sentence that says where it is, or None.

    Tensors and storages: type, dtype, layout, shape, strides, offset, device, requires_grad, Python
    attributes, conj and neg bits, and every byte of the storage, seen or not. Containers: type,
    order and contents. Other objects: what pickle sees of them. And sharing: two places hold one
    container, tensor or storage in `a` exactly if they do in `b`.
    """
    return _Comparison().difference(a, b, "state")


_Leaf = (
    str | bytes | int | None | type | types.FunctionType | types.BuiltinFunctionType | torch.dtype
)


class _Comparison:
    def __init__(self) -> None:
        self.twins: dict[object, object] = {}  # what may be shared in a -> the same thing in b
        self.owners: dict[object, object] = {}  # and back
        self.alive: list[object] = []  # states made on demand: no identity may be used twice

    def difference(self, a: Any, b: Any, at: str) -> str | None:
        if type(a) is not type(b):
            return f"{at}: type {type(a).__qualname__} became {type(b).__qualname__}"
        if isinstance(a, np.ndarray | np.generic):
            return self._facts(_numpy_facts(a), _numpy_facts(b), at)
        if isinstance(a, float | complex):
            return self._facts({"bits": _bits(a)}, {"bits": _bits(b)}, at)
        if isinstance(a, _Leaf):
            return None if a == b else f"{at}: {a!r} became {b!r}"
        if type(a) is tuple:
            return self._sequence(a, b, at)
        return self._once(id(a), id(b), (a, b), self._contents, at)

    def _once(self, key_a: object, key_b: object, pair: tuple[Any, Any],
              compare: Callable[[Any, Any, str], str | None], at: str) -> str | None:  # fmt: skip
        """Compares a pair at its first appearance; later on only that the same two meet again."""
        self.alive.append(pair)
        if key_a in self.twins or key_b in self.owners:
            if self.twins.get(key_a) == key_b and self.owners.get(key_b) == key_a:
                return None
            return f"{at}: {type(pair[0]).__qualname__} is not shared with the same places"
        self.twins[key_a], self.owners[key_b] = key_b, key_a
        return compare(*pair, at)

    def _contents(self, a: Any, b: Any, at: str) -> str | None:
        if isinstance(a, torch.Tensor):
            return self._tensor(a, b, at)
        if isinstance(a, torch.TypedStorage):
            return self._facts({"dtype": a.dtype}, {"dtype": b.dtype}, at) or self._storage(
                a._untyped_storage, b._untyped_storage, at
            )
        if isinstance(a, torch.UntypedStorage):
            return self._storage(a, b, at)
        if type(a) is list:
            return self._sequence(a, b, at)
        if type(a) is dict:
            return self._items(list(a.items()), list(b.items()), at)
        if type(a) in (set, frozenset):
            return None if a == b else f"{at}: {a!r} became {b!r}"
        return self._reduced(a.__reduce_ex__(2), b.__reduce_ex__(2), at)

    def _facts(self, a: dict[str, object], b: dict[str, object], at: str) -> str | None:
        changed = (
            f"{at}: {name} {a[name]!r} became {b[name]!r}" for name in a if a[name] != b[name]
        )
        return next(changed, None)

    def _sequence(self, a: Any, b: Any, at: str) -> str | None:
        if len(a) != len(b):
            return f"{at}: {len(a)} elements became {len(b)}"
        found = (
            self.difference(x, y, f"{at}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))
        )
        return next(filter(None, found), None)

    def _items(self, a: list[Any], b: list[Any], at: str) -> str | None:
        if len(a) != len(b):
            return f"{at}: {len(a)} items became {len(b)}"
        for i, ((key_a, value_a), (key_b, value_b)) in enumerate(zip(a, b, strict=True)):
            name = f"{at}[{key_a!r}]" if isinstance(key_a, str | int) else f"{at}[key {i}]"
            found = self.difference(key_a, key_b, f"{at}: key {i}")
            found = found or self.difference(value_a, value_b, name)
            if found:
                return found
        return None

    def _reduced(self, a: Any, b: Any, at: str) -> str | None:
        """Any other object: the pieces that pickle would put it together from."""
        if isinstance(a, str):
            return None if a == b else f"{at}: {a} became {b}"
        parts_a, parts_b = ([*parts, *(None,) * (5 - len(parts))] for parts in (a, b))
        found = self.difference(parts_a[:3], parts_b[:3], f"{at}.__reduce__")
        found = found or self._sequence(list(parts_a[3] or ()), list(parts_b[3] or ()), at)
        return found or self._items(list(parts_a[4] or ()), list(parts_b[4] or ()), at)

    def _tensor(self, a: torch.Tensor, b: torch.Tensor, at: str) -> str | None:
        found = self._facts(_tensor_facts(a), _tensor_facts(b), at)
        found = found or self.difference(a.__dict__, b.__dict__, f"{at}.__dict__")
        if found or isinstance(a, PairTensor) or a.is_meta or nn.parameter.is_lazy(a):
            return found
        inner_a, inner_b = _inner_tensors(a), _inner_tensors(b)
        found = self._sequence(inner_a, inner_b, f"{at}.inner")
        if found or (inner_a and not a.is_quantized):
            return found
        return self._storage(a.untyped_storage(), b.untyped_storage(), at)

    def _storage(self, a: torch.UntypedStorage, b: torch.UntypedStorage, at: str) -> str | None:
        keys = (("storage", a._cdata), ("storage", b._cdata))
        return self._once(*keys, (a, b), self._storage_bytes, f"{at}: storage")

    def _storage_bytes(
        self, a: torch.UntypedStorage, b: torch.UntypedStorage, at: str
    ) -> str | None:
        if a.nbytes() != b.nbytes():
            return f"{at}: {a.nbytes()} bytes became {b.nbytes()}"
        bytes_a, bytes_b = (torch.empty(0, dtype=torch.uint8).set_(s) for s in (a, b))
        if torch.equal(bytes_a, bytes_b):
            return None
        return f"{at}: byte {int((bytes_a != bytes_b).nonzero()[0])} differs"


def _bits(number: complex) -> bytes:
    return struct.pack("<dd", number.real, number.imag)


def _numpy_facts(value: Any) -> dict[str, object]:
    order = value.flags.fnc  # Fortran order and not C order
    return {"dtype": value.dtype, "shape": value.shape, "order": order, "bytes": value.tobytes()}


def _tensor_facts(t: torch.Tensor) -> dict[str, object]:
    facts: dict[str, object] = {
        "dtype": t.dtype,
        "device": t.device,
        "requires_grad": t.requires_grad,
    }
    if nn.parameter.is_lazy(t):
        return facts
    facts |= {"layout": t.layout, "nested": t.is_nested, "conj": t.is_conj(), "neg": t.is_neg()}
    if not t.is_nested:
        facts["shape"] = t.shape
        if t.layout == torch.strided:
            facts |= {"strides": t.stride(), "offset": t.storage_offset()}
    if t.layout == torch.sparse_coo:
        facts["coalesced"] = t.is_coalesced()
    if t.is_quantized:
        facts["qscheme"] = scheme = t.qscheme()
        if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            facts |= {"scale": t.q_scale(), "zero_point": t.q_zero_point()}
        else:
            facts["axis"] = t.q_per_channel_axis()
    return facts


def _inner_tensors(t: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor without one simple storage is made of."""
    if t.is_nested:
        return list(t.unbind())
    if t.layout == torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices(), t.values()]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [t.ccol_indices(), t.row_indices(), t.values()]
    if t.is_quantized and "channel" in str(t.qscheme()):
        return [t.q_per_channel_scales(), t.q_per_channel_zero_points()]
    return []
