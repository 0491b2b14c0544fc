# SPDX-License-Identifier: Apache-2.0
"""Tensors that have two names here and stand apart in the file: `load_into` compares the two in
little memory, after the structure and before anything is overwritten. And a fork meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import read

import fastpersist as fp
from fastpersist import _outline, _tied


def apart(count: int, **more: Any) -> dict[str, Any]:
    """Equal tensors in memory of their own."""
    names = [str(i) for i in range(count)]
    return {key: {n: torch.full((999,), float(n)) for n in names} for key in "ab"} | more


def tied(count: int, **more: Any) -> dict[str, Any]:
    """One memory for both names."""
    one = {str(i): torch.full((999,), -1.0) for i in range(count)}
    return {"a": one, "b": dict(one), **more}


def saved(tmp_path: Path, state: Any) -> Path:
    fp.save(state, tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes of every read."""
    found: list[int] = []
    read_plainly, read_part = _outline.Outline.read, _tied._read

    def noted(outline: Any, pieces: Any) -> None:
        found.append(sum(piece[2] for piece in pieces))
        read_plainly(outline, pieces)

    def part_noted(outline: Any, pieces: Any) -> None:
        found.append(sum(piece[2] for piece in pieces))
        read_part(outline, pieces)

    monkeypatch.setattr(_outline.Outline, "read", noted)
    monkeypatch.setattr(_tied, "_read", part_noted)
    return found


MEMORY = """
import sys, torch, fastpersist as fp
from fastpersist import _tied
def kilobytes(key):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key))
_tied.COMPARED_BYTES, size, count = 32 << 20, int(sys.argv[1]), int(sys.argv[2])
def make(value):
    return {str(i): torch.full((size,), value, dtype=torch.uint8) for i in range(count)}
fp.save({"small": torch.ones(1), "a": make(5), "b": make(5)}, "a.pt")
one = make(99)
mine = {"a": one, "b": dict(one), "small": torch.zeros(1)}
fp.load_into({"small": mine["small"]}, "a.pt", strict=False)
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")
before = kilobytes("VmRSS")
report = fp.load_into(mine, "a.pt")
taken = kilobytes("VmHWM") - before
assert all((tensor == 5).all() for tensor in one.values()), "values"
assert len(report.filled) == 2 * count + 1, report
print(taken)
"""


@pytest.mark.parametrize(("size", "count"), [(20_000_000, 12), (240_000_000, 1)])
def test_tied_tensors_take_no_second_copy(size: int, count: int, run_python: Any) -> None:
    assert int(run_python(MEMORY, str(size), str(count)).stdout) < 150_000  # of 240 or 480 MB


def test_structure_is_refused_before_tied_tensors_are_read(
    tmp_path: Path, reads: list[int]
) -> None:
    path = saved(tmp_path, apart(3, x=torch.ones(3)))
    mine = tied(3, x=torch.zeros(4))
    with pytest.raises(fp.MismatchError, match="1 different"):
        fp.load_into(mine, path)
    with pytest.raises(fp.MismatchError, match="1 missing"):
        fp.load_into(tied(3, x=torch.zeros(3), y=1), path)
    with pytest.raises(fp.MismatchError, match="1 only in the file"):
        fp.load_into(tied(3), path)
    assert reads == []
    fp.load_into(mine, path, strict=False)
    assert sum(reads) > 0
    assert [t.tolist() for t in mine["b"].values()] == [[float(i)] * 999 for i in range(3)]


@pytest.mark.parametrize("limit", [1, 1000, 5000, 1 << 28])
def test_values_that_differ_are_found_before_anything_is_overwritten(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tied, "COMPARED_BYTES", limit)
    there = apart(4)
    there["b"]["2"][998] = 7
    path = saved(tmp_path, there)
    mine = tied(4)
    with pytest.raises(fp.MismatchError, match=r"the memory of 'a\.2' here") as caught:
        fp.load_into(mine, path)
    assert [name for name, _ in caught.value.different] == ["b.2"]
    assert all(tensor.eq(-1).all() for tensor in mine["a"].values())
    report = fp.load_into(mine, path, strict=False)
    assert [name for name, _ in report.different] == ["b.2"]
    assert sorted(report.filled) == sorted(["a.0", "a.1", "a.2", "a.3", "b.0", "b.1", "b.3"])
    assert all(torch.equal(mine["a"][n], there["a"][n]) for n in there["a"])


def test_tied_tensors_are_read_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int]
) -> None:
    monkeypatch.setattr(_tied, "COMPARED_BYTES", 20_000)
    fp.load_into(tied(10), saved(tmp_path, apart(10)))
    *compared, filled = reads
    assert sum(compared) == 2 * 10 * 999 * 4
    assert max(compared) <= 20_000 and len(compared) <= 6
    assert filled == 10 * 999 * 4


def test_tied_tensors_of_another_order_in_the_file_are_compared_by_element(tmp_path: Path) -> None:
    square = torch.rand(50, 50)
    path = saved(tmp_path, {"a": square, "b": square.t().contiguous().t()})
    one = torch.zeros(50, 50)
    report = fp.load_into({"a": one, "b": one}, path)
    assert torch.equal(one, square)
    assert sorted(report.filled) == ["a", "b"]
    path = saved(tmp_path, {"a": square, "b": square.t().contiguous()})
    with pytest.raises(fp.MismatchError, match="the memory of 'a' here"):
        fp.load_into({"a": one, "b": one}, path)


def test_damage_in_a_tied_tensor_is_no_other_value(tmp_path: Path) -> None:
    state = {"a": torch.rand(5000), "c": torch.ones(1)}
    state["b"] = state["a"].clone()
    path = saved(tmp_path, state)
    data = bytearray(read(path))
    wanted = state["a"].numpy().tobytes()
    for at in (data.index(wanted), data.rindex(wanted)):
        hurt = bytearray(data)
        hurt[at + 12_345] ^= 4
        path.write_bytes(hurt)
        one = torch.zeros(5000)
        with pytest.raises(fp.CorruptCheckpointError) as caught:
            fp.load_into({"a": one, "b": one, "c": torch.zeros(1)}, path)
        assert caught.value.tensor == ("a" if at == data.index(wanted) else "b")
        assert not caught.value.partially_restored
        assert not one.any()


FORKED = """
import os, sys, threading, torch, fastpersist as fp
generator = torch.Generator().manual_seed(1)
state = {str(i): torch.rand(500_003, generator=generator) for i in range(12)}
fp.save(state, "a.pt")
stop, begun, codes = threading.Event(), threading.Event(), []
def fork_again_and_again():
    while not stop.is_set():
        begun.wait()
        child = os.fork()
        if child == 0:
            os._exit(0)
        codes.append(os.waitpid(child, 0)[1])
thread = threading.Thread(target=fork_again_and_again)
thread.start()
try:
    begun.set()
    while len(codes) < 20:
        for strided in (False, True):
            mine = {n: torch.zeros(1_000_006)[::2] if strided else torch.zeros(500_003)
                    for n in state}
            fp.load_into(mine, "a.pt", options=fp.Options(engine=sys.argv[1]))
            assert all(torch.equal(mine[n], state[n]) for n in state)
finally:
    stop.set()
    thread.join()
assert set(codes) == {0}, codes
print("right")
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["uring", "libaio", "threads", "buffered"])
def test_forks_of_another_thread_meanwhile_change_nothing(engine: str, run_python: Any) -> None:
    assert run_python(FORKED, engine, timeout=60).stdout == "right\n"
