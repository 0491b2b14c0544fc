# SPDX-License-Identifier: Apache-2.0
"""Every state of the zoo comes back as torch.load brings it back: from either writer's file, given
in every way, and saved again to the same bytes."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from load_support import TORCH, WAYS, Outcome, difference, mismatch, outcome

import fastpersist as fp

# Torch warns about experimental dtypes and layouts.
pytestmark = pytest.mark.filterwarnings("ignore")

# Before 2.6 torch.load made anything unless told otherwise; we never do.
TODAYS_DEFAULT = {} if TORCH >= (2, 6) else {"weights_only": True}
SMALL = 1 << 20
"""Bytes of a file that is loaded in every way; larger ones are loaded from a path."""


def agree(theirs: Outcome, argument: Any, how: str, **named: Any) -> Outcome:
    ours = outcome(fp.load, argument, **named)
    problem = mismatch(theirs, ours)
    assert problem is None, f"{how}, {named}: {problem}"
    return ours


LOADABLE = [entry for entry in zoo.savable() if not entry.unloadable]


@pytest.mark.parametrize("entry", zoo.parameters(LOADABLE))
def test_the_objects_are_those_of_torch_load(entry: zoo.Entry, save_with_both: Any) -> None:
    pair = save_with_both(entry.build())
    assert pair.difference() is None
    small = os.path.getsize(pair.ours) < SMALL
    for weights_only in (False, True):
        theirs = outcome(torch.load, pair.theirs, weights_only=weights_only)
        for way, give in WAYS.items():
            if small or way == "str":
                with give(pair.ours) as argument:
                    agree(theirs, argument, way, weights_only=weights_only)
    agree(outcome(torch.load, pair.ours, **TODAYS_DEFAULT), pair.ours, "by default")


@pytest.mark.parametrize("entry", [e for e in zoo.savable() if not e.slow], ids=str)
def test_torch_load_agrees_with_us_on_our_files(entry: zoo.Entry, tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    fp.save(entry.build(), path)
    theirs = outcome(torch.load, path, weights_only=False)
    if entry.unloadable:  # older versions of torch bring back a part in silence
        assert isinstance(outcome(fp.load, path).error, fp.CorruptCheckpointError)
        return
    ours = agree(theirs, path, "str", weights_only=False)
    if ours.error is None and not entry.deviation:
        assert zoo.difference(entry.build(), ours.value) is None


@pytest.mark.parametrize("entry", [e for e in LOADABLE if not e.slow], ids=str)
def test_what_was_loaded_is_saved_to_the_same_bytes_as_what_torch_loaded(
    entry: zoo.Entry, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    torch.save(entry.build(), path)
    theirs, ours = torch.load(path, weights_only=False), fp.load(path, weights_only=False)
    files = []
    for state in (theirs, ours):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        files.append(buffer.getvalue())
    assert files[0] == files[1]
    again = tmp_path / "again" / "model.pt"
    again.parent.mkdir()
    info = fp.save(ours, again)
    assert info.bytes == os.path.getsize(again)
    assert difference(theirs, fp.load(again, weights_only=False)) is None


PLACES: dict[str, Any] = {
    "string": "cpu",
    "device": torch.device("cpu"),
    "numbered": "cpu:0",
    "callable that keeps": lambda storage, location: storage,
    "callable that leaves it": lambda storage, location: None,
    "dict": {"cpu": "cpu", "cuda:0": "cpu"},
    "meta": "meta",
    "meta device": torch.device("meta"),
    "a device that is not there": "cuda:7",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["whole_run", "view_conj", "every_dtype_together", "meta"])
def test_map_location_does_what_it_does_in_torch_load(
    name: str, place: str, tmp_path: Path
) -> None:
    entry = next(e for e in zoo.ENTRIES if e.name == name)
    path = tmp_path / "model.pt"
    torch.save(entry.build(), path)
    for weights_only in (True, False):
        arguments = {"map_location": PLACES[place], "weights_only": weights_only}
        agree(outcome(torch.load, path, **arguments), path, place, **arguments)


def test_mmap_gives_the_same_objects(tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    for entry in LOADABLE:
        if entry.slow:
            continue
        torch.save(entry.build(), path)
        arguments = {"mmap": True, "weights_only": False}
        agree(outcome(torch.load, path, **arguments), path, entry.name, **arguments)


def repacked(path: str, change: Callable[[list[zipfile.ZipInfo]], list[zipfile.ZipInfo]]) -> None:
    """Writes the archive anew, as Python does it: stored, nothing aligned, no descriptors."""
    with zipfile.ZipFile(path) as old:
        bodies = {info.filename: old.read(info) for info in old.infolist()}
        names = [info.filename for info in change(old.infolist())]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name in names:
            new.writestr(name, bodies[name])


@pytest.mark.parametrize("order", ["as it was", "reversed"])
def test_an_archive_packed_anew_holds_the_same_objects(order: str, tmp_path: Path) -> None:
    for entry in LOADABLE:
        if entry.slow:
            continue
        path = str(tmp_path / "model.pt")
        torch.save(entry.build(), path)
        theirs = outcome(torch.load, path, weights_only=False)
        repacked(path, lambda infos: infos if order == "as it was" else infos[::-1])
        agree(theirs, path, entry.name, weights_only=False)
