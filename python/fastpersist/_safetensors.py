# SPDX-License-Identifier: Apache-2.0
"""From a dict of tensors to the entries of a safetensors file.

The same verdicts as the safetensors package's `save_file`: tensors that share memory, that are not
contiguous, sparse or on the meta device are refused, naming the keys. Lazy conjugations and
negations are carried out, so that the file has the values that the tensor shows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from fastpersist._errors import ArgumentError, UnsupportedStateError
from fastpersist._log import logger

View = tuple[str, str, list[int], int, int]
"""name, type as in the header, shape, address, bytes"""

_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


def checked_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Refuses what is not text."""
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ArgumentError(f"save failed: metadata {key!r}: {value!r} is not text")
    return dict(metadata)


def views(tensors: Any) -> tuple[list[View], list[Any]]:
    """The entries, and what must stay alive until they are written."""
    if not isinstance(tensors, Mapping):
        raise UnsupportedStateError(
            f"save failed: safetensors files hold a dict of tensors; this is {type(tensors).__name__}"
        )
    entries: list[View] = []
    keep: list[Any] = []
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise UnsupportedStateError(f"save failed: the name {name!r} is not a string")
        view, owner = _view(name, value)
        entries.append(view)
        keep.append(owner)
    _refuse_shared_memory(entries)
    return entries, keep


def _view(name: str, value: Any) -> tuple[View, Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _torch_view(name, value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _numpy_view(name, value)
    raise UnsupportedStateError(
        f"save failed: '{name}' is a {type(value).__name__}; a safetensors file holds tensors only"
    )


def _torch_view(name: str, tensor: Any) -> tuple[View, Any]:
    import torch

    if tensor.device.type == "meta":
        raise UnsupportedStateError(f"save failed: '{name}' is on the meta device and has no data")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedStateError(
            f"save failed: '{name}' is {'quantized' if tensor.is_quantized else tensor.layout}; "
            "a safetensors file holds dense tensors only"
        )
    if tensor.is_conj() or tensor.is_neg():
        logger.info("'%s' is a lazy conjugate or negation; its resolved values are saved", name)
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        raise UnsupportedStateError(
            f"save failed: '{name}' is not contiguous; call .contiguous() on it first"
        )
    tensor = tensor.detach().cpu()
    dtype = _type_name(name, str(tensor.dtype).removeprefix("torch."))
    size = tensor.numel() * tensor.element_size()
    address = tensor.data_ptr() if size else 0
    return (name, dtype, list(tensor.shape), address, size), tensor


def _numpy_view(name: str, array: Any) -> tuple[View, Any]:
    if not array.flags.c_contiguous:
        raise UnsupportedStateError(
            f"save failed: '{name}' is not contiguous; call numpy.ascontiguousarray on it first"
        )
    if array.dtype.byteorder == ">":
        raise UnsupportedStateError(f"save failed: '{name}' is big-endian; convert it first")
    dtype = _type_name(name, array.dtype.name)
    return (name, dtype, list(array.shape), array.ctypes.data, array.nbytes), array


def _type_name(name: str, dtype: str) -> str:
    try:
        return _NAMES[dtype]
    except KeyError:
        raise UnsupportedStateError(
            f"save failed: '{name}' has type {dtype}, which a safetensors file cannot hold"
        ) from None


def _refuse_shared_memory(entries: list[View]) -> None:
    end = 0
    before = ""
    for name, _, _, address, size in sorted(entries, key=lambda entry: entry[3]):
        if size == 0:
            continue
        if address < end:
            raise UnsupportedStateError(
                f"save failed: '{before}' and '{name}' share memory, which a safetensors file "
                "cannot express; clone one of them, or save as .pt"
            )
        end = address + size
        before = name
