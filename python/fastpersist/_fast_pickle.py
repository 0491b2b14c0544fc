# SPDX-License-Identifier: Apache-2.0
"""torch's pickle, faster, for states made of plain CPU tensors.

CPython's C pickler does the work; a dispatch table gives it the reduction of a plain tensor without
the detours of `Tensor.__reduce_ex__`. The bytes equal torch's (the caller's self-test compares them).
Whatever is not a plain tensor is reduced as usual; if a storage appears that way, `dump` returns None
and the caller takes torch's own pickler.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch


class _Unusual(Exception):
    """Something that only torch's own pickler knows how to write."""


class _StorageRef:
    """What the pickler sees in place of a storage; its persistent id."""

    __slots__ = ("persistent_id",)

    def __init__(self, persistent_id: tuple[Any, ...]) -> None:
        self.persistent_id = persistent_id


class _Storage:
    """One storage met while pickling: what it is, and which of its bytes tensors refer to."""

    __slots__ = ("address", "dtype", "owner", "ranges", "size")

    def __init__(self, owner: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.owner = owner
        self.dtype = dtype
        self.size = owner.nbytes()
        self.address = owner.data_ptr() if self.size else 0
        # (first byte, end) of each tensor; a tensor over the whole storage makes it one range.
        self.ranges: list[tuple[int, int]] = []

    def clusters(self) -> list[tuple[int, int]]:
        """The unions of overlapping ranges, ascending."""
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(self.ranges):
            if merged and begin < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        return merged


class FastPickle:
    """A pickle and its storages in the order of their keys."""

    def __init__(self, pickled: bytes, storages: list[_Storage], bodies: list[tuple[int, int]]):
        self.pickle = pickled
        self._storages = storages
        self._bodies = bodies
        self.keep: list[Any] = [storage.owner for storage in storages]

    def storage_records(self) -> list[tuple[str, bytes | tuple[int, int]]]:
        """(name, (address, size)) for each storage."""
        return [(f"data/{key}", body) for key, body in enumerate(self._bodies)]

    def referenced_bytes(self) -> int:
        """Bytes of storages that at least one tensor refers to."""
        return sum(e - b for storage in self._storages for b, e in storage.clusters())


def dump(obj: Any, compact: bool) -> FastPickle | None:
    """Pickles obj; None when only torch's own pickler can. Raises what pickling raises."""
    try:
        whole = _WholeStorages()
        pickled = _pickle(obj, whole)
        if not compact:
            storages = list(whole.storages.values())
            return FastPickle(pickled, storages, [(s.address, s.size) for s in storages])
        parts = _ReferencedParts(whole.storages)
        pickled = _pickle(obj, parts)
        return FastPickle(pickled, list(whole.storages.values()), parts.bodies)
    except _Unusual:
        return None


class _WholeStorages:
    """torch's rule: a tensor refers to its whole storage, each storage gets one key."""

    def __init__(self) -> None:
        self.storages: dict[int, _Storage] = {}
        self._refs: dict[int, tuple[str, int]] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def place(
        self, tensor: torch.Tensor, kind: tuple[Any, int], offset: int
    ) -> tuple[tuple[Any, ...], int]:
        """The persistent id of the tensor's storage, and the tensor's offset in it in elements."""
        storage_type, item_size = kind
        untyped = tensor.untyped_storage()
        cdata = untyped._cdata
        storage = self.storages.get(cdata)
        if storage is None:
            storage = self._meet(cdata, untyped, tensor.dtype)
        elif storage.dtype is not tensor.dtype and storage.address != 0:
            raise _Unusual  # torch refuses this; let it say so
        storage.ranges.append(_byte_range(tensor, offset, item_size))
        key, numel = self._refs.get(cdata) or self._name(cdata, storage, item_size)
        return ("storage", storage_type, key, "cpu", numel), offset

    def _meet(self, cdata: int, untyped: torch.UntypedStorage, dtype: torch.dtype) -> _Storage:
        storage = self.storages[cdata] = _Storage(untyped, dtype)
        address = storage.address
        if address != 0 and self._dtypes.setdefault(address, dtype) is not dtype:
            raise _Unusual
        return storage

    def _name(self, cdata: int, storage: _Storage, item_size: int) -> tuple[str, int]:
        if storage.address == 0:  # empty ones are seen under several types
            return self._refs.setdefault(cdata, (str(len(self._refs)), 0))
        return self._refs.setdefault(cdata, (str(len(self._refs)), storage.size // item_size))


class _ReferencedParts:
    """compact=True: each cluster of overlapping tensors becomes a storage of its own."""

    def __init__(self, storages: dict[int, _Storage]) -> None:
        self._clusters = {cdata: storage.clusters() for cdata, storage in storages.items()}
        self._storages = storages
        self._keys: dict[tuple[int, int], str] = {}
        self.bodies: list[tuple[int, int]] = []

    def place(
        self, tensor: torch.Tensor, kind: tuple[Any, int], offset: int
    ) -> tuple[tuple[Any, ...], int]:
        storage_type, item_size = kind
        cdata = tensor.untyped_storage()._cdata
        if cdata not in self._clusters:
            raise ValueError("compact=True: an object made a new tensor each time it was pickled")
        first, last = _byte_range(tensor, offset, item_size)
        begin, end = next(
            ((b, e) for b, e in self._clusters[cdata] if b <= first and last <= e), (first, first)
        )
        key = self._keys.get((cdata, begin))
        if key is None or begin == end:
            key = self._keys[(cdata, begin)] = str(len(self.bodies))
            self.bodies.append((self._storages[cdata].address + begin if end > begin else 0, end - begin))
        numel = (end - begin) // item_size
        return ("storage", storage_type, key, "cpu", numel), offset - begin // item_size


def _byte_range(tensor: torch.Tensor, offset: int, item_size: int) -> tuple[int, int]:
    """First byte and end of what the tensor refers to in its storage; empty for no elements."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    begin = offset * item_size
    return begin, begin + count * item_size


def _pickle(obj: Any, placement: _WholeStorages | _ReferencedParts) -> bytes:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, placement)
    pickler.dump(obj)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, placement: _WholeStorages | _ReferencedParts) -> None:
        super().__init__(buffer, protocol=2)
        reduce = _tensor_reducer(placement)
        self.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: reduce}
        self._storage_types = frozenset(_all_storage_types())

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is _StorageRef:
            return obj.persistent_id
        if kind in self._storage_types:
            raise _Unusual
        return None


def _tensor_reducer(placement: _WholeStorages | _ReferencedParts) -> Any:
    kinds = _storage_kinds()
    rebuild = torch._utils._rebuild_tensor_v2
    strided = torch.strided

    def reduce(tensor: torch.Tensor) -> Any:
        kind = kinds.get(tensor.dtype)
        if (
            kind is None
            or not tensor.is_cpu
            or tensor.layout is not strided
            or tensor.is_nested
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.__dict__
            or tensor._backward_hooks
        ):
            return tensor.__reduce_ex__(2)
        persistent_id, offset = placement.place(tensor, kind, tensor.storage_offset())
        return rebuild, (
            _StorageRef(persistent_id),
            offset,
            tuple(tensor.size()),
            tensor.stride(),
            tensor.requires_grad,
            OrderedDict(),
        )

    return reduce


def _storage_kinds() -> dict[torch.dtype, tuple[Any, int]]:
    """dtype to (storage class as pickled, bytes per element), for types that torch saves this way.

    Asked of torch at run time; quantized types carry more than a tensor and are left out.
    """
    return {
        dtype: (getattr(torch, name), torch.empty((), dtype=dtype).element_size())
        for dtype, name in torch.storage._dtype_to_storage_type_map().items()
        if not name.startswith("Q")
    }


def _all_storage_types() -> Iterator[type]:
    pending: list[type] = [torch.storage.TypedStorage, torch.storage.UntypedStorage]
    while pending:
        kind = pending.pop()
        yield kind
        pending += kind.__subclasses__()
