# SPDX-License-Identifier: Apache-2.0
"""The limit: how fast fio writes as many bytes to the same file system, direct and synced.

fio allocates its file and its buffers before its clock starts, generates random data that it
scrambles for every write, and computes nothing: whoever has a state to serialize can at best come
near it. Its time includes one fsync at the end. Which setting is the limit is decided after all
rounds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import Sample

MIB = 1 << 20
PROGRAM = "fio"


class LimitError(RuntimeError):
    """fio is missing, failed, or did not write what it was told to."""


@dataclass(frozen=True)
class Setting:
    """One way to write: blocks of `block_bytes`, `depth` of them in flight."""

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
    command = [
        PROGRAM,
        "--name=limit",
        f"--filename={directory / 'limit.bin'}",
        "--rw=write",
        "--ioengine=io_uring",
        "--direct=1",
        f"--bs={setting.block_bytes}",
        f"--iodepth={setting.depth}",
        f"--size={blocks * setting.block_bytes}",
        "--fallocate=native",
        "--end_fsync=1",
        "--randrepeat=0",
        "--output-format=json",
    ]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        reason = (finished.stderr or finished.stdout).strip().splitlines()
        raise LimitError(f"fio failed: {reason[-1] if reason else finished.returncode}")
    return parse(finished.stdout, blocks * setting.block_bytes)


def parse(output: str, expected_bytes: int) -> Sample:
    """Reads fio's JSON. CPU time is that of its job, start-up left out. Raises LimitError.

    The machine's CPU time stays unknown: fio's start-up costs more than its job.
    """
    try:
        # Notes may stand before the JSON object.
        job: dict[str, Any] = json.loads(output[output.index("{") :])["jobs"][0]
        write = job["write"]
        seconds = write["runtime"] / 1000  # Milliseconds, the fsync included.
        written = write["io_bytes"]
        cpu_share = (job["usr_cpu"] + job["sys_cpu"]) / 100
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise LimitError(f"fio's output is not understood: {error!r}") from error
    if job["error"] != 0 or written != expected_bytes or seconds <= 0:
        raise LimitError(
            f"fio wrote {written} of {expected_bytes} bytes in {seconds} s, error {job['error']}"
        )
    return Sample(seconds=seconds, bytes=written, cpu_seconds=cpu_share * seconds)
