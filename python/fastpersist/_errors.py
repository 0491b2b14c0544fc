# SPDX-License-Identifier: Apache-2.0
"""The exceptions of FastPersist. Every one derives from `Error`."""

from __future__ import annotations

import os
import pickle

from fastpersist import _core


class Error(Exception):
    """Base of all FastPersist exceptions."""


class StorageError(Error, OSError):
    """The operating system refused or failed an operation.

    Attributes: `errno`, `strerror`, `filename` (as given), `offset` (bytes in the file, or None),
    `operation` ("open", "preallocate", "write", "fdatasync", "rename", ...), and
    `partially_restored` (True when existing tensors were already overwritten). The older file at
    the path is untouched unless the message says otherwise.
    """

    def __init__(
        self,
        message: str,
        errno: int,
        filename: str,
        offset: int | None,
        operation: str,
        partially_restored: bool = False,
    ) -> None:
        super().__init__(errno, os.strerror(errno), filename)
        self.message = message
        self.offset = offset
        self.operation = operation
        self.partially_restored = partially_restored

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        # OSError would rebuild from its own three arguments.
        fields = (self.message, self.errno, self.filename, self.offset, self.operation)
        return (type(self), (*fields, self.partially_restored))


class NotFoundError(StorageError, FileNotFoundError):
    """There is no file at this path."""


class CorruptCheckpointError(Error):
    """What was read is damaged: a checksum differs, or the structure of the file is broken.

    Attributes: `filename` (as given), `tensor` (name of the tensor or record, or None), `offset`
    (bytes in the file, or None), `expected` and `found` (CRC-32, or None where no checksum is
    concerned), and `partially_restored` (True when existing tensors were already overwritten).
    """

    def __init__(
        self,
        message: str,
        filename: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        expected: int | None = None,
        found: int | None = None,
        partially_restored: bool = False,
    ) -> None:
        super().__init__(message)
        self.filename = filename
        self.tensor = tensor
        self.offset = offset
        self.expected = expected
        self.found = found
        self.partially_restored = partially_restored

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.args[0], self.filename, self.tensor, self.offset, self.expected, self.found)
        return (CorruptCheckpointError, (*fields, self.partially_restored))


class MismatchError(Error, ValueError):
    """The file does not fit the state that it should fill. Nothing was touched, unless a module
    that judges for itself (one with hooks for `load_state_dict`) refused; the message says so.

    Attributes: `missing` (names that the state has and the file lacks), `unexpected` (the other way
    round), and `different`, a list of (name, how they differ).
    """

    def __init__(
        self,
        message: str,
        missing: list[str] | None = None,
        unexpected: list[str] | None = None,
        different: list[tuple[str, str]] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing = missing or []
        self.unexpected = unexpected or []
        self.different = different or []

    def __reduce__(self) -> tuple[object, ...]:
        return (
            MismatchError,
            (self.args[0], self.missing, self.unexpected, self.different),
        )


class UnsupportedFileError(Error, ValueError):
    """A file of a kind that is recognised and not read here; the message says what to do."""


class WeightsOnlyError(Error, pickle.UnpicklingError):
    """The file holds objects that `weights_only=True` does not make.

    Attributes: `entries`, a list of (place in the state, "module name" of what would be called).
    """

    def __init__(self, message: str, entries: list[tuple[str, str]]) -> None:
        super().__init__(message)
        self.entries = entries

    def __reduce__(self) -> tuple[object, ...]:
        return (WeightsOnlyError, (self.args[0], self.entries))


class UnsupportedStateError(Error, ValueError):
    """The format cannot hold this state; the message names the key. Nothing on disk was touched."""


class ArgumentError(Error, ValueError):
    """An option or a name cannot be used. Nothing on disk was touched."""


class StateChangedError(Error, RuntimeError):
    """Memory changed while it was being saved. Nothing was committed; training may go on.

    Attributes: `tensor` (its place in the state, or None).
    """

    def __init__(self, message: str, tensor: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor

    def __reduce__(self) -> tuple[object, ...]:
        return (StateChangedError, (self.args[0], self.tensor))


class SaveAbandonedError(Error, TimeoutError):
    """A save was given up because it took longer than it may. Nothing was committed."""


class SaveInFlightError(Error, RuntimeError):
    """A save was asked for while another is in flight: with `in_flight="refuse"`, when the storage
    does not answer at all, or where `save` or `close` would have to wait for themselves."""


class ForkedError(Error, RuntimeError):
    """The process was forked after FastPersist was used in its parent."""


def _make(
    code: str,
    operation: str,
    path: bytes,
    offset: int | None,
    errno: int,
    message: bytes,
    entry: bytes,
    expected: int | None,
    found: int | None,
) -> Exception:
    """Turns the fields of a C++ error into an exception."""
    text = os.fsdecode(message)
    filename = os.fsdecode(path)
    if code == "storage":
        return StorageError(text, errno, filename, offset, operation)
    if code == "not_found":
        return NotFoundError(text, errno, filename, offset, operation)
    if code == "corrupt":
        tensor = os.fsdecode(entry) or None
        return CorruptCheckpointError(text, filename or None, tensor, offset, expected, found)
    if code == "unsupported_file":
        return UnsupportedFileError(text)
    if code == "unsupported_state":
        return UnsupportedStateError(text)
    if code == "forked":
        return ForkedError(text)
    if code == "state_changed":
        return StateChangedError(text, os.fsdecode(entry) or None)
    if code == "abandoned":
        return SaveAbandonedError(text)
    return ArgumentError(text)


_core.set_error_factory(_make)
