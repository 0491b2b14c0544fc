# SPDX-License-Identifier: Apache-2.0
"""Loading, one test for each defect that was found by reading the code: places that a directory
states wrongly, pickles that no writer makes, files without checksums, and memory that somebody else
keeps. Where torch.load is the judge, it is asked in the test."""

from __future__ import annotations

import io
import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from load_support import difference, mismatch, outcome, saved, with_pickle
from test_save_api import WITHOUT_TORCH

import fastpersist as fp

PROGRAM = Path(os.environ.get("FASTPERSIST_PROGRAM", REPOSITORY / "build/release/fastpersist"))

needs_program = pytest.mark.skipif(
    not PROGRAM.is_file(), reason=f"skipped: {PROGRAM} is not built (make build)"
)


def run_program(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [PROGRAM, *arguments]
    return subprocess.run(
        command, cwd=folder, env={}, capture_output=True, text=True, timeout=120, check=False
    )


# --- Places that the directory of an archive states ---


def directory_of(data: bytes) -> range:
    """Where the central directory lies; torch's archives have the usual end record last."""
    end = data.rindex(b"PK\x05\x06")
    size, start = struct.unpack_from("<II", data, end + 12)
    return range(start, start + size)


def test_rows_are_right_or_refused_whatever_bit_of_the_directory_is_flipped(
    tmp_path: Path,
) -> None:
    """No checksum covers a part of a tensor, so it is the headers that must tell its place."""
    path = tmp_path / "model.pt"
    # Of one size: each could be taken for the other.
    state = {"a": torch.arange(100.0), "b": torch.arange(100.0) + 1000}
    torch.save(state, path)
    data = path.read_bytes()
    expected = {name: made[40:60] for name, made in state.items()}
    refused, wrong = 0, []
    with open(path, "r+b", buffering=0) as file:
        for at in directory_of(data):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([data[at] ^ 1 << bit]), at)
                got = outcome(rows_of, path)
                if isinstance(got.error, fp.CorruptCheckpointError | fp.UnsupportedFileError):
                    refused += 1
                elif got.error is not None or not same(got.value, expected):
                    wrong.append((at - directory_of(data).start, bit, got))
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert wrong == []
    assert refused > 1000  # most bits of a directory mean something
    assert same(rows_of(path), expected)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def rows_of(path: Path) -> dict[str, torch.Tensor]:
    with fp.open(path) as file:
        return {name: file.tensor(name, slice(40, 60)) for name in ("a", "b")}


@pytest.mark.parametrize(("key", "field", "bit"), [(0, 8, 3), *((1, 42, b) for b in range(14))])
def test_a_place_that_is_wrong_by_one_bit_is_found_for_rows(
    key: int, field: int, bit: int, tmp_path: Path
) -> None:
    """The flag that announces a descriptor, and the offset of the local header."""
    path = tmp_path / "model.pt"
    torch.save([torch.arange(3000.0), torch.arange(3000.0) + 5000], path)
    data = bytearray(path.read_bytes())
    directory = directory_of(bytes(data))
    at = data.index(b"model/data/%d" % key, directory.start) - 46 + field + bit // 8
    data[at] ^= 1 << bit % 8
    path.write_bytes(data)
    for number, first in ((0, 0.0), (1, 5000.0)):
        got = outcome(lambda: fp.open(path).tensor(str(number), slice(10, 13)))
        if got.error is None:
            assert got.value.tolist() == [first + 10, first + 11, first + 12]
        else:
            assert isinstance(got.error, fp.CorruptCheckpointError), got.error


# --- Pickles that torch.save does not write ---


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def tensor(kind: str, claimed: int, dtype: str | None = None) -> bytes:
    """Thirty elements of a storage, whose class is kind ("module\\nclass") and that is said to have
    so many elements; without a dtype by _rebuild_tensor_v2, with one by its successor."""
    version, end = (b"2", b"tR") if dtype is None else (b"3", b"c" + dtype.encode() + b"\ntR")
    storage = b"(" + text("storage") + b"c" + kind.encode() + b"\n" + text("0") + text("cpu")
    storage += number(claimed) + b"tQ"
    rest = b"K\0(" + number(30) + b"t(K\x01t\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v" + version + b"\n(" + storage + rest + end


def checkpoint_of(*tensors: bytes) -> bytes:
    """A list of these tensors, over one storage of thirty floats."""
    return with_pickle(saved(torch.arange(30.0)), b"\x80\x02](" + b"".join(tensors) + b"e.")


UNTYPED = "torch.storage\nUntypedStorage"


def test_the_programs_made_here_are_what_torch_reads() -> None:
    for made in (tensor("torch\nFloatStorage", 30), tensor(UNTYPED, 120, "torch\nfloat32")):
        data = checkpoint_of(made)
        right = torch.load(io.BytesIO(data))
        assert torch.equal(right[0], torch.arange(30.0))
        assert difference(right, fp.load(io.BytesIO(data))) is None


@pytest.mark.parametrize("dtype", ["object", "str", "O", "void", "datetime64", "load"])
def test_without_torch_only_types_of_numbers_are_made(
    dtype: str, run_python: Callable[..., Any], tmp_path: Path
) -> None:
    """An array of objects made of a file's bytes would be an array of pointers."""
    (tmp_path / "model.pt").write_bytes(checkpoint_of(tensor(UNTYPED, 120, f"torch\n{dtype}")))
    program = f"""{WITHOUT_TORCH}
import fastpersist as fp
with fp.open("model.pt") as file:
    for index in ((), (slice(0, 1),)):
        try:
            print(file.tensor(file.keys()[0], *index))
        except fp.UnsupportedFileError as error:
            print("refused:", error)
"""
    said = run_python(program).stdout.splitlines()
    assert len(said) == 2
    assert all(line.startswith("refused:") and dtype in line for line in said), said


def test_a_storage_need_not_be_whole_elements_long() -> None:
    seven = torch.arange(7, dtype=torch.uint8).untyped_storage()
    view = torch.empty(0, dtype=torch.uint16).set_(seven, 0, (3,))
    for state in (view, {"view": view, "also": view[1:]}):
        data = saved(state)
        right = torch.load(io.BytesIO(data))
        assert difference(right, fp.load(io.BytesIO(data))) is None


# A class, and how many of its elements the storage has.
FLOAT, INT, HALF, BYTE = (
    ("torch\nFloatStorage", 30), ("torch\nIntStorage", 30), ("torch\nHalfStorage", 60),
    ("torch\nByteStorage", 120),
)  # fmt: skip
TWO_CLASSES = [(FLOAT, INT), (INT, FLOAT), (FLOAT, HALF), (HALF, FLOAT), (BYTE, FLOAT)]


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("kinds", TWO_CLASSES)
def test_a_storage_of_two_classes_is_what_torch_makes_of_it(
    kinds: tuple[tuple[str, int], ...], weights_only: bool
) -> None:
    data = checkpoint_of(*(tensor(*kind) for kind in kinds))
    theirs = outcome(torch.load, io.BytesIO(data), weights_only=weights_only)
    ours = outcome(fp.load, io.BytesIO(data), weights_only=weights_only)
    assert mismatch(theirs, ours) is None


@pytest.mark.parametrize("kind", ["os\nFloatStorage", "torchy\nFloatStorage", "builtins\nlist"])
def test_a_storage_class_of_another_module_is_refused_as_torch_does(kind: str) -> None:
    data = checkpoint_of(tensor(kind, 30))
    theirs = outcome(torch.load, io.BytesIO(data), weights_only=True)
    assert theirs.error is not None
    assert isinstance(outcome(fp.load, io.BytesIO(data), weights_only=True).error, fp.Error)
    for weights_only in (True, False):
        theirs = outcome(torch.load, io.BytesIO(data), weights_only=weights_only)
        ours = outcome(fp.load, io.BytesIO(data), weights_only=weights_only)
        assert (theirs.error is None) == (ours.error is None), (theirs, ours)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["load", "Tensor", "strided", "nothing_of_that_name"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_what_is_no_type_is_refused_as_torch_does(dtype: str, weights_only: bool) -> None:
    data = checkpoint_of(tensor(UNTYPED, 120, f"torch\n{dtype}"))
    theirs = outcome(torch.load, io.BytesIO(data), weights_only=weights_only)
    ours = outcome(fp.load, io.BytesIO(data), weights_only=weights_only)
    assert theirs.error is not None
    assert mismatch(theirs, ours) is None


# --- Files without checksums, tensors that repeat their elements ---


@pytest.fixture
def unchecked(tmp_path: Path) -> Path:
    serialization: Any = torch.serialization
    if not hasattr(serialization, "set_crc32_options"):
        pytest.skip("skipped: this torch cannot switch checksums off")
    path = tmp_path / "model.pt"
    before = serialization.get_crc32_options()
    serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(1000.0), "step": 3}, path)
    finally:
        serialization.set_crc32_options(before)
    return path


def test_a_file_without_checksums_loads_with_one_warning(
    unchecked: Path, warned: Callable[[], list[str]]
) -> None:
    for _ in range(3):
        assert difference(torch.load(unchecked), fp.load(unchecked)) is None
    (message,) = warned()
    assert "nothing could be compared" in message


@needs_program
def test_verify_does_not_call_a_file_good_that_has_no_checksums(
    unchecked: Path, tmp_path: Path
) -> None:
    done = run_program("verify", "model.pt", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing could be compared" in done.stdout
    assert "agree" not in done.stdout
    torch.save({"w": torch.arange(1000.0)}, unchecked)
    assert "agree" in run_program("verify", "model.pt", folder=tmp_path).stdout


@needs_program
def test_an_expanded_tensor_is_converted_on_demand_only(tmp_path: Path) -> None:
    one = torch.arange(4.0)
    torch.save({"wide": one.expand(1000, 4), "w": torch.ones(3)}, tmp_path / "x.pt")
    done = run_program("convert", "x.pt", "x.safetensors", folder=tmp_path)
    assert done.returncode == 1
    assert "'wide'" in done.stderr and "--duplicate-shared" in done.stderr
    assert "'w'" not in done.stderr
    assert not (tmp_path / "x.safetensors").exists()
    done = run_program("convert", "x.pt", "x.safetensors", "--duplicate-shared", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert torch.equal(fp.load(tmp_path / "x.safetensors")["wide"], one.expand(1000, 4))


# --- Memory that somebody keeps ---


def test_memory_that_a_file_object_was_given_outlives_the_load(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    """In a process of its own: memory that is gone would end it."""
    torch.save({"w": torch.ones(300_000)}, tmp_path / "model.pt")
    program = """
import gc, io, pathlib
import fastpersist as fp

class Keeper(io.BytesIO):
    def readinto(self, memory):
        kept.append(memory)
        return super().readinto(memory)

data = pathlib.Path("model.pt").read_bytes()
for use in (fp.load, lambda file: fp.open(file).tensor("w")):
    kept = []
    made = use(Keeper(data))
    assert made is not None and kept
    assert sum(map(len, kept)) >= len(data)
    del made
    gc.collect()
    for memory in kept:
        assert len(bytes(memory)) == len(memory)
        memory[:] = bytes(len(memory))
        assert not any(memory[-100:])
print("alive")
"""
    assert run_python(program).stdout == "alive\n"
