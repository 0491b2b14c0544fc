# SPDX-License-Identifier: Apache-2.0
"""What we do not serve ourselves is written by torch.save, published atomically all the same."""

from __future__ import annotations

import errno
import os
import time
from typing import Any

import torch

from fastpersist import _capture, _core, _explain, _log
from fastpersist._errors import ArgumentError, StorageError
from fastpersist._info import SaveInfo, all_in_the_call
from fastpersist._save import write_all

_MAX_ALIGNMENT = 32768

TorchArguments = tuple[Any, int, bool, bool]
"""pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record"""


def reason(new_format: bool) -> str:
    """Why torch.save has to write; empty when we can."""
    if not new_format:
        return "the format from before torch 1.6 was asked for"
    if _capture.skips_data():
        return "torch.serialization.skip_data is active"
    # Before the self-test, which would fail, and remember it, for this passing setting's sake.
    alignment = _capture.alignment()
    if alignment < 1:  # torch would divide by it
        raise ArgumentError(f"save failed: torch's storage_alignment {alignment} is not positive")
    if alignment & (alignment - 1) or alignment > _MAX_ALIGNMENT:
        return f"storage_alignment {alignment} is not a power of two up to {_MAX_ALIGNMENT}"
    return _capture.self_test()


def save(
    obj: Any,
    path: bytes | None,
    target: Any,
    torch_arguments: TorchArguments,
    options: _core.Options,
    why: str,
) -> SaveInfo:
    """torch.save(obj), to a temporary file that replaces path, or to the file object."""
    asked_for = not torch_arguments[2] or _capture.skips_data()
    if not asked_for:
        _log.warn_once(f"torch.save writes in our place: {why}")
    start = time.perf_counter()
    if _capture.skips_data():
        size = _skip(obj, path, target, torch_arguments)
    elif path is None:
        size = _write(obj, _Sink(target), torch_arguments)
    else:
        size = _publish(obj, path, torch_arguments, options)
    total = time.perf_counter() - start
    return SaveInfo(
        path=None if path is None else os.fsdecode(path),
        bytes=size,
        seconds=all_in_the_call(total, write=total),
        engine="torch",
        engine_reason=why,
        direct=False,
    )


class _Sink:
    """Stands between torch.save and a file: counts the bytes and keeps the first error.

    An exception that passes through torch's writer comes out as another one, which says nothing of
    the cause, or ends the process.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self.size = 0
        self.error: Exception | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self.error is None and self._target is not None:
            try:
                write_all(self._target, view)
            except Exception as error:
                self.error = error
        self.size += view.nbytes if self.error is None else 0
        return view.nbytes

    def flush(self) -> None:
        if self.error is None and callable(flush := getattr(self._target, "flush", None)):
            flush()


def _write(obj: Any, sink: _Sink, torch_arguments: TorchArguments) -> int:
    """Raises what the file raised, and UnsupportedStateError for what torch cannot pickle."""
    file: Any = sink  # all that torch needs of one
    try:
        torch.serialization.save(obj, file, *torch_arguments)
    except Exception as error:
        if sink.error is not None:
            raise sink.error from None
        if isinstance(error, MemoryError):  # no fault of the state
            raise

        def capture(part: Any) -> None:
            nowhere: Any = _Sink(None)
            torch.serialization.save(part, nowhere, *torch_arguments)

        raise _explain.explain(error, obj, capture) from error
    if sink.error is not None:
        raise sink.error
    return sink.size


def _publish(obj: Any, path: bytes, torch_arguments: TorchArguments, options: _core.Options) -> int:
    publication = _core.Publication(path, options)
    try:
        with os.fdopen(os.dup(publication.fileno()), "wb", buffering=0) as file:
            sink = _Sink(file)
            try:
                size = _write(obj, sink, torch_arguments)
            except OSError as error:
                raise _storage_error(error, os.fsdecode(path), sink.size) from error
        publication.publish(size)
    finally:
        publication.close()
    return size


def _storage_error(error: OSError, path: str, offset: int) -> StorageError:
    number = error.errno or errno.EIO
    message = (
        f"write failed on {path} at offset {offset}: {os.strerror(number)} (errno {number}); "
        "free space, raise the quota or the limit, or save elsewhere"
    )
    return StorageError(message, number, path, offset, "write")


def _skip(obj: Any, path: bytes | None, target: Any, torch_arguments: TorchArguments) -> int:
    """Only torch can leave holes, and only in a file that it opened itself."""
    if path is None:
        torch.serialization.save(obj, target, *torch_arguments)
        return 0
    torch.serialization.save(obj, os.fsdecode(path), *torch_arguments)
    return os.path.getsize(path)
