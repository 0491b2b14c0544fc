# SPDX-License-Identifier: Apache-2.0
"""Describes a state in words that no version of torch can misread: JSON, and the bytes of storages.

The description of a tensor is its dtype, shape, strides, offset and the number of its storage; that
of a storage is its bytes as they lie in memory. Containers and values are spelled out, floats by
their bits. What appears twice is described once and referred to after that, so sharing is part of
the description.

Runs under torch 1.13 and later, and needs nothing but torch and NumPy.
"""

from __future__ import annotations

import ctypes
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import torch


class NotDescribedError(Exception):
    """The state holds something that this module has no words for."""


class Description:
    """`tree` can be written as JSON; `storages` are the bytes of the storages that it numbers."""

    def __init__(self, state: Any) -> None:
        self.storages: list[bytes] = []
        self.dtypes: set[str] = set()
        self.strided: list[torch.Tensor] = []  # the plain tensors, as they are met
        self.strided_facts: list[dict[str, Any]] = []  # and what `tree` says of each
        self._storage_numbers: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # no identity may be used twice
        self.tree = self._describe(state)

    def _describe(self, value: Any) -> Any:
        if isinstance(value, bool) or value is None:
            return value
        if type(value) in (int, str):
            return {type(value).__name__: str(value)}
        if type(value) is float:
            return {"float": struct.pack("<d", value).hex()}
        if type(value) is complex:
            return {"complex": struct.pack("<dd", value.real, value.imag).hex()}
        if type(value) in (bytes, bytearray):
            return {type(value).__name__: value.hex()}
        if isinstance(value, (torch.dtype, torch.device)):
            return {type(value).__name__: str(value)}
        if type(value) is tuple or isinstance(value, torch.Size):
            return {type(value).__name__: [self._describe(item) for item in value]}
        return self._once(value)

    def _once(self, value: Any) -> Any:
        if id(value) in self._seen:
            return {"same as": self._seen[id(value)]}
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        if type(value) is list:
            return {"list": [self._describe(item) for item in value]}
        if type(value) in (dict, OrderedDict, defaultdict, Counter):
            pairs = [[self._describe(key), self._describe(item)] for key, item in value.items()]
            factory = repr(getattr(value, "default_factory", None))
            return {
                type(value).__name__: pairs,
                "attributes": self._attributes(value),
                "default_factory": factory,
            }
        if type(value) in (set, frozenset):
            return {type(value).__name__: sorted(repr(item) for item in value)}
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return self._tensor(value)
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            order = bool(value.flags.fnc)
            facts = [str(value.dtype.descr), list(value.shape), order]
            return {f"numpy {kind}": facts, "bytes": value.tobytes().hex()}
        raise NotDescribedError(f"{type(value).__module__}.{type(value).__qualname__}")

    def _attributes(self, value: Any) -> Any:
        attributes = getattr(value, "__dict__", {})
        return [[name, self._describe(item)] for name, item in sorted(attributes.items())]

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.is_nested:
            raise NotDescribedError("a nested tensor")
        facts = {
            "dtype": str(tensor.dtype),
            "device": str(tensor.device),
            "parameter": type(tensor) is torch.nn.Parameter,
            "requires_grad": tensor.requires_grad,
            "shape": list(tensor.shape),
            "attributes": self._attributes(tensor),
        }
        self.dtypes.add(str(tensor.dtype))
        if tensor.layout is not torch.strided:
            parts = [self._describe(part) for part in _sparse_parts(tensor)]
            return {str(tensor.layout): facts, "parts": parts}
        facts |= {
            "strides": list(tensor.stride()),
            "offset": tensor.storage_offset(),
            "conj": tensor.is_conj(),
            "neg": tensor.is_neg(),
            "storage": None if tensor.is_meta else self._storage(tensor),
        }
        if tensor.is_quantized:
            facts["quantizer"] = [self._describe(part) for part in _quantizer(tensor)]
        else:
            self.strided.append(tensor)
            self.strided_facts.append(facts)
        return {"tensor": facts}

    def _storage(self, tensor: torch.Tensor) -> int:
        untyped = hasattr(tensor, "untyped_storage")  # since torch 2.0
        storage = tensor.untyped_storage() if untyped else tensor.storage()
        size = storage.nbytes()
        # Two storages without a byte may both be at address 0.
        identity = storage.data_ptr() if size else -1 - len(self.storages)
        if identity not in self._storage_numbers:
            self._storage_numbers[identity] = len(self.storages)
            self.storages.append(ctypes.string_at(storage.data_ptr(), size) if size else b"")
            self._alive.append(storage)
        return self._storage_numbers[identity]


def _sparse_parts(tensor: torch.Tensor) -> list[Any]:
    """The plain tensors that a sparse one consists of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor.is_coalesced(), tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _quantizer(tensor: torch.Tensor) -> list[Any]:
    """What turns the stored integers of a quantized tensor into numbers."""
    scheme = str(tensor.qscheme())
    if scheme.startswith("torch.per_tensor"):
        return [scheme, tensor.q_scale(), tensor.q_zero_point()]
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return [scheme, tensor.q_per_channel_axis(), scales, zero_points]


def numpy_values(facts: dict[str, Any], storages: list[bytes]) -> np.ndarray | None:
    """The elements of a described tensor, by NumPy alone; None when it has no such type."""
    try:
        dtype = np.dtype(facts["dtype"].removeprefix("torch."))
    except TypeError:
        return None
    if facts["storage"] is None or facts["conj"] or facts["neg"]:
        return None
    storage = storages[facts["storage"]]
    elements = np.frombuffer(storage, dtype, count=len(storage) // dtype.itemsize)
    strides = [step * dtype.itemsize for step in facts["strides"]]
    return np.lib.stride_tricks.as_strided(elements[facts["offset"] :], facts["shape"], strides)
