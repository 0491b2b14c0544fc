# SPDX-License-Identifier: Apache-2.0
"""`save`: one object becomes one file, as torch.save or the safetensors package would write it."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping
from typing import Any

from fastpersist import _core, _log
from fastpersist._errors import ArgumentError, Error, UnsupportedStateError
from fastpersist._info import SaveInfo, all_in_the_call, from_core
from fastpersist._options import Options, resolve

_CHUNK_BYTES = 4 << 20


def save(
    obj: Any,
    f: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    format: str | None = None,
    compact: bool = False,
    metadata: Mapping[str, str] | None = None,
    options: Options | None = None,
) -> SaveInfo:
    """Saves obj to a file, as `torch.save` does: the same objects, the same bytes in the file.

    The file appears at its path complete and on stable storage, or not at all; an older file there
    stays as it is on any failure.

    Args:
        obj: anything that torch.save takes; for safetensors a dict of names to torch tensors or
            NumPy arrays.
        f: path (str, bytes, os.PathLike), or a writable file object.
        pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record:
            as in torch.save. The old format is written by torch itself, and published atomically.
        format: "torch" or "safetensors"; None: by the suffix of the path.
        compact: write only the parts of storages that tensors refer to; aliasing among the saved
            tensors is kept. Plain CPU tensors only.
        metadata: strings for the header of a safetensors file.
        options: how the save is carried out.

    Returns: what was written, how, and where the time went.

    Raises: `UnsupportedStateError` when obj cannot be saved in this format (the key is named) and
        `ArgumentError`, both before the disk is touched; `StorageError` (an OSError) with
        operation, offset and errno; `ForkedError` in a child forked after FastPersist was used.

    Thread-safe. The memory of obj must not change until save returns; the GIL is free meanwhile.
    """
    path, target = _target(f)
    kind = _format(format, path)
    core_options = resolve(options)
    if metadata is not None and kind != "safetensors":
        raise ArgumentError("save failed: metadata is for safetensors files; put it into the state")
    if kind == "safetensors":
        return _save_safetensors(obj, path, target, metadata, compact, core_options)
    return _save_torch(
        obj,
        path,
        target,
        (pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record),
        compact,
        core_options,
    )


def _target(f: Any) -> tuple[bytes | None, Any]:
    """(path, None) or (None, file object)."""
    if isinstance(f, str | bytes | os.PathLike):
        path = os.fsencode(f)
        if b"\0" in path:
            raise ArgumentError("save failed: the path contains a null byte")
        return path, None
    if callable(getattr(f, "write", None)):
        return None, f
    raise ArgumentError(
        f"save failed: {type(f).__name__} is neither a path nor a file object with a method 'write'"
    )


def _format(wanted: str | None, path: bytes | None) -> str:
    if wanted is None:
        return "safetensors" if path is not None and path.endswith(b".safetensors") else "torch"
    if wanted not in ("torch", "safetensors"):
        raise ArgumentError(f"save failed: format {wanted!r} is neither 'torch' nor 'safetensors'")
    return wanted


def _save_torch(
    obj: Any,
    path: bytes | None,
    target: Any,
    torch_arguments: tuple[Any, int, bool, bool],
    compact: bool,
    options: _core.Options,
) -> SaveInfo:
    from fastpersist import _capture, _delegate, _foresee

    start = time.perf_counter()
    pickle_module, protocol, new_format, disable_byteorder = torch_arguments
    if reason := _delegate.reason(new_format):
        if compact:
            raise UnsupportedStateError(f"save failed: compact=True cannot be served: {reason}")
        return _delegate.save(obj, path, target, torch_arguments, options, reason)
    prefix = "archive" if path is None else _core.archive_prefix(path)
    if path is not None and os.path.basename(path) in (b"", b".", b".."):
        prefix = "none"  # no file can have this name; the core says so when it looks at the path
    if not prefix:
        raise ArgumentError(
            f"save failed: {os.fsdecode(path or b'')!r} has no name before its last dot, after "
            "which torch calls the archive; choose another name"
        )
    captured = _capture.capture_or_explain(obj, pickle_module, protocol, disable_byteorder, compact)
    if pickle_module is pickle and protocol == 2:
        _foresee.foresee(obj, captured, _log.logger.info)
    stream = _core.torch_stream(captured.records, prefix, captured.alignment)
    seconds = time.perf_counter() - start
    info = _write(stream, path, target, options, seconds, captured.referenced_bytes)
    del captured  # the storages were needed until here
    return info


def _save_safetensors(
    obj: Any,
    path: bytes | None,
    target: Any,
    metadata: Mapping[str, str] | None,
    compact: bool,
    options: _core.Options,
) -> SaveInfo:
    from fastpersist import _safetensors

    del compact  # safetensors files never hold more than the tensors
    start = time.perf_counter()
    views, keep = _safetensors.views(obj)
    checked = {} if metadata is None else _safetensors.checked_metadata(metadata)
    stream = _core.safetensors_stream(views, checked)
    seconds = time.perf_counter() - start
    info = _write(stream, path, target, options, seconds, sum(view[4] for view in views))
    del keep
    return info


def _write(
    stream: _core.Stream,
    path: bytes | None,
    target: Any,
    options: _core.Options,
    capture_seconds: float,
    referenced_bytes: int | None,
) -> SaveInfo:
    if path is None:
        return _write_to_object(stream, target, capture_seconds, referenced_bytes)
    core_info = _core.save(stream, path, options)
    if core_info.warning:
        _log.warn_once(core_info.warning)
    info = from_core(core_info, os.fsdecode(path), capture_seconds, referenced_bytes)
    _log.logger.debug("saved %r; engine: %s", info, info.engine_reason)
    return info


def _write_to_object(
    stream: _core.Stream, target: Any, capture_seconds: float, referenced_bytes: int | None
) -> SaveInfo:
    start = time.perf_counter()
    reader = _core.Reader(stream)
    while chunk := reader.read(_CHUNK_BYTES):
        write_all(target, chunk)
    if callable(flush := getattr(target, "flush", None)):
        flush()
    write = time.perf_counter() - start
    total = capture_seconds + write
    return SaveInfo(
        path=None,
        bytes=stream.size,
        seconds=all_in_the_call(total, capture=capture_seconds, write=write),
        engine="file object",
        engine_reason="a file object was given",
        direct=False,
        referenced_bytes=referenced_bytes,
    )


def write_all(target: Any, data: Any) -> None:
    """target.write(data), and again for what an unbuffered file object did not take at once."""
    rest = memoryview(data)
    while rest:
        written = target.write(rest)
        if not isinstance(written, int):
            return  # objects that do not say took everything
        if not 0 < written <= len(rest):
            name = type(target).__name__
            raise Error(f"save failed: {name}.write took {written} of {len(rest)} bytes")
        rest = rest[written:]
