# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""The arguments, contexts and settings that change what torch.load does change what we do."""

from __future__ import annotations

import io
import pickle
import struct
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from load_support import difference, mismatch, outcome, records_of, saved, with_pickle, zip_of
from torch._subclasses.fake_tensor import FakeTensorMode

import fastpersist as fp
from fastpersist import _rebuild

pytestmark = pytest.mark.filterwarnings("ignore")


def state() -> dict[str, Any]:
    weight = torch.arange(24.0).view(4, 6)
    model = OrderedDict(weight=weight, row=weight[1], bias=torch.nn.Parameter(torch.ones(3)))
    return {"model": model, "step": 7, "big": 1 << 200, "name": "ä", "empty": torch.zeros(0, 3)}


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "model.pt")
    torch.save(state(), path)
    return path


def test_plain_states_are_left_to_the_compiled_unpickler(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("torch's unpickler was used")

    _rebuild._plain_path_works().result()
    monkeypatch.setattr(_rebuild, "through_torch", refuse)
    assert difference(torch.load(path), fp.load(path)) is None


@pytest.mark.parametrize("works", [True, False])
def test_a_torch_that_works_otherwise_reads_by_itself_after_a_check(
    works: bool, path: str, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(_rebuild, "self_test", lambda: "" if works else "it is another one")
    monkeypatch.setattr(_rebuild, "plainly", lambda *_: None)
    for argument in (path, io.BytesIO(Path(path).read_bytes())):
        assert difference(torch.load(path), fp.load(argument)) is None
    assert [("another one" in text) for text in warned()] == ([] if works else [True])
    data = bytearray(Path(path).read_bytes())
    data[data.index(struct.pack("<2f", 3.0, 4.0))] ^= 1
    for damaged in (io.BytesIO(data),):
        with pytest.raises(fp.CorruptCheckpointError):
            fp.load(damaged)


# --- Contexts ---


def forms(loaded: Any) -> Any:
    """What can be compared of tensors without data."""
    if isinstance(loaded, torch.Tensor):
        layout = (loaded.dtype, loaded.shape, loaded.stride(), loaded.storage_offset())
        grad = (loaded.requires_grad, loaded.is_leaf, loaded._is_view())
        return (type(loaded), loaded.device, *layout, *grad, loaded.untyped_storage().nbytes())
    if isinstance(loaded, dict):
        return (type(loaded), [(key, forms(value)) for key, value in loaded.items()])
    return loaded


HAS_SKIP_DATA = hasattr(torch.serialization, "skip_data")  # torch 2.6
CONTEXTS: dict[str, Callable[[], Any]] = {
    "device meta": lambda: torch.device("meta"),
    "device cpu": lambda: torch.device("cpu"),
    "fake tensors": FakeTensorMode,
    **({"skipped data": torch.serialization.skip_data} if HAS_SKIP_DATA else {}),
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_that_change_torch_load(context: str, weights_only: bool, path: str) -> None:
    found = []
    for load in (torch.load, fp.load):
        with CONTEXTS[context]():
            got = outcome(load, path, weights_only=weights_only)
        if "is not supported yet" in str(got.error):
            pytest.skip(f"skipped: {got.error}")  # torch 2.6 does not load while it skips data
        found.append(type(got.error) if got.error else forms(got.value))
    assert found[0] == found[1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_default_device_changes_nothing_that_torch_keeps(device: str, path: str) -> None:
    torch.set_default_device(device)
    try:
        theirs, ours = torch.load(path), fp.load(path)
    finally:
        torch.set_default_device(None)
    assert forms(theirs) == forms(ours)


def test_the_default_dtype_changes_nothing(path: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert difference(torch.load(path), fp.load(path)) is None
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_registered_way_to_restore_storages_is_used(path: str) -> None:
    seen = []

    def restore(storage: Any, location: str) -> Any:
        seen.append(location)
        return None

    before = list(torch.serialization._package_registry)
    torch.serialization.register_package(5, lambda storage: None, restore)
    try:
        assert difference(torch.load(path), fp.load(path)) is None
    finally:
        torch.serialization._package_registry[:] = before
    assert len(seen) == 6  # three storages, by torch and by us


@pytest.mark.skipif(not hasattr(torch.utils, "serialization"), reason="skipped: torch before 2.6")
def test_mapping_can_be_the_default(path: str) -> None:
    from torch.utils.serialization import config

    config.load.mmap = True
    try:
        loaded = fp.load(path)
    finally:
        config.load.mmap = False
    assert path in Path("/proc/self/maps").read_text()
    assert difference(torch.load(path), loaded) is None


def test_a_file_object_cannot_be_mapped(path: str) -> None:
    with pytest.raises(fp.ArgumentError, match="path"):
        fp.load(io.BytesIO(Path(path).read_bytes()), mmap=True)


# --- Byte order ---


def foreign_order() -> bytes:
    """What torch on a big-endian machine saves."""
    values = {
        "int16": torch.arange(9, dtype=torch.int16),
        "double": torch.arange(5, dtype=torch.float64),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "complex": torch.tensor([1 + 2j, 3 - 4j]),
        "twice": [(t := torch.arange(6.0)), t[2:]],
    }
    records = records_of(saved(values))
    sizes = iter([2, 8, 1, 4, 4])
    for record in records:
        if b"/data/" in record.name:
            size = next(sizes)
            parts = [record.body[i : i + size] for i in range(0, len(record.body), size)]
            record.body = b"".join(part[::-1] for part in parts)
        if record.name.endswith(b"/byteorder"):
            record.body = b"big"
    return zip_of(records)


def test_a_file_of_the_other_byte_order_is_turned(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(foreign_order())
    for weights_only in (True, False):
        loaded = fp.load(path, weights_only=weights_only)
        assert difference(torch.load(path, weights_only=weights_only), loaded) is None
        assert torch.equal(loaded["int16"], torch.arange(9, dtype=torch.int16))
        assert torch.equal(loaded["twice"][0], torch.arange(6.0))
        assert torch.equal(loaded["complex"], torch.tensor([1 + 2j, 3 - 4j]))


@pytest.mark.parametrize("order", ["NATIVE", "LITTLE", "BIG"])
def test_the_byte_order_of_files_that_do_not_say(order: str, tmp_path: Path) -> None:
    records = [r for r in records_of(saved(state())) if not r.name.endswith(b"/byteorder")]
    path = tmp_path / "model.pt"
    path.write_bytes(zip_of(records))
    before = torch.serialization.get_default_load_endianness()
    torch.serialization.set_default_load_endianness(torch.serialization.LoadEndianness[order])
    try:
        assert mismatch(outcome(torch.load, path), outcome(fp.load, path)) is None
    finally:
        torch.serialization.set_default_load_endianness(before)


# --- Unpicklers ---


class _Counting(pickle.Unpickler):
    made = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        _Counting.made += 1  # torch derives a class from this one


def test_the_pickle_module_is_used(path: str) -> None:
    module = types.SimpleNamespace(Unpickler=_Counting, load=pickle.load, __name__="counting")
    _Counting.made = 0
    loaded = fp.load(path, pickle_module=module)
    assert _Counting.made == 1
    assert difference(torch.load(path, weights_only=False), loaded) is None
    with pytest.raises(fp.ArgumentError, match="pickle_module"):
        fp.load(path, pickle_module=module, weights_only=True)


def test_dill_reads_as_well(tmp_path: Path) -> None:
    dill = pytest.importorskip("dill", reason="skipped: dill is not installed")
    path = tmp_path / "model.pt"
    torch.save({"f": lambda x: x + 1, "t": torch.ones(3)}, path, pickle_module=dill)
    assert fp.load(path, pickle_module=dill)["f"](1) == 2


PYTHON_2 = b"\x80\x02U\x02\xc3\xa9q\x00."  # a string of Python 2


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("arguments", [{}, {"encoding": "latin1"}, {"encoding": "bytes"}], ids=str)
def test_strings_of_python_2_take_the_encoding(
    arguments: dict[str, str], weights_only: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(with_pickle(saved([]), PYTHON_2))
    named = {"weights_only": weights_only, **arguments}
    assert mismatch(outcome(torch.load, path, **named), outcome(fp.load, path, **named)) is None


def test_arguments_for_the_unpickler_without_use_are_warned_of(path: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fp.load(path, weights_only=True, encoding="latin1")
    assert [w.filename for w in caught if "pickle_load_args" in str(w.message)] == [__file__]


@pytest.mark.parametrize(
    "forced", ["TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]
)
@pytest.mark.parametrize("asked", [None, True, False])
def test_the_variables_of_torch_count(
    forced: str, asked: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    torch.save({"object": types.SimpleNamespace(a=1)}, path)
    monkeypatch.setenv(forced, "1")
    theirs, ours = (outcome(load, path, weights_only=asked) for load in (torch.load, fp.load))
    assert mismatch(theirs, ours) is None


def test_both_variables_at_once_are_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "y")
    with pytest.raises(fp.ArgumentError, match="only one"):
        fp.load(path)


@pytest.mark.parametrize("argument", [None, 3, object(), types.SimpleNamespace(read=len)], ids=repr)
def test_what_is_no_file_is_refused(argument: Any) -> None:
    with pytest.raises(fp.ArgumentError, match=type(argument).__name__):
        fp.load(argument)


def test_a_path_with_a_null_byte_and_an_empty_one_are_refused() -> None:
    for path in ("a\0b", b"a\0b", ""):
        with pytest.raises(fp.ArgumentError):
            fp.load(path)


# --- Older files ---


def save_old(obj: Any, path: Path, protocol: int = 2) -> None:
    torch.save(obj, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("protocol", range(1, 6))
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("by", ["path", "file"])
def test_files_of_torch_before_1_6_are_read_by_torch_with_one_warning(
    by: str, weights_only: bool, protocol: int, tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    path = tmp_path / "model.pt"
    save_old(state(), path, protocol)
    theirs = outcome(torch.load, path, weights_only=weights_only)
    assert weights_only or theirs.error is None
    for _ in range(2):
        argument = path if by == "path" else io.BytesIO(path.read_bytes())
        ours = outcome(fp.load, argument, weights_only=weights_only)
        assert mismatch(theirs, ours) is None
        assert not isinstance(ours.error, fp.CorruptCheckpointError)
    assert len(warned()) == 1
    assert "before 1.6" in warned()[0]


@pytest.mark.parametrize("protocol", range(1, 6))
def test_single_tensors_of_files_of_torch_before_1_6_cannot_be_read(
    protocol: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    save_old(state(), path, protocol)
    for argument in (path, io.BytesIO(path.read_bytes())):
        with pytest.raises(fp.UnsupportedFileError, match=r"PyTorch before 1\.6.*fp\.load"):
            fp.open(argument)


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_of_torch_before_1_6_cannot_be_mapped(
    protocol: int, default: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    save_old(state(), path, protocol)
    assert isinstance(outcome(torch.load, path, mmap=True).error, RuntimeError)
    if not default:
        with pytest.raises(fp.ArgumentError, match=r"model\.pt.*before 1\.6"):
            fp.load(path, mmap=True)
        return
    config = pytest.importorskip("torch.utils.serialization", reason="skipped: before 2.6").config
    config.load.mmap = True
    try:
        with pytest.raises(fp.ArgumentError, match=r"model\.pt.*before 1\.6"):
            fp.load(path)
        named = {"mmap": False, "weights_only": False}
        assert difference(torch.load(path, **named), fp.load(path, **named)) is None
    finally:
        config.load.mmap = False


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("arguments", [{}, {"encoding": "latin1"}, {"encoding": "bytes"}], ids=str)
def test_strings_of_python_2_in_files_of_torch_before_1_6_take_the_encoding(
    arguments: dict[str, str], weights_only: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    save_old("text", path)
    text = b"\x80\x02X\x04\x00\x00\x00textq\x00."
    data = path.read_bytes()
    assert data.count(text) == 1
    path.write_bytes(data.replace(text, b"\x80\x02U\x02a\xe9q\x00."))
    named = {"weights_only": weights_only, **arguments}
    theirs, ours = (outcome(load, path, **named) for load in (torch.load, fp.load))
    assert (type(ours.error), ours.value) == (type(theirs.error), theirs.value)


def test_a_cut_file_of_torch_before_1_6_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(state(), path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    for size in (20, 60, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(fp.Error) as caught:
            fp.load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("old", [False, True])
def test_a_file_object_is_read_from_where_it_stands_and_not_closed(
    old: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    torch.save(state(), path, _use_new_zipfile_serialization=not old)
    for before in (b"", b"x", b"PK\x03\x04 and more"):
        path.with_suffix(".at").write_bytes(before + path.read_bytes())
        with open(path.with_suffix(".at"), "rb") as file:
            file.seek(len(before))
            assert difference(torch.load(path), fp.load(file)) is None
            assert not file.closed
            file.seek(0)
            assert isinstance(outcome(fp.load, file).error, fp.Error) == bool(before)
