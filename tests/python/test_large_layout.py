# SPDX-License-Identifier: Apache-2.0
"""Files around and beyond 2 and 4 GiB, by their layout alone: no tensor is written or read.

torch writes its file with `skip_data`, as a sparse one; untouched `torch.empty` costs no memory.
Ours is laid out from the same state and compared wherever the file does not hold tensor data. torch
writes checksums of 0 for what it skipped, so ours are rendered with the checksums in its file.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastpersist import _capture, _core

GIB = 1 << 30
MAX32 = 0xFFFFFFFF

pytestmark = pytest.mark.skipif(
    not hasattr(torch.serialization, "skip_data"),
    reason="skipped: this torch has no skip_data to write sparse files with",
)


def untouched(size: int) -> torch.Tensor:
    """A tensor of this many bytes, in virtual memory only."""
    return torch.empty(size, dtype=torch.uint8)


def layout_of(state: Any, name: str) -> _core.Stream:
    captured = _capture.capture(state)
    prefix = _core.archive_prefix(os.fsencode(name))
    return _core.torch_stream(captured.records, prefix, captured.alignment)


def check(state: Any, folder: Path, corrupt: Callable[[bytes], bytes] = bytes) -> None:
    """Compares our layout of the state with the file of torch, which is removed again."""
    path = folder / "model.pt"
    try:
        with torch.serialization.skip_data():
            torch.save(state, path)
        stream = layout_of(state, "model.pt")
        assert stream.size == path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            checksums = [record.CRC for record in archive.infolist()]
        with open(path, "rb") as file:
            for index, (offset, length, kind, _) in enumerate(stream.extents()):
                if kind != "memory":
                    file.seek(offset)
                    ours = corrupt(stream.render(index, checksums))
                    assert ours == file.read(length), f"{kind} extent {index} at {offset}"
    finally:
        path.unlink(missing_ok=True)


def first_data_offset(state: Any) -> int:
    """Where the first storage's data begin."""
    return next(
        offset for offset, _, kind, _ in layout_of(state, "model.pt").extents() if kind == "memory"
    )


# --- One record ---

SIZES = [2 * GIB - 1, 2 * GIB, 2 * GIB + 1]
SIZES += [MAX32 - 1, MAX32, MAX32 + 1, MAX32 + 2, 5 * GIB]


@pytest.mark.parametrize("size", SIZES)
def test_a_record_of_this_size_equals_torch(size: int, tmp_path: Path) -> None:
    check([untouched(size)], tmp_path)


@pytest.mark.parametrize("size", [MAX32 - 1, MAX32, 5 * GIB])
def test_records_after_a_large_one_equal_torch(size: int, tmp_path: Path) -> None:
    check([untouched(size), untouched(10), untouched(0), untouched(3)], tmp_path)


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_a_record_that_begins_beyond_4_gib_equals_torch(size: int, tmp_path: Path) -> None:
    check({"large": untouched(4 * GIB + 5), "last": untouched(size)}, tmp_path)


def test_several_large_records_equal_torch(tmp_path: Path) -> None:
    sizes = [3 * GIB, 3 * GIB + 1, 5 * GIB, 100]
    check([untouched(size) for size in sizes], tmp_path)


def test_other_types_than_bytes_equal_torch(tmp_path: Path) -> None:
    state = {
        "floats": torch.empty(2**30 + 1),
        "complex": torch.empty(2**28, dtype=torch.complex128),
        "view": (base := torch.empty(2**31 + 7, dtype=torch.int16))[2**31 :],
        "base": base,
    }
    check(state, tmp_path)


# --- One header exactly at the limit ---


@pytest.mark.parametrize("at", [MAX32 - 1, MAX32, MAX32 + 1])
@pytest.mark.parametrize("last", [0, 10])
def test_a_header_at_this_offset_equals_torch(at: int, last: int, tmp_path: Path) -> None:
    descriptor = 16
    start = first_data_offset([untouched(MAX32 - 4096), untouched(last)])
    state = [untouched(at - descriptor - start), untouched(last)]
    records = layout_of(state, "model.pt").extents()
    body = next(extent for extent in records if extent[2] == "memory")
    assert body[0] + body[1] + descriptor == at
    check(state, tmp_path)


@pytest.mark.parametrize("at", [2 * GIB - 1, 2 * GIB])
def test_a_header_at_2_gib_equals_torch(at: int, tmp_path: Path) -> None:
    start = first_data_offset([untouched(2 * GIB - 4096), untouched(5)])
    check([untouched(at - 16 - start), untouched(5)], tmp_path)


# --- Alignment ---


@pytest.fixture(params=[1, 4096, 32768])
def alignment(request: pytest.FixtureRequest) -> Iterator[int]:
    config = pytest.importorskip("torch.utils.serialization.config")
    if not hasattr(torch.serialization, "_get_storage_alignment"):
        pytest.skip("skipped: torch before 2.7 has no storage_alignment")
    before = config.save.storage_alignment
    config.save.storage_alignment = request.param
    yield request.param
    config.save.storage_alignment = before


def test_large_records_at_any_alignment_equal_torch(alignment: int, tmp_path: Path) -> None:
    check([untouched(MAX32), untouched(7), untouched(0), untouched(5 * GIB)], tmp_path)


# --- The comparison itself ---


def test_the_comparison_sees_a_changed_byte(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="extent 0 at 0"):
        check([untouched(5)], tmp_path, corrupt=lambda data: data[:-1] + bytes([data[-1] ^ 1]))


def test_the_comparison_needs_the_right_checksums(tmp_path: Path) -> None:
    state = [untouched(5)]
    stream = layout_of(state, "model.pt")
    tail = len(stream.extents()) - 1
    count = len(_capture.capture(state).records) + 2  # version and id
    assert stream.render(tail, [0] * count) != stream.render(tail, [0] * (count - 1) + [1])


def test_small_files_agree_too(tmp_path: Path) -> None:
    check({"a": untouched(1), "b": untouched(0), "c": [untouched(4096)]}, tmp_path)
