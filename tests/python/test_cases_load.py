# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""Loading problems that users of other libraries reported, as tests."""

from __future__ import annotations

import collections
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from load_support import difference

import fastpersist as fp


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
        "counts": collections.defaultdict(list, a=[1]),
        "scale": 1 + 2j,
        "raw": b"bytes",
        "device": torch.device("cpu"),
    }


def test_refused_random_states_are_named_and_can_be_allowed(tmp_path: Path) -> None:
    """huggingface/transformers#40500, deepmodeling/deepmd-kit PR 4147"""
    path = tmp_path / "rng_state.pt"
    torch.save(random_states(), path)
    with pytest.raises(fp.WeightsOnlyError) as caught:
        fp.load(path)
    places = dict(caught.value.entries)
    text = str(caught.value)
    assert any(place.startswith("numpy") for place in places), places
    assert {"loss", "counts"} <= set(places)
    assert "add_safe_globals" in text and "weights_only=False" in text and str(path) in text
    assert "torch" not in places
    state = random_states()
    del state["counts"]  # torch's unpickler fills no defaultdict, allowed or not
    torch.save(state, path)
    allowed = _allowed(path)
    with torch.serialization.safe_globals(allowed):
        assert difference(torch.load(path), fp.load(path)) is None
    with pytest.raises(fp.WeightsOnlyError):
        fp.load(path)
    assert (
        difference(torch.load(path, weights_only=False), fp.load(path, weights_only=False)) is None
    )


def _allowed(path: Path) -> list[Any]:
    """What torch says must be allowed, and the types of NumPy's numbers."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    found: list[Any] = [type(np.dtype("f8")), type(np.dtype("u4"))]
    for name in names:
        module, _, attribute = name.rpartition(".")
        found.append(getattr(__import__(module, fromlist=[attribute]), attribute))
    return found


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
