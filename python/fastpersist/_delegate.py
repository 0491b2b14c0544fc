# SPDX-License-Identifier: Apache-2.0
"""What we do not serve ourselves is written by torch.save, and published atomically all the same."""

from __future__ import annotations

import errno
import os
import time
import types
from typing import Any

import torch

from fastpersist import _capture, _core, _explain, _log
from fastpersist._errors import ArgumentError, StorageError
from fastpersist._errors import StorageError
from fastpersist._info import SaveInfo

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
        size = _write(obj, target, torch_arguments)
    else:
        size = _publish(obj, path, torch_arguments, options)
    total = time.perf_counter() - start
    return SaveInfo(
        path=None if path is None else os.fsdecode(path),
        bytes=size,
        seconds=types.MappingProxyType({"total": total, "stall": total}),
        engine="torch",
        engine_reason=why,
        direct=False,
    )


class _Sink:
    """Stands between torch.save and a file: counts the bytes and keeps the first error.

    torch's writer answers a failed write by an error that says nothing of the cause.
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


def write_all(target: Any, data: Any) -> None:
    """target.write(data), again for what an unbuffered file object did not take at once."""
    rest = memoryview(data)
    while rest:
        written = target.write(rest)
        if not isinstance(written, int):
            return  # objects that do not say took everything
        if not 0 < written <= len(rest):
            what = f"{type(target).__name__}.write took {written} of {len(rest)} bytes"
            raise OSError(errno.EIO, what)
        rest = rest[written:]


def _write(obj: Any, target: Any, torch_arguments: TorchArguments) -> int:
    """Raises what target raises, and UnsupportedStateError for what torch cannot pickle."""
    sink = _Sink(target)
    try:
        torch.save(obj, sink, *torch_arguments)
    except Exception as error:
        if sink.error is not None:
            raise sink.error from None

        def capture(part: Any) -> None:
            torch.save(part, _Sink(None), *torch_arguments)

        raise _explain.explain(error, obj, capture) from error
    if sink.error is not None:
        raise sink.error
    return sink.size


def _publish(
    obj: Any, path: bytes, torch_arguments: tuple[Any, int, bool, bool], options: _core.Options
) -> int:
    publication = _core.Publication(path, options)
    try:
        sink = _Sink(publication.fileno())
        torch.save(obj, sink, *torch_arguments)
        if sink.error is not None:
            raise _storage_error(sink.error, os.fsdecode(path), sink.size)
        publication.publish(sink.size)
    finally:
        publication.close()
    return sink.size


class _Sink:
    """A file object over a descriptor. It keeps the first error instead of raising it: what is raised
    inside torch's writer comes out as another exception, or ends the process (pytorch/pytorch#156955).
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        length = len(rest)
        while len(rest) > 0 and self.error is None:
            try:
                written = os.write(self._fd, rest)
            except OSError as error:
                self.error = error
                break
            self.size += written
            rest = rest[written:]
        return length

    def flush(self) -> None:
        """Nothing is kept back."""


def _storage_error(error: OSError, path: str, offset: int) -> StorageError:
    number = error.errno or 0
    message = (
        f"write failed on {path} at offset {offset}: {os.strerror(number)} (errno {number}); "
        "free space, raise the quota or the limit, or save elsewhere"
    )
    return StorageError(message, number, path, offset, "write")
