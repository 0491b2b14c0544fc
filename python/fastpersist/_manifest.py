# SPDX-License-Identifier: Apache-2.0
"""Whether the files of a checkpoint are those that its manifest describes.

A file can be whole and still be another step's: sizes and the checksums inside it say nothing about
that. Only the central directory is read here, and compared with the manifest; that the data has
these checksums is seen in the pass that reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fastpersist import _core
from fastpersist._errors import (
    CorruptCheckpointError,
    NotFoundError,
    StorageError,
    UnsupportedFileError,
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A file of a checkpoint, as the catalog knows it from the manifest."""

    name: str
    files: tuple[Path, ...]
    """One, unless several writers wrote it."""
    size: int
    """In bytes."""
    crc: int
    """CRC-32 of all bytes."""
    record_crcs: tuple[int, ...]
    """Of the records of a torch file, in file order. Empty where the manifest has none."""

    @property
    def path(self) -> Path:
        """Raises UnsupportedFileError for one in several files."""
        if len(self.files) != 1:
            raise UnsupportedFileError(
                f"restore failed on {self.files[0].parent}: {self.name} lies in {len(self.files)} "
                "parts; put the parts one after the other into one file, and load that"
            )
        return self.files[0]


def compare(parts: list[Part]) -> None:
    """Compares files with what their manifest says of them, without reading their data.

    Raises: CorruptCheckpointError for a file that the manifest does not describe; NotFoundError,
        StorageError.
    """
    for part in parts:
        if not part.record_crcs:  # allowed by the format; then all bytes tell
            if not is_as_written(part):
                raise _another(part.path, "its CRC-32 is another")
            continue
        found = _stated(part.path)
        if len(found) != len(part.record_crcs):
            count = len(part.record_crcs)
            raise _another(part.path, f"it has {len(found)} records instead of {count}")
        for (name, crc), wanted in zip(found, part.record_crcs, strict=True):
            if crc != wanted:
                what = f"record '{name}' states CRC-32 {crc:08x} instead of {wanted:08x}"
                raise _another(part.path, what, name, wanted, crc)


def is_as_written(part: Part) -> bool:
    """All bytes are what the manifest says. Reads them."""
    crc, read = 0, 0
    for path in part.files:
        with _opened(path) as file:
            while block := file.read(1 << 20):
                crc, read = zlib.crc32(block, crc), read + len(block)
    return (read, crc) == (part.size, part.crc)


def _stated(path: Path) -> list[tuple[str, int]]:
    """(name, CRC-32) of the records, in file order, as the file's central directory has them."""
    try:
        return _core.record_checksums(os.fsencode(path))
    except (CorruptCheckpointError, UnsupportedFileError) as error:
        raise _another(path, str(error)) from error


def _another(
    path: Path,
    why: str,
    record: str | None = None,
    expected: int | None = None,
    found: int | None = None,
) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"restore failed on {path}: it is not the file that the manifest describes: {why}",
        str(path),
        record,
        None,
        expected,
        found,
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        kind = NotFoundError if isinstance(error, FileNotFoundError) else StorageError
        number = error.errno or 0
        message = f"open failed on {path}: {error.strerror} (errno {number})"
        raise kind(message, number, str(path), None, "open") from error
