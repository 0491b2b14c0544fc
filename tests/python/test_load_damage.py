# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints: whatever bit is flipped and wherever the file is cut, loading either fails
with an error that says what and where, or gives exactly what was saved."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from load_support import Record, difference, outcome, records_of, saved, zip_of

import fastpersist as fp


def small_state() -> dict[str, Any]:
    weight = torch.arange(24.0)
    return {"step": 3, "model": OrderedDict(weight=weight, row=weight[3:7].view(2, 2))}


def writer_of_torch() -> bytes:
    return saved(small_state())


def writer_of_python() -> bytes:
    """The same records without descriptors, alignment or extra fields."""
    return zip_of(records_of(saved(small_state())))


def safetensors() -> bytes:
    buffer = io.BytesIO()
    fp.save({"weight": torch.arange(24.0)}, buffer, format="safetensors")
    return buffer.getvalue()


# --- Flipped bits ---


def flips(data: bytes, bit: int) -> list[str]:
    """Loads the file with that bit of each byte flipped; what went wrong."""
    right, wrong = torch.load(io.BytesIO(data)), []
    assert difference(right, fp.load(io.BytesIO(data))) is None
    damaged = bytearray(data)
    for at in range(len(data)):
        damaged[at] ^= 1 << bit
        got = outcome(fp.load, io.BytesIO(damaged))
        damaged[at] ^= 1 << bit
        if got.error is not None:
            if not isinstance(got.error, fp.Error) or " failed" not in str(got.error):
                wrong.append(f"byte {at}, bit {bit}: {got.error!r}")
        elif found := difference(right, got.value):
            wrong.append(f"byte {at}, bit {bit}: another object: {found}")
    return wrong


@pytest.mark.parametrize("bit", [0, 2, 5, 7])
@pytest.mark.parametrize("writer", [writer_of_torch, writer_of_python], ids=["torch", "python"])
def test_no_flipped_bit_gives_another_object(writer: Any, bit: int) -> None:
    assert flips(writer(), bit) == []


@pytest.mark.parametrize("seed", [random.randrange(1 << 32)])
def test_no_flipped_byte_of_a_file_on_disk_gives_another_object(seed: int, tmp_path: Path) -> None:
    """The seed is in the name of the test."""
    path, data = tmp_path / "model.pt", writer_of_torch()
    right, chance = torch.load(io.BytesIO(data)), random.Random(seed)
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= chance.randrange(1, 256)
        path.write_bytes(damaged)
        got = outcome(fp.load, path)
        if got.error is None:
            assert difference(right, got.value) is None, (at, damaged[at])
        else:
            assert isinstance(got.error, fp.Error), (at, got.error)
            assert str(path) in str(got.error), (at, got.error)


def flipped(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def body_of(path: Path, name: str) -> int:
    """Where the body of a record begins."""
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo(name).header_offset
    name_length, extra_length = struct.unpack_from("<HH", path.read_bytes(), start + 26)
    return start + 30 + int(name_length) + int(extra_length)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    torch.save({"first": torch.zeros(9), "layers": [{"bias": torch.arange(5000.0)}]}, path)
    return path


def test_a_damaged_tensor_is_named_with_place_and_both_checksums(model: Path) -> None:
    expected = zipfile.ZipFile(model).getinfo("model/data/1").CRC
    body = body_of(model, "model/data/1")
    flipped(model, body + 12345, 3)
    with pytest.raises(fp.CorruptCheckpointError) as caught:
        fp.load(model)
    error = caught.value
    assert (error.filename, error.tensor, error.offset) == (str(model), "layers.0.bias", body)
    assert error.expected == expected
    found = zipfile.crc32(model.read_bytes()[body : body + 20000])  # type: ignore[attr-defined]
    assert error.found == found
    assert not error.partially_restored
    for part in (str(model), "layers.0.bias", str(body), f"{expected:08x}", f"{found:08x}"):
        assert part in str(error)
    assert "another copy" in str(error)


def test_the_error_of_damage_can_be_pickled(model: Path) -> None:
    flipped(model, body_of(model, "model/data/1"))
    with pytest.raises(fp.CorruptCheckpointError) as caught:
        fp.load(model)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), vars(again)) == (
        fp.CorruptCheckpointError,
        str(caught.value),
        vars(caught.value),
    )


@pytest.mark.parametrize("record", ["data.pkl", "byteorder", "version", ".data/serialization_id"])
def test_a_damaged_record_is_named(record: str, model: Path) -> None:
    flipped(model, body_of(model, f"model/{record}"))
    with pytest.raises(fp.CorruptCheckpointError, match=record) as caught:
        fp.load(model)
    assert caught.value.tensor == f"model/{record}"
    assert caught.value.expected != caught.value.found


def test_damage_is_found_by_every_engine_and_in_every_block(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({"w": torch.zeros(200_000)}, path)
    body = body_of(path, "model/data/0")
    for engine in ("uring", "libaio", "threads", "buffered"):
        for at in (0, 4095, 4096, 400_000, 799_999):
            flipped(path, body + at)
            options = fp.Options(engine=engine, block_bytes=65536)
            with pytest.raises(fp.CorruptCheckpointError, match="'w'"):
                fp.load(path, options=options)
            flipped(path, body + at)
    assert fp.load(path)["w"].sum() == 0


def test_checksums_of_zero_mean_that_there_are_none(tmp_path: Path) -> None:
    """torch.serialization.set_crc32_options(False) writes such files."""
    records = records_of(writer_of_torch())
    for record in records:
        record.crc = 0
    path = tmp_path / "model.pt"
    path.write_bytes(zip_of(records))
    assert difference(torch.load(path), fp.load(path)) is None
    records[0].crc = 5  # one of them is there, so all must be
    path.write_bytes(zip_of(records))
    with pytest.raises(fp.CorruptCheckpointError):
        fp.load(path)


# --- Cut files ---


@pytest.mark.parametrize("cut", [1, 22, 100, "half", "all"])
@pytest.mark.parametrize("kind", ["model.pt", "model.safetensors"])
def test_a_cut_file_is_refused(kind: str, cut: Any, tmp_path: Path) -> None:
    path = tmp_path / kind
    fp.save({"w": torch.arange(5000.0)}, path)
    size = path.stat().st_size
    os.truncate(path, size - {"half": size // 2, "all": size}.get(cut, cut))
    for argument in (path, io.BytesIO(path.read_bytes())):
        with pytest.raises(fp.CorruptCheckpointError) as caught:
            fp.load(argument)
        name = str(path) if argument is path else "<BytesIO>"
        assert caught.value.filename == name
        assert f"read failed on {name}" in str(caught.value)


def test_a_file_cut_anywhere_is_refused() -> None:
    data = writer_of_torch()
    for size in range(len(data)):
        assert isinstance(outcome(fp.load, io.BytesIO(data[:size])).error, fp.Error), size
    data = safetensors()
    for size in range(len(data)):
        assert isinstance(outcome(fp.load, io.BytesIO(data[:size])).error, fp.Error), size


@pytest.mark.parametrize(
    "after", [b"x", b"\0", b"\0" * 4096, b"\0" * 70000, b"PK\x05\x06"], ids=len
)
def test_bytes_after_the_end_never_change_the_object(after: bytes) -> None:
    """Zeros are what direct I/O leaves when a file is not cut to its size."""
    data = writer_of_torch()
    got = outcome(fp.load, io.BytesIO(data + after))
    if got.error is None:
        assert difference(torch.load(io.BytesIO(data)), got.value) is None
    else:
        assert isinstance(got.error, fp.CorruptCheckpointError)
        assert "end of the archive" in str(got.error) or "no end" in str(got.error), got.error
        assert ("zeros" in str(got.error)) == (set(after) == {0})


# --- Archives that are not aligned ---


@pytest.mark.parametrize("gap", [b"", b"x", b"\0" * 37, b"PK\x03\x04" * 20], ids=len)
def test_records_with_gaps_and_odd_headers_are_found(gap: bytes, tmp_path: Path) -> None:
    records = records_of(writer_of_torch())
    for number, record in enumerate(records):
        record.gap = gap if number else b""  # in front of the first there is nothing
        record.extra = b"\x46\x42" + struct.pack("<H", number) + b"z" * number
    path = tmp_path / "model.pt"
    for before in (b"", gap):
        path.write_bytes(zip_of(records, before=before))
        assert difference(torch.load(path), fp.load(path)) is None
        assert difference(torch.load(path), fp.load(io.BytesIO(path.read_bytes()))) is None
        assert fp.load(path)["model"]["weight"].data_ptr() % 64 == 0


def test_damage_between_gaps_is_found(tmp_path: Path) -> None:
    records = records_of(writer_of_torch())
    for record in records[1:]:
        record.gap = b"g" * 100
    data = zip_of(records)
    body = next(r.body for r in records if r.name.endswith(b"data/0"))
    at = data.index(body)
    path = tmp_path / "model.pt"
    path.write_bytes(data[: at + 9] + b"\x55" + data[at + 10 :])
    with pytest.raises(fp.CorruptCheckpointError, match=r"model\.weight"):
        fp.load(path)


def test_an_unknown_record_is_harmless_and_checked(tmp_path: Path) -> None:
    records = records_of(writer_of_torch())
    prefix = records[0].name.split(b"/")[0]
    records.append(Record(prefix + b"/.data/note", b"hello"))
    path = tmp_path / "model.pt"
    path.write_bytes(zip_of(records))
    assert difference(torch.load(path), fp.load(path)) is None
    records[-1].crc = 1
    path.write_bytes(zip_of(records))
    with pytest.raises(fp.CorruptCheckpointError, match="note"):
        fp.load(path)
