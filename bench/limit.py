# SPDX-License-Identifier: Apache-2.0
"""The limit: how fast fio writes or reads as many bytes on the same file system, direct.

When it writes, fio allocates its file and its buffers before its clock starts, generates random
data that it scrambles for every write, and computes nothing: whoever has a state to serialize can
at best come near it. Its time includes one fsync at the end. When it reads, the file is laid out
before, and nobody looks at the bytes. Which setting is the limit is decided after all rounds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Sample

MIB = 1 << 20
PROGRAM = "fio"


class LimitError(RuntimeError):
    """fio is missing, failed, or did not do what it was told to."""


@dataclass(frozen=True)
class Setting:
    """One way to write or read: blocks of `block_bytes`, `depth` of them in flight."""

    block_bytes: int
    depth: int

    @property
    def name(self) -> str:
        """As a contender."""
        return f"limit-{self.block_bytes // MIB}m-x{self.depth}"

    @property
    def title(self) -> str:
        """In tables."""
        return f"fio, {self.block_bytes // MIB} MiB x {self.depth}"


SETTINGS = (Setting(4 * MIB, 4), Setting(4 * MIB, 8), Setting(8 * MIB, 4))


def missing() -> str | None:
    """Why the limit cannot be measured here, or None if it can."""
    return None if shutil.which(PROGRAM) else f"{PROGRAM} is not installed"


def run(setting: Setting, directory: Path, total_bytes: int) -> Sample:
    """Writes one fresh file of about `total_bytes`, rounded to whole blocks, at least one.

    Raises LimitError.
    """
    blocks = max(1, round(total_bytes / setting.block_bytes))
    options = ["--rw=write", "--fallocate=native", "--end_fsync=1", "--randrepeat=0"]
    return _run(setting, directory / "limit.bin", blocks * setting.block_bytes, "write", options)


def lay_out(path: Path, total_bytes: int, *, seed: int) -> None:
    """Makes the file that `read` reads: random bits, rounded to whole blocks of every setting.

    It is written as most writers do it, through the page cache, and synced.
    """
    block = max(setting.block_bytes for setting in SETTINGS)
    generator = np.random.default_rng(seed)
    with path.open("wb") as file:
        for _ in range(max(1, round(total_bytes / block))):
            file.write(generator.bytes(block))
        file.flush()
        os.fsync(file.fileno())


def read(setting: Setting, path: Path) -> Sample:
    """Reads the whole file that `lay_out` made. Raises LimitError."""
    return _run(setting, path, path.stat().st_size, "read", ["--rw=read", "--readonly"])


def _run(
    setting: Setting, path: Path, total_bytes: int, operation: str, options: list[str]
) -> Sample:
    command = [
        PROGRAM,
        "--name=limit",
        f"--filename={path}",
        "--ioengine=io_uring",
        "--direct=1",
        f"--bs={setting.block_bytes}",
        f"--iodepth={setting.depth}",
        f"--size={total_bytes}",
        "--output-format=json",
        *options,
    ]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        reason = (finished.stderr or finished.stdout).strip().splitlines()
        raise LimitError(f"fio failed: {reason[-1] if reason else finished.returncode}")
    return parse(finished.stdout, total_bytes, operation)


def parse(output: str, expected_bytes: int, operation: str = "write") -> Sample:
    """Reads fio's JSON. CPU time is that of its job, start-up left out. Raises LimitError.

    The machine's CPU time stays unknown: fio's start-up costs more than its job.
    """
    try:
        # Notes may stand before the JSON object.
        job: dict[str, Any] = json.loads(output[output.index("{") :])["jobs"][0]
        done = job[operation]
        seconds = done["runtime"] / 1000  # Milliseconds, the fsync included.
        moved = done["io_bytes"]
        cpu_share = (job["usr_cpu"] + job["sys_cpu"]) / 100
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise LimitError(f"fio's output is not understood: {error!r}") from error
    if job["error"] != 0 or moved != expected_bytes or seconds <= 0:
        raise LimitError(
            f"fio: {operation} of {moved} of {expected_bytes} bytes in {seconds} s, "
            f"error {job['error']}"
        )
    return Sample(seconds=seconds, bytes=moved, cpu_seconds=cpu_share * seconds)
