# SPDX-License-Identifier: Apache-2.0
"""Makes sure that what is measured counts: the file must equal torch.save's, byte for byte."""

from __future__ import annotations

import filecmp
from pathlib import Path

from bench import peers
from bench.states import State


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
