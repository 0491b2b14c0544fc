# SPDX-License-Identifier: Apache-2.0
"""Tensors of a safetensors file: views of the memory that it was read into or is mapped to."""

from __future__ import annotations

import importlib.util
import mmap
import os
from typing import Any, TypeAlias

from fastpersist import _core, _log
from fastpersist._errors import ArgumentError, CorruptCheckpointError, UnsupportedFileError
from fastpersist._open import numpy_type

_Memory: TypeAlias = "_core.Arena | _Mapping"
"""What the file was read into, or is mapped to."""


def load(
    file: _core.File, map_location: Any, to_map: bytes | None, options: _core.Options
) -> dict[str, Any]:
    """Every tensor by its name, in the order of the header.

    torch tensors on the device that map_location names (a string or a torch.device; None: CPU), or
    NumPy arrays where torch is not installed. The format has no checksums to compare. to_map: the
    path of a file that is to be mapped instead of read.
    """
    make = _torch_tensor if importlib.util.find_spec("torch") else _numpy_array
    device = _device(map_location)
    storages = file.storages()
    memory: _Memory
    if to_map is not None:
        memory = _Mapping(to_map, max((at + size for _, at, size in storages), default=0))
    else:
        memory = file.read_all(options)
        if file.info["warning"]:
            _log.warn_once(file.info["warning"])
    made = {}
    for name, dtype, shape, _, storage, _, size, *_ in file.tensors():
        assert storage is not None  # the format has no meta tensors
        made[name] = make(name, dtype, shape, memory, storages[storage][1], size)
    if isinstance(memory, _core.Arena):
        memory.let_go()
    if device is not None:
        made = {name: tensor.to(device) for name, tensor in made.items()}
    return made


class _Mapping:
    """A file in memory, read as it is touched; what is written stays with this process."""

    def __init__(self, path: bytes, size: int) -> None:
        with open(path, "rb", buffering=0) as file:
            found = os.fstat(file.fileno()).st_size
            if found < size:  # touching what is missing would end the process
                raise CorruptCheckpointError(
                    f"load failed on {os.fsdecode(path)}: {found} bytes long, but its header was "
                    f"that of a file of {size} when it was opened; do not change a checkpoint "
                    "while it is read",
                    os.fsdecode(path),
                )
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def view(self, offset: int, size: int) -> memoryview:
        return memoryview(self._memory)[offset : offset + size]


def _device(map_location: Any) -> Any:
    """What to call `to` with; None: nothing."""
    if map_location is None or str(map_location) == "cpu":
        return None
    if isinstance(map_location, bytes):
        map_location = map_location.decode()
    if not isinstance(map_location, str) and type(map_location).__name__ != "device":
        raise ArgumentError(
            "load failed: for a safetensors file map_location is a device, not "
            f"{type(map_location).__name__}"
        )
    return map_location


def _torch_tensor(
    name: str, dtype: str, shape: tuple[int, ...], memory: _Memory, offset: int, size: int
) -> Any:
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise UnsupportedFileError(
            f"load failed: tensor '{name}' has type {dtype}, which torch {torch.__version__} lacks"
        )
    if size == 0:
        return torch.empty(shape, dtype=kind, device="cpu")  # whatever the default device is
    # Through bytes: a copy is needed where the elements do not lie on multiples of their size.
    tensor = torch.frombuffer(memory.view(offset, size), dtype=torch.uint8)
    if offset % kind.itemsize:
        tensor = tensor.clone()
    made = torch.empty(0, dtype=kind, device="cpu")
    with torch.no_grad():
        return made.set_(tensor.untyped_storage(), 0, shape)  # type: ignore[call-overload]


def _numpy_array(
    name: str, dtype: str, shape: tuple[int, ...], memory: _Memory, offset: int, size: int
) -> Any:
    import numpy

    kind = numpy_type(name, dtype)
    if size == 0:
        return numpy.empty(shape, dtype=kind)
    # NumPy objects keep their buffer alive; it does not matter how they are aligned.
    flat = numpy.frombuffer(memory.view(offset, size), dtype=kind)  # type: ignore[arg-type]
    return flat.reshape(shape)
