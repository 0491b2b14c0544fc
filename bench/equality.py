# SPDX-License-Identifier: Apache-2.0
"""Makes sure that what is measured counts.

The file that was saved must equal torch.save's, byte for byte; what was loaded must equal what was
saved, bit for bit.
"""

from __future__ import annotations

import filecmp
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from bench import peers
from bench.states import State, tensors_in


def equals_torch_save(state: State, directory: Path) -> bool:
    """Saves once with fp.save and once with torch.save below `directory` and compares the files."""
    saved = []
    for name in (peers.FASTPERSIST, peers.TORCH):
        folder = directory / name
        folder.mkdir()
        peers.PEERS[name].prepare(state)(folder)
        saved.append(folder / peers.FILE_NAME)
    ours, theirs = saved
    return filecmp.cmp(ours, theirs, shallow=False)


def checksums(value: object) -> dict[str, str]:
    """For each tensor in a nested state, under its dotted name: dtype, shape and CRC-32."""
    return {
        name: f"{tensor.dtype} {list(tensor.shape)} {_crc(tensor):08x}"
        for name, tensor in tensors_in(value)
    }


def _crc(tensor: torch.Tensor) -> int:
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(bits.numpy().data)


def difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """What the first difference between two sets of checksums is; None if they are equal."""
    for name, entry in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != entry:
            return f"{name} is {found[name]}, was {entry}"
    surplus = next((name for name in found if name not in expected), None)
    return None if surplus is None else f"{surplus} was never saved"
