# SPDX-License-Identifier: Apache-2.0
"""A limit on the bytes per second that a process writes to one device, as long as a `with` block
lasts: a control group of the kernel's blkio controller, version 1. Needs root.

It holds direct writes, and buffered ones that the process itself syncs. What the kernel writes back
on its own is not held, so whoever is measured must sync.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import limit
from bench.limit import MIB

CONTROLLER = Path("/sys/fs/cgroup/blkio")
LIMIT_FILE = "blkio.throttle.write_bps_device"
PREFIX = "fastpersist-bench-"
TOLERANCE = 0.10
PROBE_SECONDS = 2.0


class ThrottleError(RuntimeError):
    """No such limit can be set here, or it does not hold; the message says why."""


@dataclass(frozen=True)
class Throttle:
    """A group whose members write at most `bytes_per_second` to the device of a directory."""

    group: Path
    bytes_per_second: int

    def add(self, pid: int) -> None:
        """Puts a process with all its threads into the group."""
        (self.group / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def verify(self, directory: Path) -> tuple[float, float]:
        """Bytes per second that fio reaches inside: direct, and buffered with one fsync.

        Raises ThrottleError if direct writes are not held to the limit.
        """
        direct = self._fio(directory, ["--ioengine=io_uring", "--direct=1", "--iodepth=4"])
        buffered = self._fio(directory, ["--ioengine=psync", "--direct=0"])
        if abs(direct / self.bytes_per_second - 1) > TOLERANCE:
            raise ThrottleError(
                f"the limit of {self.bytes_per_second / 1e6:.0f} MB/s does not hold: fio writes "
                f"{direct / 1e6:.0f} MB/s"
            )
        return direct, buffered

    def _fio(self, directory: Path, options: list[str]) -> float:
        blocks = max(2, round(self.bytes_per_second * PROBE_SECONDS / MIB))
        path = directory / "throttle.bin"
        command = [limit.PROGRAM, "--name=limit", f"--filename={path}", f"--size={blocks * MIB}"]
        command += ["--rw=write", f"--bs={MIB}", "--end_fsync=1", "--fallocate=native"]
        command += ["--output-format=json", *options]
        # The shell joins the group, and becomes fio.
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        try:
            finished = subprocess.run(
                ["sh", "-c", script, str(self.group), *command],
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            path.unlink(missing_ok=True)
        if finished.returncode != 0:
            raise ThrottleError(f"fio failed: {' '.join(finished.stderr.split())[:200]}")
        try:
            return limit.parse(finished.stdout, blocks * MIB).rate
        except limit.LimitError as error:
            raise ThrottleError(str(error)) from error


def missing() -> str | None:
    """Why no limit can be set here, or None if it seems possible."""
    if os.geteuid() != 0:
        return "a limit on the device needs root"
    if not (CONTROLLER / LIMIT_FILE).exists():
        return f"there is no {CONTROLLER / LIMIT_FILE}: no blkio controller in version 1"
    return limit.missing()


@contextlib.contextmanager
def throttled(directory: Path, bytes_per_second: int) -> Iterator[Throttle]:
    """A group with a limit on the device below `directory`; its members must have ended on exit.

    Raises ThrottleError.
    """
    if reason := missing():
        raise ThrottleError(reason)
    device = device_number(directory)
    _remove_leftovers()
    group = CONTROLLER / f"{PREFIX}{os.getpid()}"
    try:
        group.mkdir()
        (group / LIMIT_FILE).write_text(f"{device} {bytes_per_second}", encoding="ascii")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise ThrottleError(f"cannot limit device {device}: {error}") from error
    try:
        yield Throttle(group, bytes_per_second)
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def device_number(directory: Path) -> str:
    """MAJOR:MINOR of the disk below a directory, that of a partition's disk. ThrottleError."""
    device = os.stat(directory).st_dev
    entry = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not entry.exists():
        raise ThrottleError(f"{directory} does not lie on one block device")
    if (entry / "partition").exists():
        entry = entry.resolve().parent
    return (entry / "dev").read_text(encoding="ascii").strip()


def _remove_leftovers() -> None:
    """Groups of runs that were killed; those with members stay, for they cannot be removed."""
    for group in CONTROLLER.glob(f"{PREFIX}*"):
        if not Path("/proc", group.name.removeprefix(PREFIX)).exists():
            with contextlib.suppress(OSError):
                group.rmdir()
