# SPDX-License-Identifier: Apache-2.0
"""`load`: the objects that torch.load would make, every checksum compared on the way."""

from __future__ import annotations

import functools
import io
import os
import pickle
import warnings
from typing import Any

from fastpersist import _core, _log
from fastpersist._errors import ArgumentError, CorruptCheckpointError, Error, WeightsOnlyError
from fastpersist._options import Options, resolve

_TRUE = ("1", "y", "yes", "true")
_LEGACY_HEADS = tuple({pickle.dumps(0x1950A86A20F9469CFC6C, protocol) for protocol in range(6)})
"""How files of PyTorch before 1.6 begin: a pickle of torch's magic number, of any protocol."""
_HEAD_BYTES = max(map(len, _LEGACY_HEADS))

_DAMAGE = (RuntimeError, EOFError, ValueError, AssertionError, LookupError, AttributeError)
"""What torch raises for damaged files of PyTorch before 1.6, which have no checksums."""


def load(
    f: Any,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    options: Options | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Loads a PyTorch or safetensors file, as `torch.load` does: the same objects.

    Everything is read in one pass, directly from the device, and every checksum in the file is
    compared. Either all is good and the object is returned, or nothing is. (Not with mmap=True.)

    Args:
        f: path (str, bytes, os.PathLike), or a readable file object with `seek` and `tell`, which
            is read from where it stands to its end.
        map_location: as in torch.load.
        pickle_module, pickle_load_args: as in torch.load; for `weights_only=False` only.
        weights_only: True (the default) makes tensors, plain containers and what was allowed with
            `torch.serialization.add_safe_globals`; False makes any object and may run any code that
            the file asks for. The variables TORCH_FORCE_WEIGHTS_ONLY_LOAD and
            TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD count as they do for torch.load.
        mmap: True maps the file, named by a path, instead of reading it, as torch.load does, and
            safetensors files likewise. Structure and pickle are checked, the tensors' checksums are
            not: their bytes are read when they are touched. Changes to a tensor stay in memory.
            Files of PyTorch before 1.6 cannot be mapped.
        options: how the data is read.

    Returns: the object. Large tensors lie in memory that belongs to the file that was loaded;
        storages cannot be resized, as after torch.load with mmap. Safetensors files give a dict of
        torch tensors, or of NumPy arrays where torch is not installed.

    Raises: `NotFoundError`; `CorruptCheckpointError` naming the tensor, offset, expected and found
        checksum; `UnsupportedFileError`; `WeightsOnlyError` naming the entries that are refused and
        how to allow them; `StorageError` (an OSError); `ForkedError`; `ArgumentError`.

    Thread-safe. The GIL is free while bytes move.
    """
    path = _path(f)
    core_options = resolve(options)
    if mmap is None:
        mmap = _mmap_is_default()
    if mmap and path is None:
        raise ArgumentError("load failed: mmap=True takes a path, not a file object")
    if _is_legacy(_head(f, path)):
        return _load_legacy(f, map_location, pickle_module, weights_only, mmap, pickle_load_args)
    file = _open_object(f) if path is None else _core.open(path)
    if file.kind == "safetensors":
        return _load_safetensors(file, map_location, path if mmap else None, core_options)
    return _load_torch(
        f, path, file, map_location, pickle_module, weights_only, mmap, core_options,
        pickle_load_args,
    )  # fmt: skip


def _path(f: Any) -> bytes | None:
    """The path, or None for a file object."""
    if isinstance(f, str | bytes | os.PathLike):
        path = os.fsencode(f)
        if b"\0" in path:
            raise ArgumentError("load failed: the path contains a null byte")
        return path
    if all(callable(getattr(f, method, None)) for method in ("read", "seek", "tell")):
        return None
    raise ArgumentError(
        f"load failed: {type(f).__name__} is neither a path nor a file object with methods 'read', "
        "'seek' and 'tell'"
    )


def _head(f: Any, path: bytes | None) -> bytes:
    """The first bytes of a file object; of a path, if it can be opened (the core says why not)."""
    if path is None:
        position = f.tell()
        try:
            head = f.read(_HEAD_BYTES)
        except UnicodeDecodeError:
            head = ""
        if isinstance(head, str):
            raise ArgumentError("load failed: the file object gives text; open it with mode 'rb'")
        f.seek(position)
        return bytes(head)
    if not os.path.isfile(path):
        return b""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def _is_legacy(head: bytes) -> bool:
    return head.startswith(_LEGACY_HEADS)


def _open_object(f: Any) -> _core.File:
    """Reads a file object into memory, from where it stands to its end."""
    start = f.tell()
    f.seek(0, os.SEEK_END)
    size = max(f.tell() - start, 0)
    f.seek(start)
    arena = _core.arena(size)
    memory = arena.memoryview()
    done = 0
    while done < size:
        done += _read_some(f, memory[done : done + (64 << 20)])
    name = getattr(f, "name", None)
    return _core.open_arena(arena, name if isinstance(name, str) else f"<{type(f).__name__}>")


def _read_some(f: Any, memory: memoryview) -> int:
    if callable(readinto := getattr(f, "readinto", None)):
        got = readinto(memory)
    else:
        data = f.read(len(memory))
        got = len(data)
        memory[:got] = data
    if not isinstance(got, int) or got <= 0:
        raise CorruptCheckpointError("load failed: the file object ended before its size said")
    return got


def _load_safetensors(
    file: _core.File, map_location: Any, to_map: bytes | None, options: _core.Options
) -> Any:
    from fastpersist import _read_safetensors

    return _read_safetensors.load(file, map_location, to_map, options)


def _load_legacy(
    f: Any,
    map_location: Any,
    pickle_module: Any,
    weights_only: bool | None,
    mmap: bool,
    pickle_load_args: dict[str, Any],
) -> Any:
    import torch

    if mmap:
        raise ArgumentError(
            f"load failed on {_shown(f)}: mmap=True cannot map a file of PyTorch before 1.6 "
            "(_use_new_zipfile_serialization=False); load it without mmap=True, or save it anew"
        )
    _log.warn_once(
        "torch.load reads in our place: the file is of PyTorch before 1.6 and has no checksums; "
        "save it anew to have them"
    )
    weights_only = _weights_only(weights_only, pickle_module)
    try:
        return torch.load(
            os.fsdecode(f) if isinstance(f, bytes) else f,
            map_location=map_location,
            pickle_module=pickle_module,
            weights_only=weights_only,
            mmap=False,
            **pickle_load_args,
        )
    except (OSError, UnicodeDecodeError):  # the second: strings of Python 2 need encoding=
        raise
    except (pickle.UnpicklingError, *_DAMAGE) as error:
        # What the caller's arguments, or what is installed, are to blame for.
        missing = not weights_only and isinstance(error, AttributeError)
        if missing or callable(map_location) or "Attempting to deserialize" in str(error):
            raise
        name = _shown(f)
        if weights_only and isinstance(error, pickle.UnpicklingError):
            raise WeightsOnlyError(
                f"load failed on {name}: weights_only=True refuses this file of PyTorch before "
                f"1.6, or it is damaged: {error}",
                [],
            ) from error
        raise CorruptCheckpointError(
            f"load failed on {name}: torch cannot read this file of PyTorch before 1.6: {error}",
            filename=name,
        ) from error


def _shown(f: Any) -> str:
    return os.fsdecode(f) if isinstance(f, str | bytes | os.PathLike) else type(f).__name__


def _load_torch(
    f: Any,
    path: bytes | None,
    file: _core.File,
    map_location: Any,
    pickle_module: Any,
    weights_only: bool | None,
    mmap: bool,
    options: _core.Options,
    pickle_load_args: dict[str, Any],
) -> Any:
    import torch

    from fastpersist import _rebuild

    weights_only = _weights_only(weights_only, pickle_module)
    if weights_only:
        if pickle_module is not None:
            raise ArgumentError(
                "load failed: weights_only=True and pickle_module exclude each other"
            )
        if pickle_load_args:
            warnings.warn("pickle_load_args only works if `weights_only=False`.", stacklevel=3)
    pickle_load_args.setdefault("encoding", "utf-8")
    # torch.load warns of arguments that the weights-only unpickler does not take.
    for_torch = {} if weights_only else pickle_load_args
    read_all = functools.cache(functools.partial(_read_all, file, path, options))
    unpickler: Any = pickle_module if pickle_module is not None else pickle
    if weights_only:
        unpickler = torch._weights_only_unpickler
    usual = (weights_only or unpickler is pickle) and pickle_load_args == {"encoding": "utf-8"}
    try:
        if mmap and path is not None:
            return _map(path, map_location, pickle_module, weights_only, for_torch)
        if usual and (made := _rebuild.plainly(file, read_all, map_location)):
            return made[0]
        if reason := _rebuild.self_test():
            _log.warn_once(f"torch.load reads in our place, after a check: {reason}")
            read_all()
            return torch.load(
                io.BytesIO(read_all().memoryview()) if path is None else os.fsdecode(path),
                map_location=map_location,
                pickle_module=pickle_module,
                weights_only=weights_only,
                **for_torch,
            )
        return _rebuild.through_torch(file, read_all, map_location, unpickler, pickle_load_args)
    except Error:
        raise
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        from fastpersist import _weights_only as refusals

        raise refusals.explain(error, file, path) from error


def _read_all(file: _core.File, path: bytes | None, options: _core.Options) -> _core.Arena:
    if not file.checksums:
        _log.warn_once(
            "a file was written with checksums switched off (set_crc32_options(False)): "
            "nothing could be compared"
        )
    arena = file.read_all(options)
    info = file.info
    if info["warning"]:
        _log.warn_once(info["warning"])
    _log.logger.debug("loaded %r: %s", path, info)
    return arena


def _weights_only(asked: bool | None, pickle_module: Any) -> bool:
    """As torch.load decides it."""
    forced = os.getenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in _TRUE
    forced_off = os.getenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in _TRUE
    if forced and forced_off:
        raise ArgumentError(
            "load failed: only one of TORCH_FORCE_WEIGHTS_ONLY_LOAD and "
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD can be set"
        )
    if forced:
        return True
    if asked is None:
        return pickle_module is None and not forced_off
    return bool(asked)


def _mmap_is_default() -> bool:
    try:
        from torch.utils.serialization import config
    except ImportError:  # torch before 2.6
        return False
    return bool(config.load.mmap)


def _map(
    path: bytes,
    map_location: Any,
    pickle_module: Any,
    weights_only: bool,
    pickle_load_args: dict[str, Any],
) -> Any:
    """The file was opened, so its structure and pickle are good; torch maps the rest."""
    import torch

    return torch.load(
        os.fsdecode(path),
        map_location=map_location,
        pickle_module=pickle_module,
        weights_only=weights_only,
        mmap=True,
        **pickle_load_args,
    )
