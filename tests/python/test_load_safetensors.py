# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: the tensors of safetensors.torch.load_file, NumPy arrays without torch, and
headers that lie."""

from __future__ import annotations

import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from load_support import outcome

import fastpersist as fp
from fastpersist import _read_safetensors


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_the_tensors_are_those_of_the_library(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="skipped: no safetensors")
    path = tmp_path / "model.safetensors"
    names = ["bool", "uint8", "int16", "float16", "bfloat16", "float32", "int64", "float8_e4m3fn"]
    state = {name: torch.ones(7).to(getattr(torch, name)) for name in names}
    state |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "3d": torch.randn(2, 3, 4)}
    safetensors.save_file(state, path, metadata={"a": "b"})
    theirs = safetensors.load_file(path)
    for argument in (path, str(path).encode(), io.BytesIO(path.read_bytes())):
        ours = fp.load(argument)
        assert set(ours) == set(theirs)
        for name, tensor in theirs.items():
            assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
            assert zoo.difference(tensor, ours[name]) is None
            ours[name].zero_()
    with torch.device("meta"):
        assert torch.equal(fp.load(path)["3d"], state["3d"])
    assert fp.load(path, map_location="meta")["3d"].is_meta
    with pytest.raises(fp.ArgumentError, match="map_location"):
        fp.load(path, map_location={"cpu": "cpu"})


def resident_of(path: Path) -> int:
    """KiB of the file's mapping that have been touched; fails where it is not mapped."""
    found, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].endswith(":"):
            if inside and line.startswith("Rss:"):
                found.append(int(line.split()[1]))
        else:
            inside = line.endswith(str(path))
    assert found, "the file is not mapped"
    return sum(found)


@pytest.mark.parametrize("default", [False, True])
def test_a_mapped_file_is_read_as_it_is_touched_and_never_written(
    default: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    state = {"a": torch.arange(3.0), "big": torch.ones(4 << 20), "empty": torch.zeros(0, 3)}
    fp.save(state, path)
    before = path.read_bytes()
    if default:
        config = pytest.importorskip("torch.utils.serialization", reason="skipped: old").config
        config.load.mmap = True
        try:
            loaded = fp.load(path)
        finally:
            config.load.mmap = False
    else:
        loaded = fp.load(path, mmap=True)
    assert resident_of(path) < 8 << 10  # of 16 MiB
    assert zoo.difference(state, loaded) is None
    loaded["big"].zero_()
    assert path.read_bytes() == before
    assert torch.equal(fp.load(path, mmap=True)["big"], state["big"])
    assert fp.load(path, "meta", mmap=True)["a"].is_meta
    with pytest.raises(fp.ArgumentError, match="path"):
        fp.load(io.BytesIO(before), mmap=True)


def test_tensors_that_are_not_aligned_are_mapped_as_well(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    data = struct.pack("<B2f", 7, 1.5, 2.5)
    path.write_bytes(file_of({"a": entry("U8", [1], 0, 1), "b": entry("F32", [2], 1, 9)}, data))
    loaded = fp.load(path, mmap=True)
    assert (loaded["a"].tolist(), loaded["b"].tolist()) == ([7], [1.5, 2.5])


def test_a_file_that_shrinks_before_it_is_mapped_is_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    fp.save({"a": torch.arange(5000.0)}, path)

    def shrink(map_location: Any) -> None:
        os.truncate(path, 10_000)

    monkeypatch.setattr(_read_safetensors, "_device", shrink)
    with pytest.raises(fp.CorruptCheckpointError, match=r"model\.safetensors: 10000 bytes"):
        fp.load(path, mmap=True)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "torch" else find(name, *a)
import numpy as np, fastpersist as fp
loaded = fp.load("model.safetensors")
assert type(loaded["w"]) is np.ndarray and loaded["w"].tolist() == [0, 1, 2], loaded
assert loaded["e"].shape == (0, 3) and loaded["s"] == 2.5
loaded["w"][1] = 7
mapped = fp.load("model.safetensors", mmap=True)
assert mapped["w"].tolist() == [0, 1, 2] and mapped["e"].shape == (0, 3)
mapped["w"][1] = 7
print(sorted(loaded))
"""


def test_without_torch_there_are_numpy_arrays(tmp_path: Path, run_python: Any) -> None:
    state = {"w": torch.arange(3.0), "e": torch.zeros(0, 3), "s": torch.tensor(2.5)}
    fp.save(state, tmp_path / "model.safetensors")
    assert run_python(WITHOUT_TORCH).stdout == "['e', 's', 'w']\n"


LIES: dict[str, bytes] = {
    "hole": file_of({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)}, bytes(5)),
    "overlap": file_of({"a": entry("U8", [3], 0, 3), "b": entry("U8", [3], 2, 5)}, bytes(5)),
    "beyond the end": file_of({"a": entry("U8", [9], 0, 9)}, bytes(5)),
    "bytes left over": file_of({"a": entry("U8", [2], 0, 2)}, bytes(5)),
    "10 GB": file_of({"a": entry("U8", [10 << 30], 0, 10 << 30)}, bytes(5)),
    "shape too large": file_of({"a": entry("F32", [1 << 40, 1 << 40], 0, 4)}, bytes(4)),
    "shape and size differ": file_of({"a": entry("F32", [3], 0, 4)}, bytes(4)),
    "negative shape": file_of({"a": entry("U8", [-1], 0, 1)}, bytes(1)),
    "negative offset": file_of({"a": entry("U8", [1], -1, 0)}, bytes(1)),
    "backwards": file_of({"a": entry("U8", [1], 1, 0)}, bytes(1)),
    "fraction": file_of({"a": entry("U8", [1.5], 0, 1)}, bytes(1)),
    "no dtype": file_of({"a": {"shape": [1], "data_offsets": [0, 1]}}, bytes(1)),
    "dtype is a number": file_of({"a": {**entry("U8", [1], 0, 1), "dtype": 3}}, bytes(1)),
    "unknown dtype": file_of({"a": entry("X99", [1], 0, 1)}, bytes(1)),
    "same key twice": file_of(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', bytes(2)
    ),
    "metadata is a list": file_of({"__metadata__": [1]}),
    "deep": file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a list": file_of([1, 2]),
    "not JSON": file_of(b"{hello world}"),
    "not UTF-8": file_of(b'{"\xff\xfe":1}'),
    "header beyond the end": file_of({}, length=1 << 20),
    "header of 2^63 bytes": file_of({}, length=1 << 63),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_headers_that_lie_are_refused(lie: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(LIES[lie])
    for argument in (path, io.BytesIO(LIES[lie])):
        error = outcome(fp.load, argument).error
        assert isinstance(error, fp.CorruptCheckpointError | fp.UnsupportedFileError), error


LIMITED = """
import io, resource, struct, sys, fastpersist as fp, torch
from test_load_safetensors import LIES
from test_load_memory import peak
from test_load_hostile import checkpoint, pickle_of_storage, with_pickle, saved, zip_of
fp.load(io.BytesIO(saved([torch.ones(3)])))
limit = (4 << 30) + int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
huge = checkpoint()
huge[2].size = 0xFFFFFFF0
claims = with_pickle(saved(torch.arange(30.0)), pickle_of_storage(10 << 30, 10 << 30))
before = peak()
for data in (LIES["10 GB"], LIES["header of 2^63 bytes"], LIES["deep"], claims, zip_of(huge)):
    try:
        fp.load(io.BytesIO(data))
        print("loaded")
    except fp.Error:
        pass
print((peak() - before) >> 20)
"""


def test_a_small_file_that_claims_much_takes_little_memory(run_python: Any) -> None:
    assert int(run_python(LIMITED).stdout) < 100
