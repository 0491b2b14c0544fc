# SPDX-License-Identifier: Apache-2.0
"""The way back: loads what was saved, goes on training from it, and shows what a damage does.

A byte of one tensor is changed in a copy of the file. fastpersist compares every checksum while it
reads and names the tensor; torch.load has no such check and returns the wrong numbers.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from proofs import Proof, equal_bits, leaves
from training import Training

import fastpersist as fp

RESUMED_STEPS = 3
# Long enough to be found at one place of the file only.
PATTERN_BYTES = 64


def loads_equal(our_file: Path, state: Any) -> Proof:
    """Compares what fp.load returns with what torch.load returns and with the memory, bit by bit.

    Both load once, the file being in memory already.
    """
    claim = "fastpersist.load and torch.load, tensor by tensor"
    ours, theirs = dict(leaves(fp.load(our_file))), dict(leaves(torch.load(our_file)))
    expected = dict(leaves(state))
    if not ours.keys() == theirs.keys() == expected.keys():
        return Proof(claim, False, "entries differ")
    for name, value in expected.items():
        if not (equal_bits(ours[name], value) and equal_bits(theirs[name], value)):
            return Proof(claim, False, f"they differ, such as {name}")
    count = sum(isinstance(value, torch.Tensor) for value in expected.values())
    return Proof(claim, True, f"{count} tensors, every bit equal")


def resumed_run_is_the_same(run: Training, our_file: Path) -> Proof:
    """Goes on with the run that was never interrupted, and with one that starts from the file."""
    resumed = Training(run.config, run.text, seed=2)  # begins with other weights
    resumed.load_state(fp.load(our_file))
    losses = [loss for loss, _ in run.run(RESUMED_STEPS)]
    again = [loss for loss, _ in resumed.run(RESUMED_STEPS)]
    claim = f"{RESUMED_STEPS} more steps from the file, losses against the run that went on"
    return Proof(claim, losses == again, f"{_joined(again)} against {_joined(losses)}")


def _joined(losses: Sequence[float]) -> str:
    return " ".join(f"{loss:.4f}" for loss in losses)


def damage_is_named(folder: Path, our_file: Path, state: Any) -> list[Proof]:
    """Changes one byte of one tensor in a copy of the file, and loads the copy with both."""
    name, tensor = largest_tensor(state["model"])
    damaged = folder / "damaged.pt"
    shutil.copyfile(our_file, damaged)
    offset = change_byte(damaged, tensor)
    said = outcome(lambda: fp.load(damaged))
    ours = isinstance(said, fp.CorruptCheckpointError) and name in (said.tensor or "")
    seen = " ".join(str(said).split()) if isinstance(said, Exception) else "it noticed nothing"
    silent = outcome(lambda: torch.load(damaged))
    wrong = not isinstance(silent, Exception) and not equal_bits(silent["model"][name], tensor)
    damaged.unlink()
    return [
        Proof(f"byte {offset:,} changed in a copy, fastpersist.load", ours, seen),
        Proof("the same copy, torch.load", wrong, "no error, wrong numbers" if wrong else "?"),
    ]


def largest_tensor(tensors: dict[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """The name that comes first of those with the most bytes, and the tensor."""
    name = max(tensors, key=lambda entry: tensors[entry].nbytes)
    return name, tensors[name]


def change_byte(path: Path, tensor: torch.Tensor) -> int:
    """Changes a byte in the middle of the tensor's data in the file; returns its offset."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        start = mapped.find(data[:PATTERN_BYTES].numpy().tobytes())
        if start < 0:
            raise LookupError(f"{path} does not hold the tensor")
        offset = start + data.numel() // 2
        mapped[offset] ^= 1
    return offset


def outcome(load: Callable[[], Any]) -> Any:
    """What it returned, or the exception that it raised."""
    try:
        return load()
    except Exception as error:  # whatever it is, the proof looks at it
        return error
