# SPDX-License-Identifier: Apache-2.0
"""The exceptions of FastPersist. Every one derives from `Error`."""

from __future__ import annotations

import os

from fastpersist import _core


class Error(Exception):
    """Base of all FastPersist exceptions."""


class StorageError(Error, OSError):
    """The operating system refused or failed an operation.

    Attributes: `errno`, `strerror`, `filename` (as given), `offset` (bytes in the file, or None),
    and `operation` ("open", "preallocate", "write", "fdatasync", "rename", ...). The older file at
    the path is untouched unless the message says otherwise.
    """

    def __init__(
        self, message: str, errno: int, filename: str, offset: int | None, operation: str
    ) -> None:
        super().__init__(errno, os.strerror(errno), filename)
        self.message = message
        self.offset = offset
        self.operation = operation

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        # OSError would rebuild from its own three arguments.
        fields = (self.message, self.errno, self.filename, self.offset, self.operation)
        return (StorageError, fields)


class UnsupportedStateError(Error, ValueError):
    """The format cannot hold this state; the message names the key. Nothing on disk was touched."""


class ArgumentError(Error, ValueError):
    """An option or a name cannot be used. Nothing on disk was touched."""


class ForkedError(Error, RuntimeError):
    """The process was forked after FastPersist was used in its parent."""


def _make(
    code: str, operation: str, path: bytes, offset: int | None, errno: int, message: bytes
) -> Exception:
    """Turns the fields of a C++ error into an exception."""
    text = os.fsdecode(message)
    if code == "storage":
        return StorageError(text, errno, os.fsdecode(path), offset, operation)
    if code == "unsupported_state":
        return UnsupportedStateError(text)
    if code == "forked":
        return ForkedError(text)
    return ArgumentError(text)


_core.set_error_factory(_make)
