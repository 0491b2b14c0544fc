# SPDX-License-Identifier: Apache-2.0
"""`open`: what is in a checkpoint file, and single tensors or rows of them, without the rest."""

from __future__ import annotations

import dataclasses
import difflib
import heapq
import math
from collections.abc import Iterable, Iterator
from typing import Any

from fastpersist import _core, _load
from fastpersist._errors import ArgumentError, UnsupportedFileError
from fastpersist._options import Options, resolve

_MOST_COMPARED, _LONGEST_COMPARED = 200, 500


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before its data is read."""

    name: str
    dtype: Any
    """torch.dtype; its name ("float32") where torch is not installed or does not have it."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    bytes: int
    """Elements times their size; 0 for types whose size is not known."""
    device: str
    """Where it was saved: "cpu", "cuda:0", "meta"."""
    storage: str | None
    """The record, or in a safetensors file the tensor, that holds it; None on the meta device."""
    offset: int
    """Of its first element in the storage, in bytes."""


def open(f: Any) -> CheckpointFile:
    """Opens a PyTorch or safetensors file and reads its structure, without the tensors' data.

    Args:
        f: path (str, bytes, os.PathLike), or a readable file object with `seek` and `tell`, which
            is read as a whole, every checksum compared.

    Returns: a `CheckpointFile`, to be used in a `with` statement or closed.

    Raises: `NotFoundError`; `CorruptCheckpointError`; `UnsupportedFileError` (PyTorch before 1.6);
        `StorageError`; `ForkedError`; `ArgumentError`.
    """
    path = _load._path(f)
    if _load._is_legacy(_load._head(f, path)):
        raise UnsupportedFileError(
            f"open failed on {_load._shown(f)}: single tensors of a file of PyTorch before 1.6 "
            "(_use_new_zipfile_serialization=False) cannot be read; load all of it with fp.load, "
            "and save it anew"
        )
    return CheckpointFile(_load._open_object(f) if path is None else _core.open(path), f)


class CheckpointFile:
    """An open checkpoint file: a collection of the names of its tensors. Made by `open`.

    A name is the keys and indices that lead to the tensor, joined by dots: "model.wte",
    "optim.state.0.step". Thread-safe.
    """

    def __init__(self, file: _core.File, f: Any) -> None:
        self._file: _core.File | None = file
        self._shown = f
        self._tensors = {entry[0]: entry for entry in file.tensors()}
        self._storages = [storage[0] for storage in file.storages()]

    def __enter__(self) -> CheckpointFile:
        self._open_file()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; reads in progress in other threads end well. May be called again."""
        self._file = None

    def __repr__(self) -> str:
        state = "closed" if self._file is None else self._file.kind
        return f"CheckpointFile({self._shown!r}, {len(self._tensors)} tensors, {state})"

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def keys(self) -> list[str]:
        """The names of the tensors, in the file's order."""
        return list(self._tensors)

    @property
    def kind(self) -> str:
        """ "torch" or "safetensors"."""
        return self._open_file().kind

    @property
    def metadata(self) -> dict[str, str]:
        """Of a safetensors file; empty for others."""
        return dict(self._open_file().metadata)

    def values(self) -> dict[str, str]:
        """What is no tensor: name → short text, such as "3" or "'adam'"."""
        return {name: text for name, text, _ in self._open_file().values()}

    def info(self, name: str) -> TensorInfo:
        """What is known of a tensor. Raises KeyError, which names similar ones."""
        self._open_file()
        _, dtype, shape, strides, storage, offset, size, device, _, _ = self._entry(name)
        return TensorInfo(
            name=name,
            dtype=_torch_dtype(dtype) or dtype,
            shape=shape,
            strides=strides,
            bytes=size,
            device=device,
            storage=None if storage is None else self._storages[storage],
            offset=offset,
        )

    def tensor(
        self, name: str, *index: Any, verify: bool | None = None, options: Options | None = None
    ) -> Any:
        """Reads one tensor, or a part of it.

        Args:
            name: of the tensor.
            index: nothing for all of it; else what may stand in brackets behind a tensor: slices,
                integers, `...`, None, as several arguments or as one tuple. Only the rows that the
                first of them selects are read: `f.tensor("wte", slice(0, 100))`.
            verify: compare the checksum of the storage that holds the tensor, which has all of that
                storage read. Default: True for a whole tensor, False for a part, since no checksum
                covers one. Files without checksums (safetensors) and file objects, which were
                compared when they were opened, are not affected.
            options: how the data is read.

        Returns: a new contiguous torch tensor on the CPU (on the meta device for what was saved
            there), lazy conjugates and negations resolved; a NumPy array where torch is not
            installed.

        Raises: KeyError, which names similar ones; IndexError; `UnsupportedFileError` for types
            that the installed torch or NumPy lacks and for quantized tensors; what `load` raises.
        """
        file = self._open_file()
        entry = self._entry(name)
        core_options = resolve(options)
        items = _flat(index)
        rows, rest = _rows(entry[2], items)
        if _has_torch():
            from fastpersist import _tensor_part

            read: Any = _tensor_part.torch_tensor
        else:
            read = _numpy_array
        verify = not items if verify is None else bool(verify)
        piece = Piece(file, verify, core_options)
        return read(entry, rows, rest, piece)

    def _open_file(self) -> _core.File:
        if (file := self._file) is None:
            raise ArgumentError(f"read failed: the file {self._shown!r} is closed")
        return file

    def _entry(self, name: str) -> _core.StoredTensor:
        try:
            return self._tensors[name]
        except (KeyError, TypeError):
            pass
        near = _similar(str(name), self._tensors)
        advice = f"; similar: {', '.join(near)}" if near else ""
        raise KeyError(f"no tensor '{name}' in {self._shown!r}{advice}")


def _common(a: str, b: str) -> int:
    """Characters with which both begin."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _similar(name: str, names: Iterable[str]) -> list[str]:
    """At most three. difflib takes tens of microseconds for each name that it compares, so in a
    file of many it sees those only that begin and end most like this one."""
    if len(name) > _LONGEST_COMPARED:
        return []

    def likeness(other: str) -> int:
        return _common(name, other) + _common(name[::-1], other[::-1])

    likely = heapq.nlargest(_MOST_COMPARED, names, likeness)
    return difflib.get_close_matches(name, likely, n=3, cutoff=0.4)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Reads bytes of one storage."""

    file: _core.File
    verify: bool
    options: _core.Options

    def read(self, storage: int, offset: int, size: int, address: int) -> None:
        if size:
            self.file.read_pieces([(storage, offset, size, address)], self.verify, self.options)

    def must_swap(self) -> bool:
        return self.file.byteorder == "big"


def _has_torch() -> bool:
    try:
        import torch  # noqa: F401  (whether it can be imported is the question)
    except ImportError:
        return False
    return True


def _torch_dtype(name: str) -> Any:
    """None where torch is not installed or has no such type."""
    if not _has_torch():
        return None
    import torch

    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _flat(index: tuple[Any, ...]) -> tuple[Any, ...]:
    items = index[0] if len(index) == 1 and isinstance(index[0], tuple) else index
    for item in items:
        basic = item is None or item is Ellipsis or isinstance(item, slice)
        if isinstance(item, bool) or not (basic or hasattr(item, "__index__")):
            raise ArgumentError(
                f"read failed: {item!r} cannot select a part of a stored tensor; use slices and "
                "integers, or read the tensor and index it"
            )
        if hasattr(item, "shape") and item.shape != ():
            raise ArgumentError("read failed: an array cannot select a part of a stored tensor")
    return tuple(items)


def _rows(shape: tuple[int, ...], items: tuple[Any, ...]) -> tuple[range, tuple[Any, ...]]:
    """The rows along the first dimension that the index needs, and the index into these rows.

    >>> _rows((10, 3), (slice(4, 9, 2), 1))
    (range(4, 9), (slice(None, None, 2), 1))
    """
    every = range(shape[0]) if shape else range(1)
    if not items or not shape or items[0] is None or items[0] is Ellipsis:
        return every, items
    first = items[0]
    if not isinstance(first, slice):
        row = first.__index__()
        if not -len(every) <= row < len(every):
            raise IndexError(f"index {row} is out of range for a dimension of {len(every)}")
        row %= len(every)
        return range(row, row + 1), (0, *items[1:])
    chosen = every[first]
    if chosen.step < 0:
        return every, items
    if not chosen:
        return range(0), (slice(None), *items[1:])
    return range(chosen[0], chosen[-1] + 1), (slice(None, None, chosen.step), *items[1:])


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one of a strided view."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def numpy_type(name: str, dtype: str) -> Any:
    """The NumPy type of that name, if it is one of plain numbers: a file may name any."""
    import numpy

    try:
        kind = numpy.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.kind not in "biufc":
        raise UnsupportedFileError(
            f"read failed: tensor '{name}' has type {dtype}, which NumPy lacks; install torch"
        )
    return kind


def _numpy_array(
    entry: _core.StoredTensor, rows: range, rest: tuple[Any, ...], piece: Piece
) -> Any:
    import numpy

    name, dtype, shape, strides, storage, offset, _, _, conjugate, negative = entry
    kind = numpy_type(name, dtype)
    if storage is None:
        raise UnsupportedFileError(f"read failed: tensor '{name}' is on the meta device: no data")
    if shape:
        offset += rows.start * strides[0] * kind.itemsize
        shape = (len(rows), *shape[1:])
    data = numpy.empty(span(shape, strides), dtype=kind)
    piece.read(storage, offset, data.nbytes, data.ctypes.data)
    if piece.must_swap():
        data.byteswap(inplace=True)
    steps = tuple(step * kind.itemsize for step in strides)
    array = numpy.lib.stride_tricks.as_strided(data, shape, steps)[rest]
    array = numpy.conj(array) if conjugate else array
    array = numpy.negative(array) if negative else array
    fresh = isinstance(array, numpy.ndarray) and array.base is None and array.flags.c_contiguous
    return array if fresh else numpy.array(array, order="C")
