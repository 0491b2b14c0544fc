# SPDX-License-Identifier: Apache-2.0
"""Whether the files of a checkpoint are those that its manifest describes.

A file can be whole and still be another step's: sizes and the checksums inside it say nothing about
that. Only the central directory is read here, and compared with the manifest; that the data has
these checksums is seen in the pass that reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fastpersist._errors import (
    CorruptCheckpointError,
    NotFoundError,
    StorageError,
    UnsupportedFileError,
)

_MANIFEST = "manifest.json"
_NO_ARCHIVE = (
    zipfile.BadZipFile, zipfile.LargeZipFile, ValueError, NotImplementedError, EOFError,
    OverflowError, struct.error,
)  # fmt: skip
"""What zipfile raises for files that are none of ours."""


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

    @property
    def path(self) -> Path:
        """Raises UnsupportedFileError for one in several files."""
        if len(self.files) != 1:
            raise UnsupportedFileError(
                f"restore failed on {self.files[0].parent}: {self.name} lies in {len(self.files)} "
                "parts; put the parts one after the other into one file, and load that"
            )
        return self.files[0]


def compare(directory: Path, parts: list[Part]) -> None:
    """Compares files with the manifest in the directory, without reading their data.

    Raises: CorruptCheckpointError for a file that the manifest does not describe; NotFoundError,
        StorageError.
    """
    described = _record_crcs(directory / _MANIFEST)
    for part in parts:
        expected = described.get(part.name, [])
        if not expected:  # allowed by the format; then all bytes tell
            if not is_as_written(part):
                raise _another(part.path, "its CRC-32 is another")
            continue
        found = _central_directory(part.path)
        if len(found) != len(expected):
            raise _another(part.path, f"it has {len(found)} records instead of {len(expected)}")
        for (name, crc), wanted in zip(found, expected, strict=True):
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


def _record_crcs(path: Path) -> dict[str, list[int]]:
    """From the names of the streams to the CRC-32 of their records, in file order."""
    with _opened(path) as file:
        text = file.read()
    try:
        streams: list[dict[str, Any]] = json.loads(text)["manifest"]["streams"]
        return {s["name"]: [int(crc, 16) for crc in s["record_crc32s"]] for s in streams}
    except (ValueError, KeyError, TypeError) as error:  # it was good when it was listed
        raise CorruptCheckpointError(
            f"restore failed on {path}: the manifest is damaged: {error}", str(path)
        ) from error


def _central_directory(path: Path) -> list[tuple[str, int]]:
    """(name, CRC-32) of the records, in file order."""
    with _opened(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        except _NO_ARCHIVE as error:
            raise _another(path, str(error)) from error
    return [(record.filename, record.CRC) for record in records]


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
