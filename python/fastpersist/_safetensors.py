# SPDX-License-Identifier: Apache-2.0
"""From a dict of tensors to the entries of a safetensors file.

The same verdicts as the safetensors package's `save_file`: torch tensors that share memory, that
are not contiguous, sparse or on the meta device are refused, naming the keys. Where the package
would write other values than the state shows, lazy conjugations and negations are carried out, and
NumPy arrays that are not contiguous are refused.
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
    "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4",
}  # fmt: skip


def checked_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Refuses what is not text."""
    if not isinstance(metadata, Mapping):
        raise ArgumentError(f"save failed: metadata {metadata!r} is not a dict of text to text")
    for key, value in metadata.items():
        if not _is_text(key) or not _is_text(value):
            raise ArgumentError(f"save failed: metadata {key!r}: {value!r} is not text")
    return dict(metadata)


def _is_text(value: object) -> bool:
    """Whether it is a string that UTF-8 can hold: without halves of surrogate pairs."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def views(tensors: Any) -> tuple[list[View], list[Any]]:
    """The entries, and what must stay alive until they are written."""
    if not isinstance(tensors, Mapping):
        raise UnsupportedStateError(
            f"save failed: safetensors files hold dicts of tensors, not {type(tensors).__name__}"
        )
    entries: list[View] = []
    keep: list[Any] = []
    for name, value in tensors.items():
        if not _is_text(name):
            raise UnsupportedStateError(f"save failed: the name {name!r} is not text")
        view, owner = _view(name, value)
        entries.append(view)
        keep.append(owner)
    # Arrays of NumPy are values: the package writes shared ones twice, and so do we.
    numpy = sys.modules.get("numpy")
    torchs = [
        entry
        for entry, owner in zip(entries, keep, strict=True)
        if numpy is None or not isinstance(owner, numpy.ndarray)
    ]
    _refuse_shared_memory(torchs)
    return entries, keep


def _view(name: str, value: Any) -> tuple[View, Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            return _torch_view(name, value)
        except (UnsupportedStateError, MemoryError):
            raise
        except Exception as error:  # subclasses raise what they like
            what = f"{type(error).__name__}: {error}"
            raise UnsupportedStateError(f"save failed: '{name}' cannot be saved: {what}") from error
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
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = (
            "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
        )
        raise UnsupportedStateError(
            f"save failed: '{name}' is {kind}; a safetensors file holds dense tensors only"
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
    shape = list(tensor.shape)
    if dtype == "F4":  # an element of torch's type holds two of the format's
        if not shape:
            raise UnsupportedStateError(f"save failed: '{name}' is a scalar of less than a byte")
        shape[-1] *= 2
    size = tensor.numel() * tensor.element_size()
    return (name, dtype, shape, _address(name, tensor) if size else 0, size), tensor


def _address(name: str, tensor: Any) -> int:
    try:
        address = int(tensor.data_ptr())
    except Exception:  # torch raises several for tensors that only pretend to have memory
        address = 0
    if address == 0:
        raise UnsupportedStateError(
            f"save failed: '{name}' is a {type(tensor).__name__} without memory of its own; "
            "save the tensors that it is made of"
        )
    return address


def _numpy_view(name: str, array: Any) -> tuple[View, Any]:
    if not array.flags.c_contiguous:
        raise UnsupportedStateError(
            f"save failed: '{name}' is not contiguous; call numpy.ascontiguousarray on it first"
        )
    dtype = _type_name(name, array.dtype.name)
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return (name, dtype, list(array.shape), little.ctypes.data, array.nbytes), little


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
