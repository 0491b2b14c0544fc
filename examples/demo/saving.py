# SPDX-License-Identifier: Apache-2.0
"""Saves one state in turn with torch.save and with fastpersist, and measures both.

Both leave the file on stable storage: torch.save is followed by fsync of the file and of its
directory, fastpersist.save does as much by itself (and replaces an older file only when the new one
is complete). The base name is the same, for it is written into the file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fastpersist as fp

TORCH = "torch.save + fsync"
FASTPERSIST = "fastpersist.save"
FILE_NAME = "model.pt"


@dataclass(frozen=True)
class Measurement:
    """What one save took."""

    writer: str
    seconds: float
    cpu_seconds: float  # user and system time of all threads of this process
    file_bytes: int
    extra_rss: int | None  # bytes by which resident memory rose at its peak; None: not known here


def save_with_torch(state: Any, path: Path) -> None:
    """torch.save, with the syncs that make the file safe from a power cut."""
    try:
        torch.save(state, path)
    except RuntimeError as error:  # torch does not say what the system said
        raise OSError(f"torch.save could not write {path}: {error}") from error
    for target in (path, path.parent):
        descriptor = os.open(target, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def alternate(
    state: Any, folder: Path, rounds: int
) -> Iterator[tuple[Measurement, fp.SaveInfo | None]]:
    """Saves `rounds` times with each writer, the order changing from round to round.

    Yields each measurement, with what fastpersist said of its save. The files of the last round
    stay in the folders of `paths`.
    """
    files = paths(folder)
    for file in files.values():
        file.parent.mkdir()
    for number in range(rounds):
        for writer in (TORCH, FASTPERSIST) if number % 2 == 0 else (FASTPERSIST, TORCH):
            files[writer].unlink(missing_ok=True)
            save = save_with_torch if writer == TORCH else fp.save
            yield measure(writer, save, state, files[writer])


def paths(folder: Path) -> dict[str, Path]:
    """The file of each writer."""
    return {
        TORCH: folder / "torch" / FILE_NAME,
        FASTPERSIST: folder / "fastpersist" / FILE_NAME,
    }


def measure(
    writer: str, save: Callable[[Any, Path], Any], state: Any, path: Path
) -> tuple[Measurement, Any]:
    """Returns the measurement and what `save` returned."""
    rss = reset_peak_rss()
    cpu, start = time.process_time(), time.perf_counter()
    result = save(state, path)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    extra_rss = None if rss is None else max(0, memory_figure("VmHWM") - rss)
    return Measurement(writer, seconds, cpu, path.stat().st_size, extra_rss), result


def reset_peak_rss() -> int | None:
    """Makes the kernel count the peak anew (proc(5), clear_refs); returns the resident bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return memory_figure("VmRSS")
    except (OSError, LookupError):
        return None


def memory_figure(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)
