# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""Loading problems that users of other libraries reported, as tests."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import os
import pathlib
import pickle
import random
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import load_support
import numpy as np
import pytest
import torch
from load_support import difference, outcome, saved, with_pickle

import fastpersist as fp
from fastpersist import _weights_only


def both(state: object, path: Path) -> Any:
    """Saves, compares our object with torch.load's, and returns it."""
    fp.save(state, path)
    loaded = fp.load(path)
    assert difference(torch.load(path), loaded) is None
    return loaded


def test_empty_tensors_are_never_aliases(tmp_path: Path) -> None:
    """pytorch/pytorch#58970"""
    state = {"a": torch.empty(0, dtype=torch.int32), "b": torch.empty(0, dtype=torch.int64)}
    loaded = both({**state, "c": torch.empty(0)}, tmp_path / "model.pt")
    assert [t.dtype for t in loaded.values()] == [torch.int32, torch.int64, torch.float32]
    assert len({t.untyped_storage()._cdata for t in loaded.values()}) == 3


def test_conjugate_and_negative_views_keep_their_values(tmp_path: Path) -> None:
    """safetensors/safetensors#831, pytorch/pytorch#81690"""
    conj, neg = torch.tensor([1 + 2j, 3 + 4j]).conj(), torch._neg_view(torch.tensor([1.0, 2.0]))
    loaded = both({"conj": conj, "neg": neg}, tmp_path / "model.pt")
    assert loaded["conj"].tolist() == [1 - 2j, 3 - 4j]
    assert loaded["neg"].tolist() == [-1, -2]
    fp.save({"conj": conj, "neg": neg}, tmp_path / "model.safetensors")
    loaded = fp.load(tmp_path / "model.safetensors")
    assert (loaded["conj"].tolist(), loaded["neg"].tolist()) == ([1 - 2j, 3 - 4j], [-1, -2])


def test_shards_without_elements_are_read(tmp_path: Path) -> None:
    """pytorch/pytorch#180481, huggingface/huggingface_hub PR 2591"""
    shapes = [(0,), (0, 3), (2, 0, 4), ()]
    state = {str(shape): torch.zeros(shape) for shape in shapes}
    meta = {"m": torch.empty(3, 3, device="meta"), "n": torch.empty(2, device="meta")}
    loaded = both({**state, **meta, "full": torch.ones(5)}, tmp_path / "model.pt")
    assert [tuple(t.shape) for t in loaded.values()] == [*shapes, (3, 3), (2,), (5,)]
    only = both(dict(list(state.items())[:3]), tmp_path / "empty.pt")
    assert [tuple(t.shape) for t in only.values()] == shapes[:3]
    bias = torch.arange(3.0)
    for rank, part in enumerate(bias.tensor_split(8)):
        loaded = both({"bias": part.clone()}, tmp_path / f"{rank}.pt")
        assert torch.equal(loaded["bias"], part)


def test_files_of_the_other_byte_order_and_new_dtypes_are_known(tmp_path: Path) -> None:
    """pytorch/pytorch#114634, #101688"""
    dtypes = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    floats = [d for d in dtypes if "float8" in str(d)]
    state = {str(d): torch.arange(256, dtype=torch.uint8).view(d) for d in floats}
    loaded = both(state, tmp_path / "model.pt")
    for dtype in floats:
        assert loaded[str(dtype)].view(torch.uint8).tolist() == list(range(256))


def random_states() -> dict[str, Any]:
    return {
        "python": random.Random(1).getstate(),
        "numpy": np.random.RandomState(1).get_state(),
        "torch": torch.Generator().manual_seed(1).get_state(),
        "loss": np.float64(0.5),
        "seen": {1, 2},
        "scale": 1 + 2j,
        "raw": b"bytes",
        "device": torch.device("cpu"),
    }


def refusal(path: Path) -> fp.WeightsOnlyError:
    with pytest.raises(fp.WeightsOnlyError) as caught:
        fp.load(path)
    return caught.value


def advised(error: fp.WeightsOnlyError) -> list[Any]:
    """What the message says to allow, as a program that imports the modules would write it."""
    (text,) = re.findall(r"add_safe_globals\((\[.*\])\)", str(error))
    return list(eval(text, {"numpy": np, **{name: sys.modules.get(name) for name in IMPORTED}}))


IMPORTED = ("collections", "datetime", "decimal", "fractions", "pathlib", "random")
IMPORTED += ("_codecs", "test_cases_load", "test_cases_load_before")


def test_refused_random_states_are_named_and_can_be_allowed(tmp_path: Path) -> None:
    """huggingface/transformers#40500, deepmodeling/deepmd-kit PR 4147"""
    path = tmp_path / "rng_state.pt"
    torch.save(random_states(), path)
    error = refusal(path)
    places = dict(error.entries)
    text = str(error)
    assert any(place.startswith("numpy") for place in places), places
    assert "loss" in places and "torch" not in places
    assert "weights_only=False" in text and str(path) in text
    with load_support.safe_globals(advised(error)):
        assert difference(torch.load(path), fp.load(path)) is None
    refusal(path)
    assert (
        difference(torch.load(path, weights_only=False), fp.load(path, weights_only=False)) is None
    )


class Plain:
    """A class of a user."""

    def __init__(self) -> None:
        self.value = [1, 2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and other.value == self.value

    class Within:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Plain.Within)


class Slotted:
    __slots__ = ("value",)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and other.value == self.value


def slotted() -> Slotted:
    made = Slotted()
    made.value = 3
    return made


class Kind(enum.Enum):
    A = 1


REFUSED: dict[str, Callable[[], Any]] = {
    "NumPy array of int16": lambda: np.arange(3, dtype=np.int16),
    "NumPy array of the other byte order": lambda: np.arange(3, dtype=">f4"),
    "NumPy strings": lambda: np.array(["a", "bc"]),
    "NumPy times": lambda: np.array(["2020-01-01"], dtype="M8[D]"),
    "NumPy records": lambda: np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
    "NumPy type": lambda: np.dtype("u2"),
    "NumPy numbers of many types": lambda: [np.int8(1), np.float32(2), np.bool_(True)],
    "class of NumPy": lambda: np.float32,
    "empty defaultdict": lambda: collections.defaultdict(list),
    "range": lambda: range(3),
    "frozenset": lambda: frozenset({1}),
    "slice": lambda: slice(1, 2),
    "decimal": lambda: decimal.Decimal("1.5"),
    "date": lambda: datetime.date(2020, 1, 2),
    "fraction": lambda: fractions.Fraction(1, 3),
    "path": lambda: pathlib.PurePosixPath("a/b"),
    "object": Plain,
    "object of a class within a class": Plain.Within,
    **({"object with slots": slotted} if load_support.TORCH >= (2, 6) else {}),
    "enumeration": lambda: Kind.A,
    "built-in type": lambda: int,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_refusal_says_to_allow_is_all_that_has_to_be(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    state = {"t": torch.ones(2), "odd": REFUSED[name]()}
    torch.save(state, path)
    error = refusal(path)
    assert any(place.startswith("odd") for place, _ in error.entries) or name == "frozenset"
    assert "odd" in str(error) or "frozenset" in str(error)
    with load_support.safe_globals(advised(error)):
        assert difference(torch.load(path, weights_only=True), fp.load(path)) is None


@pytest.mark.parametrize("name", ["NumPy array of int16", "NumPy numbers of many types", "object"])
def test_a_refusal_leaves_out_what_is_allowed_already(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"odd": REFUSED[name]()}, path)
    wanted = advised(refusal(path))
    for last in wanted:
        rest = [one for one in wanted if one is not last]
        with load_support.safe_globals(rest):
            error = refusal(path)
            assert advised(error) == [last]
            assert any(place.startswith("odd") for place, _ in error.entries)


@pytest.mark.skipif(load_support.TORCH < (2, 6), reason="skipped: torch before 2.6")
def test_an_object_that_has_moved_is_allowed_by_its_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = types.ModuleType("test_cases_load_before")
    before.Plain = Plain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, before.__name__, before)
    path = tmp_path / "model.pt"
    pickled = pickle.dumps(Plain(), 2).replace(b"ctest_cases_load\n", b"ctest_cases_load_before\n")
    path.write_bytes(with_pickle(saved([]), pickled))
    error = refusal(path)
    assert '(test_cases_load.Plain, "test_cases_load_before.Plain")' in str(error)
    with load_support.safe_globals(advised(error)):
        assert fp.load(path) == Plain()


def test_an_older_torch_is_not_told_to_allow_what_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_weights_only, "_takes_pairs", lambda: False)
    path = tmp_path / "model.pt"
    moved = pickle.dumps(Plain(), 2).replace(b"ctest_cases_load\n", b"ctest_save_api\n")
    monkeypatch.setitem(sys.modules, "test_save_api", types.SimpleNamespace(Plain=Plain))
    path.write_bytes(with_pickle(saved([]), moved))
    text = str(refusal(path))
    assert "add_safe_globals" not in text and "weights_only=False" in text
    assert "test_save_api.Plain" in text


@pytest.mark.skipif(load_support.TORCH < (2, 6), reason="skipped: torch before 2.6")
def test_arrays_of_numpy_1_are_allowed_by_their_old_names(tmp_path: Path) -> None:
    if not hasattr(np, "_core"):
        pytest.skip("skipped: NumPy 1 is here")
    path = tmp_path / "model.pt"
    state = {"array": np.arange(3.0), "loss": np.float64(0.5)}
    pickled = pickle.dumps(state, 2)
    assert pickled.count(b"cnumpy._core.") == 2
    path.write_bytes(with_pickle(saved([]), pickled.replace(b"cnumpy._core.", b"cnumpy.core.")))
    error = refusal(path)
    assert "numpy.core.multiarray" in str(error)
    with load_support.safe_globals(advised(error)):
        assert difference(state, fp.load(path)) is None


class Many(list[int]):
    """A list of a user."""


NEVER: dict[str, tuple[Callable[[], Any], str]] = {
    "defaultdict": (lambda: collections.defaultdict(list, a=[1]), "collections.defaultdict"),
    "deque": (lambda: collections.deque([1, 2]), "collections.deque"),
    "list of a user": (lambda: Many([1, 2]), "test_cases_load.Many"),
    "function of the system": (lambda: os.getcwd, "posix.getcwd"),
    "huge number": (lambda: 1 << 3000, "LONG4"),
}


@pytest.mark.parametrize("name", NEVER)
def test_what_torch_never_makes_is_said_to_need_trust(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    make, reason = NEVER[name]
    torch.save({"odd": make(), "loss": np.float64(1)}, path)
    for allowed in ([], [collections.defaultdict, list, collections.deque, Many]):
        with load_support.safe_globals(allowed):
            assert isinstance(
                outcome(torch.load, path, weights_only=True).error, pickle.UnpicklingError
            )
            error = refusal(path)
        assert reason in str(error), str(error)
        assert "add_safe_globals" not in str(error), "it would lead nowhere"
        assert "weights_only=False" in str(error)
        named = [place for place, _ in error.entries if place == "odd"]
        assert named == ([] if name == "huge number" else ["odd"])
    assert (
        difference(torch.load(path, weights_only=False), fp.load(path, weights_only=False)) is None
    )


@pytest.mark.parametrize(
    "name", [b"os;print", b"f(1)", b"a b", b'"+x+"'], ids=lambda name: name.decode()
)
def test_a_name_that_is_a_program_is_not_advised(name: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(with_pickle(saved([]), b"\x80\x02c" + name + b"\nx\n)R."))
    assert "add_safe_globals" not in str(refusal(path))


def test_many_tiny_tensors(tmp_path: Path) -> None:
    """pytorch/pytorch#124195"""
    state = {f"t{i}": torch.tensor([float(i)]) for i in range(3000)}
    loaded = both(state, tmp_path / "model.pt")
    assert sum(float(t) for t in loaded.values()) == 2999 * 3000 / 2


PEAK = """
import fastpersist as fp, torch
from test_load_memory import peak, resident
fp.load("small.pt")
before = resident()
loaded = fp.load("model.pt")
assert loaded["w5"][0] == 5
print(peak() - before)
"""


def test_the_peak_of_memory_is_near_the_size_of_the_file(tmp_path: Path, run_python: Any) -> None:
    """pytorch/pytorch#113530"""
    state = {f"w{i}": torch.full((4 << 20,), float(i)) for i in range(6)}
    fp.save(state, tmp_path / "model.pt")
    fp.save({"w": torch.ones(16 << 20)}, tmp_path / "small.pt")  # the staging memory is there then
    peak = int(run_python(PEAK).stdout)
    assert peak <= 1.3 * (tmp_path / "model.pt").stat().st_size
