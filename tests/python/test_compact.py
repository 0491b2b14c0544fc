# SPDX-License-Identifier: Apache-2.0
"""compact=True writes only the parts of storages that tensors show, and keeps their aliasing."""

from __future__ import annotations

import io
import os
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from conftest import first_difference, read
from torch import nn

import fastpersist as fp

# Torch warns about experimental layouts.
pytestmark = pytest.mark.filterwarnings("ignore")


def saved(state: Any, **arguments: Any) -> bytes:
    buffer = io.BytesIO()
    fp.save(state, buffer, **arguments)
    return buffer.getvalue()


def saved_by_torch(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def compacted(state: Any) -> Any:
    return torch.load(io.BytesIO(saved(state, compact=True)), weights_only=False)


def record_sizes(data: bytes) -> list[int]:
    """Bytes of each storage's record."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [r.file_size for r in archive.infolist() if "/data/" in r.filename]


def base() -> torch.Tensor:
    return torch.arange(24.0)


# --- The same file as torch.save makes of a state that was cloned by hand ---


def _two_ranges() -> tuple[Any, Any]:
    b = base()
    return [b[2:4], b[10:12]], [b[2:4].clone(), b[10:12].clone()]


def _adjacent() -> tuple[Any, Any]:
    b = base()
    return [b[2:4], b[4:8]], [b[2:4].clone(), b[4:8].clone()]


def _overlapping() -> tuple[Any, Any]:
    b = base()
    part = b[2:12].clone()
    return {"low": b[2:8], "high": b[6:12]}, {"low": part[:6], "high": part[4:]}


def _chain() -> tuple[Any, Any]:
    b = base()
    part = b[0:12].clone()
    return [b[0:5], b[8:12], b[4:9]], [part[0:5], part[8:12], part[4:9]]


def _inside() -> tuple[Any, Any]:
    b = base()
    part = b[4:20].clone()
    return [b[6:7], b[4:20], b[19:20]], [part[2:3], part, part[15:]]


def _again() -> tuple[Any, Any]:
    b = base()
    row = b[6:12]
    part = row.clone()
    return {"a": row, "b": [row, b[6:12]]}, {"a": part, "b": [part, part[:]]}


def _columns() -> tuple[Any, Any]:
    b = base().view(4, 6)
    part = b.reshape(-1)[1:20].clone()
    column = part.as_strided((4,), (6,), 0)
    return {"column": b[:, 1]}, {"column": column}


def _parameters() -> tuple[Any, Any]:
    b = base()
    plain = nn.Parameter(b[3:9]), nn.Parameter(b[12:18].view(2, 3), requires_grad=False)
    cloned = nn.Parameter(b[3:9].clone()), nn.Parameter(b[12:18].clone().view(2, 3), False)
    return OrderedDict(zip("ab", plain, strict=True)), OrderedDict(zip("ab", cloned, strict=True))


def _whole() -> tuple[Any, Any]:
    b = base()
    return {"all": b, "part": b[3:5], "other": torch.ones(2)}, {
        "all": (c := b.clone()),
        "part": c[3:5],
        "other": torch.ones(2),
    }


def _several_storages() -> tuple[Any, Any]:
    b, c = base(), torch.arange(100, dtype=torch.int16)
    return [b[1:3], c[50:60], b[5:6], c[:2]], [x.clone() for x in (b[1:3], c[50:60], b[5:6], c[:2])]


def _nothing_to_leave_out() -> tuple[Any, Any]:
    state = {"w": torch.arange(5), "step": 3, "names": ["a", ("b", None)]}
    return state, state


PAIRS: list[Callable[[], tuple[Any, Any]]] = [
    _two_ranges,
    _adjacent,
    _overlapping,
    _chain,
    _inside,
    _again,
    _columns,
    _parameters,
    _whole,
    _several_storages,
    _nothing_to_leave_out,
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__.strip("_"))
def test_file_equals_torchs_of_a_state_cloned_by_hand(pair: Any) -> None:
    state, by_hand = pair()
    assert first_difference(saved(state, compact=True), saved_by_torch(by_hand)) is None


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__.strip("_"))
def test_loaded_tensors_share_memory_as_the_saved_ones_overlapped(pair: Any) -> None:
    state, by_hand = pair()
    loaded = compacted(state)
    assert zoo.difference(by_hand, loaded) is None


# --- Size ---


def test_a_row_of_a_big_tensor_costs_a_row(tmp_path: Path) -> None:
    big = torch.randn(1000, 1000)
    info = fp.save({"row": big[500]}, tmp_path / "row.pt", compact=True)
    assert os.path.getsize(tmp_path / "row.pt") == info.bytes < 4000 + 2000
    assert info.referenced_bytes == 4000
    loaded = torch.load(tmp_path / "row.pt", weights_only=True)["row"]
    assert torch.equal(loaded, big[500])
    assert loaded.untyped_storage().nbytes() == 4000


def test_forty_layers_of_one_buffer_in_forty_files_cost_little_more_than_one(
    tmp_path: Path,
) -> None:
    buffer = torch.randn(2_000_000)
    total = 0
    for number, layer in enumerate(buffer.view(40, -1)):
        total += fp.save({"weight": layer}, tmp_path / f"{number}.pt", compact=True).bytes
    assert 8_000_000 < total < 1.05 * 8_000_000
    for number, layer in enumerate(buffer.view(40, -1)):
        loaded = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        assert torch.equal(loaded["weight"], layer)


def test_forty_layers_of_one_buffer_in_one_file_are_written_once_each() -> None:
    buffer = torch.randn(40_000)
    data = saved(dict(enumerate(buffer.split(1000))), compact=True)
    assert record_sizes(data) == [4000] * 40


def test_without_compact_views_drag_their_storage_along_and_the_info_says_so() -> None:
    info = fp.save({"row": torch.randn(1000, 1000)[5]}, io.BytesIO())
    assert info.referenced_bytes == 4000
    assert info.bytes > 4_000_000


def test_empty_views_cost_nothing_and_share_nothing() -> None:
    b = base()
    data = saved({"none": b[5:5], "also": b[:0].view(0, 3), "there": b[3:4]}, compact=True)
    assert sorted(record_sizes(data)) == [0, 0, 4]
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded["also"].shape == (0, 3)
    assert loaded["there"].tolist() == [3.0]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_an_empty_view_does_not_stand_for_what_begins_at_its_place(order: tuple[int, ...]) -> None:
    b = base()
    views = [b[3:3], b[3:9], b[9:9].view(2, 0)]
    loaded = compacted([views[at] for at in order])
    assert [t.tolist() for t in loaded] == [views[at].tolist() for at in order]
    assert [t.shape for t in loaded] == [views[at].shape for at in order]


# --- Values ---


@pytest.mark.parametrize("seed", range(5))
def test_random_views_keep_their_values_strides_and_overlaps(seed: int) -> None:
    print(f"seed {seed}")
    choice = random.Random(seed)
    buffers = [torch.arange(200.0) + 1000 * n for n in range(3)]
    views = []
    for _ in range(60):
        shape = [choice.randrange(1, 5) for _ in range(choice.randrange(4))]
        strides = [choice.choice([0, 1, 3, 10]) for _ in shape]
        span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        views.append(
            choice.choice(buffers).as_strided(shape, strides, choice.randrange(200 - span))
        )
    loaded = compacted(views)
    for before, after in zip(views, loaded, strict=True):
        assert torch.equal(before, after)
        assert before.stride() == after.stride()

    def elements(tensors: list[torch.Tensor], at: int) -> set[int]:
        tensor = tensors[at]
        offsets = torch.arange(tensor.untyped_storage().nbytes() // 4)
        shown = offsets.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        start = tensor.untyped_storage().data_ptr() // 4
        return {start + int(offset) for offset in shown.reshape(-1)}

    for i in range(len(views)):
        for j in range(i):
            shared = bool(elements(views, i) & elements(views, j))
            assert shared == bool(elements(loaded, i) & elements(loaded, j)), (i, j)


def test_writing_through_one_loaded_view_shows_in_the_other() -> None:
    b = base()
    loaded = compacted({"low": b[2:8], "high": b[6:12]})
    loaded["low"][-1] = 99.0
    assert loaded["high"][1] == 99.0


@pytest.mark.parametrize("name", ["module_state_dict", "optimizer_adam", "optimizer_sgd_momentum"])
def test_states_without_views_are_the_usual_file(name: str) -> None:
    state = next(e for e in zoo.ENTRIES if e.name == name).build()
    assert first_difference(saved(state, compact=True), saved_by_torch(state)) is None


# --- What it does not do ---


@pytest.mark.parametrize(
    "name",
    ["subclass", "dtype_quint8_per_tensor", "view_conj", "sparse_coo", "meta", "storage_typed"],
)
def test_unusual_tensors_are_refused_in_words(name: str, tmp_path: Path) -> None:
    found = [e for e in zoo.ENTRIES if e.name == name]
    if not found:
        pytest.skip("skipped: this torch does not have it")
    path = tmp_path / "model.pt"
    path.write_bytes(b"the old file")
    with pytest.raises(fp.UnsupportedStateError, match="compact=True"):
        fp.save({"tensor": found[0].build()}, path, compact=True)
    assert read(path) == b"the old file"


def test_the_entry_that_is_in_the_way_is_named() -> None:
    state = {"plain": torch.ones(2), "odd": [torch.ones(2), torch.eye(2).to_sparse()]}
    with pytest.raises(fp.UnsupportedStateError, match=r"\['odd'\]\[1\]"):
        fp.save(state, io.BytesIO(), compact=True)


def test_two_types_of_one_memory_are_refused_naming_both() -> None:
    b = base()
    state = {"float": b[:4], "int": b.view(torch.int32)[2:6]}
    with pytest.raises(fp.UnsupportedStateError) as caught:
        fp.save(state, io.BytesIO(), compact=True)
    assert "['float']" in str(caught.value)
    assert "['int']" in str(caught.value)


@pytest.mark.parametrize(
    "arguments", [{"pickle_protocol": 4}, {"_use_new_zipfile_serialization": False}]
)
def test_arguments_that_it_cannot_serve_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(fp.Error, match="compact=True"):
        fp.save([torch.ones(2)], io.BytesIO(), compact=True, **arguments)


def test_safetensors_files_are_compact_anyway(tmp_path: Path) -> None:
    state = {"row": torch.randn(1000, 100)[5]}
    for compact in (False, True):
        info = fp.save(state, tmp_path / "x.safetensors", compact=compact)
        assert 400 < info.bytes < 600
