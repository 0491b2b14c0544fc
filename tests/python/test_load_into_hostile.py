# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""Files made to do harm, and damaged ones, through `load_into`: it ends soon whatever containers
share or contain, blames the side that is at fault, and says what damage overwrote."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import read
from load_support import outcome, records_of, saved, with_pickle, zip_of
from test_load_hostile import LIES, MISFITS, PROGRAMS, pickle_of_storage
from torch import nn

import fastpersist as fp
from fastpersist import _fill

# --- Containers that are shared, deep, or in themselves ---

SHARED = """
import sys, torch, fastpersist as fp
from test_load_into_hostile import Adapting, Keeper
def shared(leaf):
    x = [leaf]
    for _ in range(60): x = [x, x]
    return x
def dicts(leaf):
    x = {"a": leaf}
    for _ in range(60): x = {"a": x, "b": x}
    return x
def pairs(leaf):
    x = (leaf,)
    for _ in range(60): x = (x, x)
    return x
make, w = {"lists": shared, "dicts": dicts, "tuples": pairs}[sys.argv[1]], torch.ones(3)
fp.save({"w": w, "x": make(w), "n": make(5)}, "a.pt")
states = {
    "neither": {},
    "plain": {"n": None},
    "list": {"n": [0]},
    "tuple": {"n": (None,)},
    "same": {"x": make(torch.zeros(3)), "n": make(0)},
    "other": {"x": make(torch.zeros(4)), "n": make({})},
    "gone": {"y": make(torch.zeros(4))},
    "object": {"x": Keeper()},
    "hooks": {"x": Adapting()},
    "optimizer": {"x": torch.optim.SGD([w.clone()], lr=1.0)},
}
for strict in (True, False):
    for name, more in states.items():
        state = {"w": torch.zeros(3), **more}
        try:
            fp.load_into(state, "a.pt", strict=strict)
        except (fp.MismatchError, RuntimeError) as error:
            assert strict or name == "hooks", (name, error)
        else:
            assert state["w"].tolist() == [1, 1, 1], name
    print("done", flush=True)
"""


class Keeper:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.kept: Any = None

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        self.kept = state


class Adapting(nn.Module):
    """Judges for itself what fits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self._register_load_state_dict_pre_hook(lambda *_: None)


@pytest.mark.parametrize("kind", ["lists", "dicts", "tuples"])
def test_containers_that_share_containers_do_not_keep_it_busy(kind: str, run_python: Any) -> None:
    """As a tree the file has 2^60 leaves."""
    assert run_python(SHARED, kind, timeout=60).stdout == "done\ndone\n"


def test_a_part_that_stands_at_several_places_is_listed_at_each(tmp_path: Path) -> None:
    part = {"a": torch.ones(2), "b": torch.ones(3)}
    fp.save({"w": torch.ones(1), "x": part, "y": [part, part]}, tmp_path / "a.pt")
    report = fp.load_into({"w": torch.zeros(1)}, tmp_path / "a.pt", strict=False)
    places = ("x", "y.0", "y.1")
    assert report.unexpected == tuple(f"{place}.{key}" for place in places for key in "ab")
    mine = {"a": torch.zeros(2), "b": torch.zeros(3)}
    report = fp.load_into({"x": mine, "y": [mine, mine]}, tmp_path / "a.pt", strict=False)
    assert sorted(report.filled) == [f"{place}.{key}" for place in places for key in "ab"]


def in_itself() -> dict[str, Any]:
    inner: list[Any] = [torch.ones(2)]
    inner.append({"again": inner})
    return {"w": torch.ones(3), "x": inner}


def nested(depth: int, leaf: Any) -> list[Any]:
    for _ in range(depth):
        leaf = [leaf]
    return leaf  # type: ignore[no-any-return]


def deep() -> bytes:
    """{"w": ones, "x": [[[...tensor...]]]}, deeper than torch.save can write."""
    body = pickle_of_storage(3, 3)[2:-1]
    program = b"\x80\x02}(X\1\0\0\0w" + body + b"X\1\0\0\0x" + b"]" * 50_000 + body + b"a" * 50_000
    return with_pickle(saved(torch.ones(3)), program + b"u.")


def test_what_contains_itself_in_the_file_and_is_not_wanted_is_unexpected(tmp_path: Path) -> None:
    fp.save(in_itself(), tmp_path / "a.pt")
    state = {"w": torch.zeros(3)}
    with pytest.raises(fp.MismatchError) as caught:
        fp.load_into(state, tmp_path / "a.pt")
    assert caught.value.unexpected == ["x.0", "x.1.again"]
    fp.load_into(state, tmp_path / "a.pt", strict=False)
    assert state["w"].tolist() == [1, 1, 1]


def test_depth_in_the_file_that_is_not_wanted_is_unexpected() -> None:
    state = {"w": torch.zeros(3)}
    with pytest.raises(fp.MismatchError) as caught:
        fp.load_into(state, io.BytesIO(deep()))
    assert [name.startswith("x.0.0.") for name in caught.value.unexpected] == [True]
    assert len(str(caught.value)) < 5000
    fp.load_into(state, io.BytesIO(deep()), strict=False)
    assert state["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("target", "kind"), [(Keeper, "in itself"), (Keeper, "deep"), (Adapting, "in itself")]
)
def test_an_endless_state_of_an_object_is_the_fault_of_the_file(
    target: Any, kind: str, strict: bool
) -> None:
    data = deep() if kind == "deep" else saved({"w": torch.ones(3), "x": {"y": in_itself()["x"]}})
    state = {"w": torch.zeros(3), "x": target()}
    with pytest.raises(fp.MismatchError, match="in the file") as caught:
        fp.load_into(state, io.BytesIO(data), strict=strict)
    assert [name for name, _ in caught.value.different] == ["x"]
    assert state["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", ["in itself", "deep"])
def test_an_endless_state_here_is_the_fault_of_the_caller(kind: str) -> None:
    data = deep() if kind == "deep" else saved(in_itself())
    mine = nested(50_000, torch.zeros(3)) if kind == "deep" else in_itself()["x"]
    with pytest.raises(fp.ArgumentError, match="the state is nested too deeply or contains itself"):
        fp.load_into({"x": mine}, io.BytesIO(data), strict=False)


def test_names_do_not_grow_with_every_long_key(tmp_path: Path) -> None:
    """A key of a megabyte over ten thousand tensors would be names of ten gigabytes."""
    tensor = torch.ones(1)
    fp.save({"w": tensor, "k" * 1_000_000: dict.fromkeys(range(10000), tensor)}, tmp_path / "a.pt")
    report = fp.load_into({"w": torch.zeros(1)}, tmp_path / "a.pt", strict=False)
    assert len(report.unexpected) == 10_000
    assert max(map(len, report.unexpected)) <= 1000


def test_numbers_too_long_to_print_are_a_mismatch_all_the_same() -> None:
    data = saved({10**10_000: torch.ones(1), "t": (10**10_000,)})
    with pytest.raises(fp.MismatchError) as caught:
        fp.load_into({"t": (1,)}, io.BytesIO(data), weights_only=False)
    assert [name for name, _ in caught.value.different] == ["t.0"]
    assert len(caught.value.unexpected) == 1


# --- What load refuses ---

INTO: list[Callable[[], Any]] = [dict, list, lambda: (None,), lambda: torch.zeros(30)]


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_broken_pickles_give_the_errors_of_load(program: str, weights_only: bool) -> None:
    data = with_pickle(saved([]), PROGRAMS[program])
    loaded = outcome(fp.load, io.BytesIO(data), weights_only=weights_only)
    for target in INTO:
        got = outcome(fp.load_into, target(), io.BytesIO(data), weights_only=weights_only)
        if loaded.error is not None:
            assert type(got.error) is type(loaded.error), got.error
        else:
            assert got.error is None or isinstance(got.error, fp.MismatchError), got.error


@pytest.mark.parametrize("lie", LIES)
def test_archives_that_lie_are_refused_and_nothing_is_touched(lie: str) -> None:
    records = records_of(saved({"w": torch.arange(30.0), "v": torch.ones(4)}))
    setattr(records[2], *LIES[lie])
    mine = {"w": torch.zeros(30), "v": torch.zeros(4)}
    with pytest.raises((fp.UnsupportedFileError, fp.CorruptCheckpointError)):
        fp.load_into(mine, io.BytesIO(zip_of(records)))
    assert not mine["w"].any() and not mine["v"].any()


@pytest.mark.parametrize(("size", "shape", "key"), MISFITS)
def test_tensors_outside_of_their_storage_fill_nothing(size: int, shape: int, key: str) -> None:
    data = with_pickle(saved(torch.arange(30.0)), pickle_of_storage(size, shape, key))
    mine = torch.zeros(30)
    with pytest.raises(fp.CorruptCheckpointError if shape >= 0 else RuntimeError):
        fp.load_into(mine, io.BytesIO(data))
    assert not mine.any()


# --- Damage ---


def layers() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {f"layer.{i}": torch.rand(999, generator=generator) for i in range(5)}


@pytest.mark.parametrize("number", range(5))
def test_a_flipped_bit_names_its_tensor_and_says_what_was_overwritten(
    number: int, tmp_path: Path
) -> None:
    path, state, name = tmp_path / "a.pt", layers(), f"layer.{number}"
    fp.save(state, path)
    data = bytearray(read(path))
    at = data.index(state[name].numpy().tobytes()) + 1234
    data[at] ^= 1 << number
    path.write_bytes(data)
    mine = {key: torch.zeros(999) for key in state}
    with pytest.raises(fp.CorruptCheckpointError) as caught:
        fp.load_into(mine, path)
    error = caught.value
    assert (error.tensor, error.filename) == (name, str(path))
    assert error.partially_restored and "overwritten in part" in str(error)
    assert error.expected != error.found
    strided = {key: torch.zeros(1998)[::2] for key in state}
    with pytest.raises(fp.CorruptCheckpointError) as caught:
        fp.load_into(strided, path)
    assert (caught.value.tensor, caught.value.partially_restored) == (name, False)
    assert not any(tensor.any() for tensor in strided.values())


@pytest.mark.parametrize("engine", ["uring", "libaio", "threads", "buffered"])
@pytest.mark.parametrize("touched", [False, True], ids=["at once", "later"])
def test_a_file_that_shrinks_while_it_is_read_says_what_was_overwritten(
    engine: str, touched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, state = tmp_path / "a.pt", layers()
    fp.save(state, path)
    read_plainly, reads = _fill._Filler._read, 0

    def cut_first(filler: Any, fills: Any) -> None:
        nonlocal reads
        reads += 1
        if reads == 1 + touched:
            os.truncate(path, 4096)
        read_plainly(filler, fills)

    monkeypatch.setattr(_fill._Filler, "_read", cut_first)
    monkeypatch.setattr(_fill, "STAGED_BYTES", 5000)  # so that there are several reads
    mine = {name: torch.zeros(1998)[::2] for name in state}
    with pytest.raises((fp.CorruptCheckpointError, fp.StorageError)) as caught:
        fp.load_into(mine, path, options=fp.Options(engine=engine))
    error: Any = caught.value
    assert error.partially_restored == touched
    assert ("overwritten in part" in str(error)) == touched
    for name, tensor in mine.items():  # as it was, or right
        assert not tensor.any() or torch.equal(tensor, state[name])
    assert any(tensor.any() for tensor in mine.values()) == touched
