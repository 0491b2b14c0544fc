# SPDX-License-Identifier: Apache-2.0
"""A safetensors file is the file that the safetensors package writes, with the same refusals."""

from __future__ import annotations

import io
import json
import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import first_difference, read

import fastpersist as fp

package = pytest.importorskip("safetensors.torch", reason="skipped: no safetensors here")
numpy_package = pytest.importorskip("safetensors.numpy")

# Torch warns about experimental dtypes and layouts.
pytestmark = pytest.mark.filterwarnings("ignore")


def compare(state: dict[str, Any], folder: Path, writer: Any = package, **arguments: Any) -> None:
    info = fp.save(state, folder / "ours.safetensors", **arguments)
    writer.save_file(state, folder / "theirs.safetensors", **arguments)
    ours, theirs = (read(folder / f"{name}.safetensors") for name in ("ours", "theirs"))
    assert first_difference(ours, theirs) is None
    assert info.bytes == len(ours)
    buffer = io.BytesIO()
    fp.save(state, buffer, format="safetensors", **arguments)
    assert buffer.getvalue() == theirs


def header(path: Path) -> dict[str, Any]:
    data = read(path)
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


# --- Types ---

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every byte value, seen as this type; quantized ones are made from numbers."""
    if str(dtype).startswith("torch.q"):
        return torch.empty(4, dtype=dtype)
    if dtype == torch.bool:
        return torch.tensor([True, False, True])
    data = torch.arange(256, dtype=torch.uint8)
    return data.view(dtype) if dtype.itemsize <= 16 else data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_gets_the_packages_verdict(dtype: torch.dtype, tmp_path: Path) -> None:
    try:
        state = {"tensor": patterns(dtype), "other": torch.ones(3)}
    except RuntimeError:
        state = {"tensor": torch.empty(4, dtype=dtype), "other": torch.ones(3)}
    try:
        package.save_file(state, tmp_path / "theirs.safetensors")
    except Exception:
        with pytest.raises(fp.UnsupportedStateError, match="'tensor'"):
            fp.save(state, tmp_path / "ours.safetensors")
        assert not (tmp_path / "ours.safetensors").exists()
    else:
        compare(state, tmp_path)


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8"]
)
@pytest.mark.parametrize("order", ["<", ">"])
def test_numpy_arrays_equal_the_packages(dtype: str, order: str, tmp_path: Path) -> None:
    values = np.arange(24).reshape(2, 3, 4).astype(order + dtype)
    state = {"array": values, "scalar": values[:1, :1, :1].reshape(()), "none": values[:0]}
    compare(state, tmp_path, numpy_package)
    loaded = numpy_package.load_file(tmp_path / "ours.safetensors")
    assert np.array_equal(loaded["array"], values)


@pytest.mark.parametrize("dtype", ["c16", "U3", "S4", "O", "M8[s]", "V4", "i4,f4"])
def test_numpy_types_that_the_format_lacks_are_refused(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(fp.UnsupportedStateError, match="'array' has type"):
        fp.save({"array": np.zeros(3, dtype)}, tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == []


def test_shared_numpy_arrays_are_written_twice_as_the_package_does(tmp_path: Path) -> None:
    base = np.arange(10.0)
    compare({"a": base, "b": base, "c": base[2:5]}, tmp_path, numpy_package)


@pytest.mark.parametrize("array", [np.ones((3, 4)).T, np.ones(10)[::2], np.ones((2, 2))[:, ::-1]])
def test_numpy_arrays_that_are_not_contiguous_are_refused(array: Any, tmp_path: Path) -> None:
    # The package writes their memory as if they were.
    with pytest.raises(fp.UnsupportedStateError, match="'array' is not contiguous"):
        fp.save({"array": array}, tmp_path / "x.safetensors")


def test_torch_and_numpy_may_be_mixed(tmp_path: Path) -> None:
    fp.save({"t": torch.arange(3), "n": np.arange(3.0)}, tmp_path / "x.safetensors")
    loaded = package.load_file(tmp_path / "x.safetensors")
    assert torch.equal(loaded["t"], torch.arange(3))
    assert torch.equal(loaded["n"], torch.arange(3.0, dtype=torch.float64))


# --- Names and order ---

NAMES = ["a", "A", "", " ", '"quoted"', "back\\slash", "/slash", "new\nline", "tab\t", "\b\f\r"]
NAMES += ["\0", "\x01\x1f", "\x7f", "\x80", "é", "e\u0301", "ünïcode", "模型"]
NAMES += [
    "😀",
    "\u2028",
    "<>&'",
    "z" * 300,
    "layer.10",
    "layer.2",
    "\ufeff",
    "\uffff",
    "{}",
    "null",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_is_written_as_the_package_does(name: str, tmp_path: Path) -> None:
    compare({name: torch.ones(2)}, tmp_path)
    assert list(package.load_file(tmp_path / "ours.safetensors")) == [name]


@pytest.mark.parametrize("seed", range(4))
def test_order_is_the_packages_whatever_the_order_of_the_state(seed: int, tmp_path: Path) -> None:
    print(f"seed {seed}")
    choice = random.Random(seed)
    types = [torch.float32, torch.int64, torch.bool, torch.uint8, torch.int8, torch.bfloat16]
    types += [torch.float64, torch.float16, torch.int16, torch.complex64, torch.int32]
    state = {
        name: torch.ones(choice.randrange(4), dtype=choice.choice(types))
        for name in choice.sample(NAMES, len(NAMES))
    }
    compare(state, tmp_path)


@pytest.mark.parametrize("name", ["\ud800", "a\udfffb"])
def test_a_name_that_utf8_cannot_hold_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(fp.UnsupportedStateError, match="the name"):
        fp.save({name: torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(fp.ArgumentError, match="metadata"):
        fp.save({"a": torch.ones(2)}, tmp_path / "x.safetensors", metadata={name: "x"})
    assert os.listdir(tmp_path) == []


def test_the_reserved_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fp.UnsupportedStateError, match="__metadata__"):
        fp.save({"__metadata__": torch.ones(2)}, tmp_path / "x.safetensors")


# --- Shapes ---


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"scalar": torch.tensor(3)},
        {"none": torch.zeros(0), "0x3": torch.zeros(0, 3), "2x0x4": torch.zeros(2, 0, 4)},
        {"none": torch.zeros(0), "some": torch.ones(3), "other": torch.zeros(0, dtype=torch.int8)},
        {"view": torch.arange(12.0)[2:5]},
        {"left": (base := torch.arange(12.0))[:6], "right": base[6:]},
        {"empty": base[5:5], "also": base[:0], "base": base},
        {"thin": torch.ones(3, 1).t()},
        {"odd": torch.arange(7, dtype=torch.uint8), "even": torch.arange(7.0)},
        {"parameter": torch.nn.Parameter(torch.ones(3))},
        OrderedDict(b=torch.ones(2), a=torch.zeros(2)),
        {"large": torch.arange(3_000_001.0)},
    ],
    ids=lambda state: "+".join(state) or "nothing",
)
def test_shapes_equal_the_packages(state: dict[str, Any], tmp_path: Path) -> None:
    compare(state, tmp_path)


def test_a_model_equals_the_packages_and_loads(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    compare(model.state_dict(), tmp_path)
    loaded = package.load_file(tmp_path / "ours.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


# --- Metadata ---


@pytest.mark.parametrize(
    "metadata", [None, {"format": "pt"}, {"": ""}, {'k"\\\n\x01ü': "v\x7f\u2028😀" * 100}]
)
def test_metadata_equals_the_packages(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    compare({"a": torch.ones(3)}, tmp_path, metadata=metadata)


def test_several_metadata_keys_are_sorted(tmp_path: Path) -> None:
    keys = [f"key {n}" for n in range(20)]
    metadata = {key: key.upper() for key in random.Random(4).sample(keys, 20)}
    fp.save({"a": torch.ones(3)}, tmp_path / "x.safetensors", metadata=metadata)
    assert list(header(tmp_path / "x.safetensors")["__metadata__"]) == sorted(keys)
    with package.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == metadata


def test_no_metadata_at_all_may_be_given_as_an_empty_dict(tmp_path: Path) -> None:
    compare({"a": torch.ones(3)}, tmp_path)
    fp.save({"a": torch.ones(3)}, tmp_path / "x.safetensors", metadata={})
    loaded = package.load_file(tmp_path / "x.safetensors")
    assert torch.equal(loaded["a"], torch.ones(3))
    assert header(tmp_path / "x.safetensors").get("__metadata__", {}) == {}


# --- What is refused ---


def _tied() -> dict[str, Any]:
    weight = torch.ones(4, 4)
    return {"fine": torch.ones(1), "embedding": weight, "head": weight}


def _overlapping() -> dict[str, Any]:
    base = torch.arange(12.0)
    return {"low": base[:8], "high": base[4:]}


def _inside() -> dict[str, Any]:
    base = torch.arange(12.0)
    return {"whole": base, "fine": torch.ones(1), "part": base[4:6]}


REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "tied": (_tied, ("'embedding'", "'head'", "share memory")),
    "overlapping": (_overlapping, ("'low'", "'high'", "share memory")),
    "inside": (_inside, ("'whole'", "'part'", "share memory")),
    "transposed": (lambda: {"w": torch.ones(3, 4).t()}, ("'w'", "contiguous")),
    "expanded": (lambda: {"w": torch.ones(1).expand(3)}, ("'w'", "contiguous")),
    "strided": (lambda: {"w": torch.ones(9)[::2]}, ("'w'", "contiguous")),
    "sparse_coo": (lambda: {"w": torch.eye(3).to_sparse()}, ("'w'", "sparse_coo")),
    "sparse_csr": (lambda: {"w": torch.eye(3).to_sparse_csr()}, ("'w'", "sparse_csr")),
    "meta": (lambda: {"w": torch.empty(3, device="meta")}, ("'w'", "meta")),
    "meta_empty": (lambda: {"w": torch.empty(0, device="meta")}, ("'w'", "meta")),
    "uninitialized": (lambda: {"w": torch.nn.LazyLinear(3).weight}, ("'w'", "uninitialized")),
    "without_storage": (
        lambda: {"w": zoo.PairTensor(torch.ones(4), torch.ones(4))},
        ("'w'", "PairTensor", "memory"),
    ),
    "nested": (
        lambda: {"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
        ("'w'", "nested"),
    ),
    "number": (lambda: {"fine": torch.ones(1), "n": 7}, ("'n'", "int")),
    "nested_dict": (lambda: {"model": {"w": torch.ones(1)}}, ("'model'", "dict")),
    "name_of_a_number": (lambda: {1: torch.ones(1)}, ("name 1",)),
    "list": (lambda: [torch.ones(1)], ("list",)),
    "nothing": (lambda: None, ("NoneType",)),
    "tensor": (lambda: torch.ones(1), ("Tensor",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_package_refuses_is_refused_naming_the_keys(name: str, tmp_path: Path) -> None:
    builder, words = REFUSED[name]
    state = builder()
    with pytest.raises(Exception):
        package.save_file(state, tmp_path / "theirs.safetensors")
    path = tmp_path / "ours.safetensors"
    path.write_bytes(b"the old file")
    with pytest.raises(fp.UnsupportedStateError) as caught:
        fp.save(state, path)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "'fine'" not in str(caught.value)
    assert read(path) == b"the old file"
    assert [name for name in os.listdir(tmp_path) if name.startswith("ours")] == [path.name]


# --- Values where the package is wrong ---


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
        torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj().imag.contiguous(),
        torch._neg_view(torch.arange(5.0)),
        torch._neg_view(torch.tensor([1 + 2j]).conj()),
    ],
)
def test_lazy_conjugates_and_negations_are_carried_out(
    tensor: torch.Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fastpersist")
    fp.save({"lazy": tensor}, tmp_path / "x.safetensors")
    loaded = package.load_file(tmp_path / "x.safetensors")["lazy"]
    assert loaded.tolist() == tensor.tolist()
    if tensor.is_conj() or tensor.is_neg():
        assert any("'lazy'" in record.getMessage() for record in caplog.records)


def test_lazy_tensors_stay_lazy_in_the_state(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    fp.save({"lazy": tensor}, tmp_path / "x.safetensors")
    assert tensor.is_conj()


def test_two_lazy_views_of_one_memory_have_their_own_values(tmp_path: Path) -> None:
    base = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    fp.save({"base": base, "conj": base.conj()}, tmp_path / "x.safetensors")
    loaded = package.load_file(tmp_path / "x.safetensors")
    assert torch.equal(loaded["base"], base)
    assert loaded["conj"].tolist() == base.conj().tolist()
