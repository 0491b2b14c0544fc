# SPDX-License-Identifier: Apache-2.0
"""Proves that the file which fastpersist wrote is the one that torch.save writes, and a sound one.

Where the usual commands (cmp, unzip) are missing, Python's own modules do the same.
"""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Proof:
    """A claim, whether it held, and what was seen."""

    claim: str
    holds: bool
    seen: str


def files_are_equal(folder: Path, torch_file: Path, our_file: Path) -> Proof:
    """Compares the two files byte by byte."""
    names = (torch_file.relative_to(folder), our_file.relative_to(folder))
    if shutil.which("cmp"):
        tool = "cmp"
        status, output = run("cmp", *names, folder=folder)
        equal = status == 0
    else:
        tool, output = "filecmp.cmp", "the files differ"
        equal = filecmp.cmp(torch_file, our_file, shallow=False)
    seen = f"all {our_file.stat().st_size:,} bytes are equal" if equal else output
    return Proof(f"{tool} {names[0]} {names[1]}", equal, seen)


def torch_loads_it(our_file: Path, state: Any) -> Proof:
    """Compares what torch.load returns with the tensors in memory, bit by bit."""
    claim = "torch.load, tensors against memory"
    try:
        loaded = dict(leaves(torch.load(our_file, weights_only=True)))
    except Exception as error:  # whatever it is, it refutes the claim
        return Proof(claim, False, f"{type(error).__name__}: {error}")
    expected = dict(leaves(state))
    if loaded.keys() != expected.keys():
        return Proof(claim, False, f"entries differ: {sorted(loaded.keys() ^ expected.keys())[:3]}")
    different = [name for name, value in expected.items() if not equal_bits(value, loaded[name])]
    if different:
        return Proof(claim, False, f"{len(different)} differ, such as {different[0]}")
    count = sum(isinstance(value, torch.Tensor) for value in loaded.values())
    return Proof(claim, True, f"{count} tensors, every bit equal")


def archive_is_sound(folder: Path, our_file: Path) -> Proof:
    """Checks the CRC of every record."""
    name = our_file.relative_to(folder)
    if shutil.which("unzip"):
        status, output = run("unzip", "-tq", name, folder=folder)
        return Proof(f"unzip -t {name}", status == 0, output.splitlines()[-1] if output else "")
    try:
        with zipfile.ZipFile(our_file) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        damaged = str(error)
    return Proof(f"zipfile.testzip {name}", damaged is None, damaged or "no errors detected")


def run(*command: str | Path, folder: Path) -> tuple[int, str]:
    """Runs a command in `folder`; returns its exit status and what it printed."""
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return process.returncode, (process.stdout + process.stderr).strip()


def leaves(value: Any, name: str = "state") -> Iterator[tuple[str, Any]]:
    """All values in nested dicts, lists and tuples, with their places."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}[{index}]")
    else:
        yield name, value


def equal_bits(a: Any, b: Any) -> bool:
    """Whether two tensors have one dtype, shape and bit pattern, or two values are equal."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits_a, bits_b = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(bits_a, bits_b)
