# SPDX-License-Identifier: Apache-2.0
"""fp.rng_state loads safely, and fp.set_rng_state puts all of it back or changes nothing.

CUDA is played by a stand-in where there is none.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastpersist as fp

global_numpy: Any = np.random
"""With what its stubs leave out."""


@pytest.fixture(autouse=True)
def _generators_go_on_as_before() -> Iterator[None]:
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    bits = global_numpy.get_bit_generator()
    yield
    global_numpy.set_bit_generator(bits)
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draw() -> list[float]:
    """From every generator, in ways that keep numbers for the next call too."""
    return [
        random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()),
        int(np.random.randint(1 << 30)), torch.rand(()).item(), torch.randn(3).sum().item(),
    ]  # fmt: skip


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def through_a_file(value: Any, path: Path) -> Any:
    fp.save(value, path)
    return fp.load(path, weights_only=True)


# --- It comes back ---


@pytest.mark.parametrize("drawn", [0, 1, 2, 700])
def test_every_generator_goes_on_where_it_was(drawn: int, tmp_path: Path) -> None:
    seed(3)
    for _ in range(drawn):
        draw()
    value = fp.rng_state()
    expected = [draw() for _ in range(3)]
    fp.set_rng_state(value)
    assert [draw() for _ in range(3)] == expected
    seed(99)
    fp.set_rng_state(through_a_file(value, tmp_path / "rng.pt"))
    assert [draw() for _ in range(3)] == expected


def test_it_is_a_value_of_its_own_that_no_draw_changes() -> None:
    seed(4)
    value = fp.rng_state()
    first = draw()
    draw()
    fp.set_rng_state(value)
    assert draw() == first
    fp.set_rng_state(value)
    assert draw() == first


def types_of(value: Any) -> Iterator[type]:
    yield type(value)
    items = list(value.values()) if isinstance(value, dict) else value
    for item in items if isinstance(items, list | tuple) else ():
        yield from types_of(item)


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_it_holds_only_what_weights_only_makes(kind: str, tmp_path: Path) -> None:
    global_numpy.set_bit_generator(getattr(np.random, kind)(5))
    random.gauss(0, 1)
    np.random.randn()
    value = fp.rng_state()
    allowed = {int, float, str, type(None), list, tuple, dict, torch.Tensor}
    assert set(types_of(value)) <= allowed
    torch.save(value, tmp_path / "rng.pt")
    loaded = torch.load(tmp_path / "rng.pt", weights_only=True)
    expected = [draw() for _ in range(3)]
    fp.set_rng_state(loaded)
    assert [draw() for _ in range(3)] == expected


def test_lists_in_the_place_of_tuples_are_taken() -> None:
    value = fp.rng_state()
    expected = random.random()
    fp.set_rng_state({"python": json.loads(json.dumps(value["python"]))})
    assert random.random() == expected


def test_generators_that_the_value_lacks_stay_as_they_are() -> None:
    value = fp.rng_state()
    seed(5)
    expected = (np.random.rand(), torch.rand(()).item())
    seed(5)
    fp.set_rng_state({"python": value["python"]})
    assert (np.random.rand(), torch.rand(()).item()) == expected


# --- It does not fit ---


def with_key(value: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The NumPy part of a value, changed."""
    state = {**value["numpy"]["state"], **changes.pop("state", {})}
    return {**value["numpy"], **changes, "state": state}


SHORT = torch.zeros(3, dtype=torch.uint8)
WRONG = [
    ("python", lambda v: 3, "no state of Python's random"),
    ("python", lambda v: (3, v["python"][1][:9], None), "no state of Python's random"),
    ("python", lambda v: (1, v["python"][1], None), "no state of Python's random"),
    ("python", lambda v: (3, (*v["python"][1][:624], 625), None), "no state of Python's random"),
    ("python", lambda v: (3, v["python"][1], "half"), "'half' is no number"),
    ("numpy", lambda v: with_key(v, bit_generator="PCG64"), "of PCG64, while MT19937"),
    ("numpy", lambda v: v["python"], "of tuple, while MT19937"),
    ("numpy", lambda v: with_key(v, state={"key": [1, 2]}), r"\(2,\) numbers in place of \(624,\)"),
    ("numpy", lambda v: with_key(v, state={"key": [1 << 40] * 624}), "no state of NumPy's MT19937"),
    ("numpy", lambda v: with_key(v, state={"pos": 625}), "'pos' is 625"),
    ("numpy", lambda v: with_key(v, state={"pos": -1}), "'pos' is -1"),
    ("numpy", lambda v: with_key(v, state={"pos": 1.5}), "float in place of int"),
    ("numpy", lambda v: with_key(v, gauss="x"), "str in place of float"),
    ("numpy", lambda v: {"bit_generator": "MT19937"}, "no state of NumPy's MT19937"),
    ("torch", lambda v: SHORT, "no state of torch's generator for cpu"),
    ("torch", lambda v: v["torch"].int(), "no state of torch's generator for cpu"),
    ("torch", lambda v: torch.full_like(v["torch"], 255), "no state of torch's generator for cpu"),
    ("torch", lambda v: v["torch"].tolist(), "list in place of a tensor for cpu"),
    ("cuda", lambda v: SHORT, "Tensor in place of a list of tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "make", "why"), WRONG)
def test_a_part_that_is_no_state_is_named_and_nothing_changes(
    part: str, make: Any, why: str
) -> None:
    value = fp.rng_state()
    value[part] = make(value)
    seed(6)
    expected = draw()
    seed(6)
    with pytest.raises(fp.MismatchError, match=why) as caught:
        fp.set_rng_state(value)
    assert [name for name, _ in caught.value.different] == [part]
    assert "no generator was changed" in str(caught.value)
    assert draw() == expected


def test_positions_of_other_generators_of_numpy_are_checked_as_well() -> None:
    global_numpy.set_bit_generator(np.random.Philox(1))
    value = fp.rng_state()
    value["numpy"]["buffer_pos"] = 99
    with pytest.raises(fp.MismatchError, match="'buffer_pos' is 99"):
        fp.set_rng_state(value)


def test_every_part_that_does_not_fit_is_listed() -> None:
    value = {**fp.rng_state(), "torch": SHORT, "python": None}
    with pytest.raises(fp.MismatchError, match=r"'python': .*; 'torch': ") as caught:
        fp.set_rng_state(value)
    assert [name for name, _ in caught.value.different] == ["python", "torch"]


@pytest.mark.parametrize("value", [None, {}, 3, {"python": (), "jax": 1}, [("python", 1)]])
def test_what_is_no_such_value_is_refused(value: Any) -> None:
    with pytest.raises(fp.ArgumentError, match="set_rng_state failed"):
        fp.set_rng_state(value)


# --- CUDA ---


class Devices:
    """Stands in for CUDA: states are lists of tensors, one for each device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, initialized: bool) -> None:
        self.states = [torch.full((16,), i, dtype=torch.uint8) for i in range(count)]
        self.initialized = initialized
        real = torch.Generator

        class Generator:
            def __init__(self, device: str) -> None:
                self.device = device

            def set_state(self, state: torch.Tensor) -> None:
                if self.device == "cpu":
                    real(device="cpu").set_state(state)
                elif state.numel() != 16:
                    raise RuntimeError("RNG state is wrong size")

        monkeypatch.setattr(torch, "Generator", Generator)
        for name, function in {
            "is_initialized": lambda: self.initialized,
            "is_available": lambda: bool(self.states),
            "device_count": lambda: len(self.states),
            "get_rng_state_all": lambda: [state.clone() for state in self.states],
            "set_rng_state": self._set,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def _set(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state.clone()

    def numbers(self) -> list[int]:
        return [int(state[0]) for state in self.states]


def test_every_cuda_device_is_saved_and_put_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices = Devices(monkeypatch, 2, initialized=True)
    value = through_a_file(fp.rng_state(), tmp_path / "rng.pt")
    for state in devices.states:
        state.fill_(77)
    devices.states.append(torch.full((16,), 5, dtype=torch.uint8))
    fp.set_rng_state(value)
    assert devices.numbers() == [0, 1, 5]  # the one that was not there stays as it is


def test_cuda_that_was_not_initialized_has_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    Devices(monkeypatch, 2, initialized=False)
    assert "cuda" not in fp.rng_state()


@pytest.mark.parametrize(("count", "why"), [(0, "no CUDA device here"), (1, "2 CUDA devices, 1")])
def test_fewer_cuda_devices_are_an_error_before_anything_changes(
    count: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Devices(monkeypatch, 2, initialized=True)
    value = fp.rng_state()
    here = Devices(monkeypatch, count, initialized=False)
    here.states = [torch.full((16,), 9, dtype=torch.uint8)] * count
    before = random.getstate()
    random.random()
    expected = random.getstate()
    assert before != expected
    with pytest.raises(fp.MismatchError, match=why) as caught:
        fp.set_rng_state(value)
    assert [name for name, _ in caught.value.different] == ["cuda"]
    assert random.getstate() == expected
    assert here.numbers() == [9] * count
    del value["cuda"]  # as the message says
    fp.set_rng_state(value)
    assert random.getstate() == before


def test_a_wrong_state_of_the_last_device_leaves_the_first_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = Devices(monkeypatch, 2, initialized=True)
    value = {"cuda": [torch.full((16,), 7, dtype=torch.uint8), SHORT]}
    with pytest.raises(fp.MismatchError, match="cuda:1: RNG state is wrong size"):
        fp.set_rng_state(value)
    assert devices.numbers() == [0, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: no CUDA device")
def test_dropout_on_a_cuda_device_goes_on_where_it_was(tmp_path: Path) -> None:
    ones = torch.ones(1000, device="cuda")
    torch.nn.functional.dropout(ones)
    value = fp.rng_state()
    expected = torch.nn.functional.dropout(ones)
    loaded = through_a_file(value, tmp_path / "rng.pt")
    loaded["torch"] = loaded["torch"].cuda()  # as a map_location would send it
    loaded["cuda"] = [state.cuda() for state in loaded["cuda"]]
    fp.set_rng_state(loaded)
    assert torch.equal(torch.nn.functional.dropout(ones), expected)


# --- Without torch, without NumPy ---

WITHOUT = """
import random, sys
for name in sys.argv[1:]:
    sys.modules[name] = None
import fastpersist as fp
value = fp.rng_state()
expected = random.random()
fp.set_rng_state(value)
assert random.random() == expected
print(*value)
before = random.getstate()
for name in sys.argv[1:]:
    try:
        fp.set_rng_state({**value, name: {}})
    except fp.MismatchError as error:
        assert f"{name} cannot be imported here" in str(error), error
    else:
        raise SystemExit(f"{name} was not missed")
assert random.getstate() == before
"""


def test_it_works_without_torch_and_without_numpy(run_python: Any) -> None:
    done = run_python(WITHOUT, "torch", "numpy")
    assert done.stdout.split() == ["python"]


def test_what_is_not_imported_has_no_state_and_is_not_imported_for_it(run_python: Any) -> None:
    program = "import fastpersist as fp, sys; print(*fp.rng_state(), 'torch' in sys.modules)"
    assert run_python(program).stdout.split() == ["python", "False"]


def test_what_the_value_has_is_imported_to_be_restored(run_python: Any) -> None:
    seed(8)
    value = json.dumps(fp.rng_state()["numpy"])
    expected = float(np.random.rand())
    program = """
import json, sys
import fastpersist as fp
assert "numpy" not in sys.modules
fp.set_rng_state({"numpy": json.loads(sys.argv[1])})
print(sys.modules["numpy"].random.rand())
"""
    assert float(run_python(program, value).stdout) == expected
