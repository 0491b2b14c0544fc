# SPDX-License-Identifier: Apache-2.0
"""The zoo itself: torch's own round trip keeps each state, and the comparison sees changes."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import nn

# Torch warns about experimental dtypes and layouts.
pytestmark = pytest.mark.filterwarnings("ignore")


def _saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def test_names_are_unique() -> None:
    names = [entry.name for entry in zoo.ENTRIES]
    assert len(names) == len(set(names))


def test_every_dtype_of_this_torch_is_there() -> None:
    names = {entry.name for entry in zoo.ENTRIES}
    for dtype in (value for value in vars(torch).values() if isinstance(value, torch.dtype)):
        name = f"dtype_{str(dtype).removeprefix('torch.')}"
        assert {name, f"{name}_per_tensor", f"{name}_per_channel"} & names, dtype


@pytest.mark.parametrize("entry", zoo.parameters(zoo.savable()))
def test_torch_brings_back_the_same_state(entry: zoo.Entry) -> None:
    state = entry.build()
    data = _saved(state)
    if entry.unloadable:
        try:
            loaded = _loaded(data)
        except entry.unloadable:
            return
        assert not zoo.same(state, loaded)  # older versions of torch bring back a part in silence
    elif entry.deviation:
        assert entry.deviation in str(zoo.difference(state, _loaded(data)))
    else:
        assert zoo.difference(state, _loaded(data)) is None


@pytest.mark.parametrize("entry", [e for e in zoo.savable() if not e.slow], ids=str)
def test_two_builds_save_to_the_same_bytes(entry: zoo.Entry) -> None:
    first, second = entry.build(), entry.build()
    assert _saved(first) == _saved(second)


@pytest.mark.parametrize("entry", zoo.parameters(zoo.refused()))
def test_torch_refuses_the_state_with_the_stated_error(entry: zoo.Entry) -> None:
    assert entry.refused
    with pytest.raises(entry.refused):
        _saved(entry.build())


def test_building_a_state_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    zoo.ENTRIES[-1].build()
    assert torch.equal(before, torch.get_rng_state())


def _specimen() -> dict[str, Any]:
    """A state in which each of CHANGES has something to change."""
    items: list[Any] = [1, 2.5]
    base = torch.arange(8.0)
    weight = nn.Parameter(torch.ones(3))
    weight.__dict__["note"] = "kept"
    return {
        "float": -0.0,
        "nan": torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
        "flag": True,
        "items": items,
        "items_again": items,
        "items_equal": [1, 2.5],
        "inner": {"a": 1},
        "base": base,
        "view": base[2:7],
        "base_equal": torch.arange(8.0),
        "square": torch.eye(2).requires_grad_(),
        "empty": torch.zeros(0, 3),
        "hidden": torch.arange(5.0)[3:],
        "weight": weight,
        "conj": torch.tensor([1 + 2j]).conj(),
        "sparse": torch.eye(2).to_sparse(),
        "metrics": zoo.Metrics(0.5, torch.ones(2)),
        "module": nn.Linear(1, 1).state_dict(),
        "array": np.ones(2),
    }


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "negative zero loses its sign": lambda s: s.update(float=0.0),
    "a NaN payload changes": lambda s: s["nan"].view(torch.int32).bitwise_xor_(2),
    "True becomes 1": lambda s: s.update(flag=1),
    "a list becomes a tuple": lambda s: s.update(items_equal=tuple(s["items_equal"])),
    "a dict becomes ordered": lambda s: s.update(inner=OrderedDict(s["inner"])),
    "keys change their order": lambda s: s.update(float=s.pop("float")),
    "a key disappears": lambda s: s.pop("array"),
    "an element is appended": lambda s: s["items"].append(1),
    "a list is no longer shared": lambda s: s.update(items_again=list(s["items"])),
    "equal lists become one": lambda s: s.update(items_equal=s["items"]),
    "a view becomes a copy": lambda s: s.update(view=s["view"].clone()),
    "equal tensors become one": lambda s: s.update(base_equal=s["base"]),
    "equal tensors come to share a storage": lambda s: s.update(base_equal=s["base"][:]),
    "a view moves": lambda s: s.update(view=s["base"][3:8]),
    "strides change": lambda s: s.update(square=s["square"].detach().t().requires_grad_()),
    "a shape changes": lambda s: s.update(base=s["base"].view(2, 4)),
    "the shape of an empty tensor changes": lambda s: s.update(empty=torch.zeros(0, 4)),
    "a dtype changes": lambda s: s.update(base=s["base"].view(torch.int32)),
    "a byte that no tensor shows changes": lambda s: s["hidden"].as_strided((1,), (1,), 0).add_(1),
    "requires_grad is lost": lambda s: s.update(square=s["square"].detach()),
    "a Parameter becomes a tensor": lambda s: s.update(weight=s["weight"].data.requires_grad_()),
    "an attribute of a tensor is lost": lambda s: delattr(s["weight"], "note"),
    "a conj bit is resolved": lambda s: s.update(conj=s["conj"].resolve_conj()),
    "a sparse value changes": lambda s: s["sparse"]._values().add_(1),
    "an attribute of an object changes": lambda s: setattr(s["metrics"], "loss", 0.25),
    "the metadata of a state_dict is lost": lambda s: delattr(s["module"], "_metadata"),
    "a NumPy dtype changes": lambda s: s.update(array=s["array"].astype(">f8")),
}


def test_two_equal_states_are_the_same() -> None:
    torch.manual_seed(1)
    first = _specimen()
    torch.manual_seed(1)
    second = _specimen()
    assert zoo.difference(first, second) is None
    assert zoo.same(first, second)


@pytest.mark.parametrize("change", CHANGES)
def test_the_comparison_sees_that(change: str) -> None:
    torch.manual_seed(1)
    state = _specimen()
    torch.manual_seed(1)
    changed = _specimen()
    CHANGES[change](changed)
    assert not zoo.same(state, changed)
    assert not zoo.same(changed, state)


def test_the_difference_is_named_with_its_place() -> None:
    found = zoo.difference({"a": [1, torch.zeros(2)]}, {"a": [1, torch.zeros(3)]})
    assert found == "state['a'][1]: shape torch.Size([2]) became torch.Size([3])"
