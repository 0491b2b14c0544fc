# SPDX-License-Identifier: Apache-2.0
"""Real text that every Python installation has: the sources of its own standard library, as bytes.

A token is a byte, so the vocabulary has 256 entries and no tokenizer is needed.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

VOCABULARY = 256
# Installed packages and test data are no part of the library's own text.
LEFT_OUT = {"__pycache__", "dist-packages", "site-packages", "test", "tests"}


def standard_library_text(max_bytes: int = 8_000_000) -> torch.Tensor:
    """Returns up to `max_bytes` of source text as a uint8 tensor of shape (bytes,).

    Files come in the order of their names, so one installation always gives the same text. Raises
    FileNotFoundError where the library has no readable sources (it may be installed compiled only).
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if len(text) < 100_000:
        raise FileNotFoundError(f"there is too little Python source below {root} to train on")
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def random_batch(
    text: torch.Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and the targets one byte later, both int64 of shape (batch, context)."""
    starts = torch.randint(len(text) - context, (batch,), generator=generator)
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]
