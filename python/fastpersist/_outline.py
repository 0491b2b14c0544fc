# SPDX-License-Identifier: Apache-2.0
"""The object in a checkpoint file before its data is read.

An outline is the object that `load` would make, except that its tensors lie in memory which nobody
has touched: their addresses tell where in the file their bytes are. Whoever needs some of them has
them read, to where they lie or elsewhere. Needs torch.
"""

from __future__ import annotations

import bisect
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fastpersist import _core, _load, _log, _rebuild
from fastpersist._errors import UnsupportedFileError
from fastpersist._options import Options, resolve

_ALIGNMENT = 64
"""Storages that lie on other multiples in the file are copied when a tensor is made of them."""
PLAIN_TENSORS: tuple[type, ...] = tuple(
    kind
    for kind in (
        torch.Tensor,
        torch.nn.Parameter,
        getattr(torch.nn, "Buffer", None),  # torch 2.5
    )
    if kind is not None
)
_PLAIN_VALUES: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, bytearray, type(None), set, frozenset,
    torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_PLAIN_CONTAINERS = {dict, OrderedDict, defaultdict, Counter, list, tuple}

Place = tuple[int, int]
"""(storage, offset in it in bytes)"""


class Outline:
    """An object whose tensors' data may still have to be read.

    Attributes: `object`, `file`, `options`, and `loaded`: True when the data is there already.
    """

    def __init__(
        self, made: Any, file: _core.File | None, options: _core.Options, loaded: bool
    ) -> None:
        self.object = made
        self.file = file
        self.options = options
        self.loaded = loaded
        self.places: dict[int, Place] = {}
        """Of the tensors that have data, by id; valid as long as they live."""

    def locate(self, tensor: torch.Tensor) -> Place | None:
        """Where the tensor's first byte is; None for tensors without data."""
        return self.places.get(id(tensor))

    def allocate(self, tensor: torch.Tensor) -> None:
        """Gives it the memory that it lies in, before its address is asked for."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            storage.resize_(tensor.numel() * tensor.element_size())

    def read(self, pieces: list[tuple[int, int, int, int]]) -> None:
        """Has (storage, offset, bytes, address) read, and compares the storages' checksums."""
        assert self.file is not None
        if pieces:
            self.file.read_pieces(pieces, True, self.options)


def outline(f: Any, weights_only: bool | None, options: Options | None) -> Outline:
    """Opens the file. Reads its data only where that cannot be put off (`Outline.loaded`).

    Args: as of `load`. Raises: what `load` raises.
    """
    path = _load._path(f)
    core_options = resolve(options)
    named = path is not None and path.endswith(b".safetensors")
    if not named and _load._is_legacy(_load._head(f, path)):
        legacy = _load.load(f, "cpu", weights_only=weights_only, mmap=False, options=options)
        return Outline(legacy, None, core_options, loaded=True)
    file = _load._open_object(f) if path is None else _core.open(path)
    if file.kind == "safetensors":
        return _safetensors(file, core_options)
    weights_only = _load._weights_only(weights_only, None)
    if not file.checksums:
        _log.warn_once(
            "a file was written with checksums switched off (set_crc32_options(False)): nothing "
            "could be compared"
        )
    made: Outline | None = None
    if not _reason_to_load(file):
        made = _torch(file, path, weights_only, core_options)
    if made is None:
        loaded = _load._load_torch(
            f, path, file, "cpu", None, weights_only, False, core_options, {}
        )
        return Outline(loaded, file, core_options, loaded=True)
    return made


def _reason_to_load(file: _core.File) -> bool:
    """Whether tensors would not be views of the file's bytes as they are."""
    return bool(
        file.byteorder != "little"
        or torch.serialization.get_default_load_endianness() is not None
        or any(at % _ALIGNMENT for _, at, size in file.storages() if size)
    )


def _torch(
    file: _core.File, path: bytes | None, weights_only: bool, options: _core.Options
) -> Outline | None:
    """None if torch has to make the object, or it holds more than plain containers, values and
    tensors."""
    size = max((at + size for _, at, size in file.storages()), default=0)
    arena = _core.arena(max(size, 1))
    unpickler: Any = torch._weights_only_unpickler if weights_only else pickle
    arguments = {"encoding": "utf-8"}
    try:
        if plain := _rebuild.plainly(file, lambda: arena, "cpu"):
            made = plain[0]
        elif _rebuild.self_test():
            return None
        else:
            made = _rebuild.through_torch(file, lambda: arena, "cpu", unpickler, arguments)
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        from fastpersist import _weights_only

        raise _weights_only.explain(error, file, path) from error
    except Exception as error:  # of an object that looks into tensors, whose data is not there yet
        _log.logger.debug("read as a whole, for its outline cannot be made: %r", error)
        return None
    arena.let_go()
    sketch = Outline(made, file, options, loaded=False)
    return sketch if _find_places(sketch, file, arena) else None


def _find_places(sketch: Outline, file: _core.File, arena: _core.Arena) -> bool:
    """By address: the tensors lie in the arena as in the file. False: there is more than those."""
    base = torch.frombuffer(arena.memoryview(), dtype=torch.uint8).data_ptr()
    in_file = enumerate(file.storages())
    storages = sorted((at, at + size, i) for i, (_, at, size) in in_file if size)
    starts = [start for start, _, _ in storages]
    for leaf in leaves(sketch.object):
        if not isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, _PLAIN_VALUES) and type(leaf).__module__ != "numpy":
                return False
            continue
        if type(leaf) not in PLAIN_TENSORS or leaf.layout != torch.strided or leaf.is_quantized:
            return False
        if leaf.is_meta or not (address := leaf.data_ptr()):
            continue
        at = bisect.bisect_right(starts, address - base) - 1
        if at < 0 or address - base >= storages[at][1]:
            return False
        sketch.places[id(leaf)] = (storages[at][2], address - base - starts[at])
    return True


def leaves(obj: Any) -> Iterator[Any]:
    """What containers hold, and those containers that may be more than that; each only once."""
    seen = set()
    stack = [obj]
    while stack:
        one = stack.pop()
        if isinstance(one, Mapping | list | tuple) and not isinstance(one, torch.Size):
            if id(one) in seen:
                continue
            seen.add(id(one))
            if type(one) not in _PLAIN_CONTAINERS:
                yield one
            if isinstance(one, Mapping):
                stack.extend(one.keys())
                stack.extend(one.values())
            else:
                stack.extend(one)
        else:
            yield one


def _safetensors(file: _core.File, options: _core.Options) -> Outline:
    made: dict[str, torch.Tensor] = {}
    sketch = Outline(made, file, options, loaded=False)
    for name, dtype, shape, _, storage, *_ in file.tensors():
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise UnsupportedFileError(
                f"load failed: tensor '{name}' has type {dtype}, which torch {torch.__version__} "
                "lacks"
            )
        made[name] = tensor = torch.empty(shape, dtype=kind, device="cpu")  # not touched
        if tensor.numel():
            assert storage is not None  # the format has no meta tensors
            sketch.places[id(tensor)] = (storage, 0)
            tensor.untyped_storage().resize_(0)  # so that only what is wanted has memory
    return sketch
