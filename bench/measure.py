# SPDX-License-Identifier: Apache-2.0
"""Measures one save or load: wall time, CPU time of process and whole machine, peak memory.

CPU time of the process covers all its threads, io_uring's workers included. Kernel threads that
work for it (write-back, loop devices) are charged to nobody: they show only in the machine's CPU
time, which in turn counts everybody else who runs. Linux only.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# user, nice, system, irq, softirq: the positions in the first line of /proc/stat that are work.
BUSY_COLUMNS = (1, 2, 3, 6, 7)
RESET_PEAK_RSS = "5"  # proc(5), /proc/pid/clear_refs

Detail = Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """One measured save or load. `bytes` are the tensors' bytes, not the file's."""

    seconds: float
    bytes: int
    cpu_seconds: float
    machine_cpu_seconds: float | None = None
    rss_growth: int | None = None
    detail: Detail = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds

    @property
    def cpu_seconds_per_gb(self) -> float:
        """User and system time of the process for 10^9 bytes."""
        return self.cpu_seconds * 1e9 / self.bytes

    def as_json(self) -> dict[str, Any]:
        """The fields, ready for json.dump."""
        return asdict(self) | {"detail": dict(self.detail)}


def measure(work: Callable[[], Detail | None], bytes_moved: int) -> Sample:
    """Runs `work` once and measures it; what it returns becomes the sample's detail."""
    rss_before = rss_bytes()
    can_reset = _reset_peak_rss()
    machine_before = machine_cpu_seconds()
    cpu_before = process_cpu_seconds()
    start = time.perf_counter()
    detail = work()
    seconds = time.perf_counter() - start
    cpu = process_cpu_seconds() - cpu_before
    return Sample(
        seconds=seconds,
        bytes=bytes_moved,
        cpu_seconds=cpu,
        machine_cpu_seconds=machine_cpu_seconds() - machine_before,
        rss_growth=max(0, peak_rss_bytes() - rss_before) if can_reset else None,
        detail=detail or {},
    )


def process_cpu_seconds() -> float:
    """User and system time of all threads of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def machine_cpu_seconds() -> float:
    """Time for which the CPUs have worked since boot, all processes and the kernel together."""
    with open("/proc/stat", encoding="ascii") as stat:
        columns = stat.readline().split()
    return sum(int(columns[column]) for column in BUSY_COLUMNS) / CLOCK_TICKS


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """Highest resident memory of this process since the last reset."""
    return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    with open("/proc/self/status", encoding="utf-8", errors="replace") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024  # The kernel's kB is 1024 bytes.
    raise OSError(f"/proc/self/status has no {key}")


def _reset_peak_rss() -> bool:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as clear_refs:
            clear_refs.write(RESET_PEAK_RSS)
    except OSError:  # A read-only /proc, as in some containers.
        return False
    return True
