# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""What the tests of loading share: how torch.load's object and ours are compared, every way to hand
over a file, and archives that no writer of checkpoints would make.

`difference` demands more than `zoo.difference`: also what decides how autograd and resizing treat a
tensor. `records_of` and `zip_of` take an archive apart and put one together, field by field.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pathlib
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import zoo

import fastpersist as fp


class _Strict(zoo._Comparison):
    def _tensor(self, a: torch.Tensor, b: torch.Tensor, at: str) -> str | None:
        return self._facts(_autograd(a), _autograd(b), at) or super()._tensor(a, b, at)


def _autograd(tensor: torch.Tensor) -> dict[str, object]:
    if torch.nn.parameter.is_lazy(tensor):
        return {}
    hooks = tensor._backward_hooks
    facts = {"leaf": tensor.is_leaf, "hooks": (type(hooks), len(hooks or ()))}
    if tensor.layout == torch.strided and not tensor.is_nested:
        facts["view"] = tensor._is_view()
    if tensor.is_meta:
        facts |= {"stride": tensor.stride(), "bytes": tensor.untyped_storage().nbytes()}
    return facts


def difference(theirs: object, ours: object) -> str | None:
    """Where our object is not torch.load's, as a sentence; None when it is."""
    return _Strict().difference(theirs, ours, "state")


@dataclasses.dataclass
class Outcome:
    """What a call gave: an object, or an exception."""

    value: Any = None
    error: BaseException | None = None


def outcome(function: Callable[..., Any], *arguments: Any, **named: Any) -> Outcome:
    try:
        return Outcome(value=function(*arguments, **named))
    except Exception as error:
        return Outcome(error=error)


def mismatch(theirs: Outcome, ours: Outcome) -> str | None:
    """Why our outcome is not what torch's demands of it; None when it is.

    Where torch refuses for weights_only's sake we say so; where it fails we fail in the same way,
    or because the file is damaged.
    """
    if theirs.error is None and ours.error is None:
        return difference(theirs.value, ours.value)
    if theirs.error is None or ours.error is None:
        return f"torch: {theirs.error!r}; ours: {ours.error!r}"
    wanted: type = type(theirs.error)
    if isinstance(theirs.error, pickle.UnpicklingError):
        wanted = fp.WeightsOnlyError
    if not isinstance(ours.error, (wanted, fp.CorruptCheckpointError)):
        return f"torch raises {theirs.error!r}; ours: {ours.error!r}"
    return None


class OnlyTheNeeded:
    """A file object with read, seek and tell, and nothing more."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = io.BytesIO(pathlib.Path(path).read_bytes())

    def read(self, size: int = -1) -> bytes:
        return self._file.read(min(size, 777) if size > 777 else size)  # falls short

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    with open(path, "rb") as file:
        yield file


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@contextlib.contextmanager
def safe_globals(allowed: list[Any]) -> Iterator[None]:
    """torch.serialization.safe_globals, which came with torch 2.5."""
    before = list(torch.serialization.get_safe_globals())  # which may be the list itself
    torch.serialization.add_safe_globals(allowed)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


WAYS: dict[str, Callable[[str], Any]] = {
    "str": contextlib.nullcontext,
    "bytes": lambda path: contextlib.nullcontext(os.fsencode(path)),
    "PathLike": lambda path: contextlib.nullcontext(pathlib.Path(path)),
    "open file": _opened,
    "BytesIO": lambda path: contextlib.nullcontext(io.BytesIO(pathlib.Path(path).read_bytes())),
    "read, seek, tell": lambda path: contextlib.nullcontext(OnlyTheNeeded(path)),
}
"""Every way to hand a file over: from a path to a context that gives the first argument."""


# --- Archives ---


@dataclasses.dataclass
class Record:
    """One record of an archive, with what its headers will say."""

    name: bytes
    body: bytes
    crc: int | None = None  # None: the right one
    flags: int = 0
    method: int = 0
    size: int | None = None  # None: the right one
    local_name: bytes | None = None  # None: the same
    extra: bytes = b""  # of the local header
    descriptor: bytes = b""  # after the body
    gap: bytes = b""  # before the local header
    offset: int | None = None  # what the directory says; None: the right one


def records_of(data: bytes) -> list[Record]:
    """The records of an archive, in file order."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    return [Record(i.filename.encode(), archive.read(i)) for i in archive.infolist()]


def zip_of(records: list[Record], before: bytes = b"", after: bytes = b"") -> bytes:
    """An archive of these records. before: in front of the directory; after: after the end."""
    out, places = b"", []
    for record in records:
        out += record.gap
        places.append(len(out) if record.offset is None else record.offset)
        name = record.name if record.local_name is None else record.local_name
        out += b"PK\x03\x04" + _common(record, len(name), len(record.extra))
        out += name + record.extra + record.body + record.descriptor
    out += before
    start = len(out)
    for record, place in zip(records, places, strict=True):
        out += b"PK\x01\x02" + struct.pack("<H", 20) + _common(record, len(record.name), 0)
        out += struct.pack("<HHHII", 0, 0, 0, 0, place) + record.name
    count = len(records)
    end = struct.pack("<HHHHIIH", 0, 0, count, count, len(out) - start, start, 0)
    return out + b"PK\x05\x06" + end + after


def _common(record: Record, name: int, extra: int) -> bytes:
    """What a local header and a directory record have in common."""
    crc = zlib.crc32(record.body) if record.crc is None else record.crc
    size = len(record.body) if record.size is None else record.size
    head = struct.pack("<HHHHH", 20, record.flags, record.method, 0, 0x21)
    return head + struct.pack("<IIIHH", crc, size, size, name, extra)


def saved(state: object, **arguments: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(state, buffer, **arguments)
    return buffer.getvalue()


def with_pickle(data: bytes, program: bytes) -> bytes:
    """A checkpoint with this program in the place of its own pickle."""
    records = records_of(data)
    for record in records:
        if record.name.endswith(b"/data.pkl"):
            record.body = program
    return zip_of(records)
