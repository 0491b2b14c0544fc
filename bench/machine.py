# SPDX-License-Identifier: Apache-2.0
"""Describes where a benchmark ran: CPU, memory, kernel, file system, device, package versions."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

PACKAGES = (
    "fastpersist",
    "torch",
    "numpy",
    "safetensors",
    "torchsnapshot",
    "runai-model-streamer",
    "fastsafetensors",
    "deepspeed",
)
QUEUE_FACTS = (
    "rotational",
    "scheduler",
    "logical_block_size",
    "physical_block_size",
    "write_cache",
)
BUSY_LOAD_PER_CPU = 0.5
REPOSITORY = Path(__file__).resolve().parent.parent


def describe(directory: Path) -> dict[str, Any]:
    """Facts about this machine and about the file system that holds `directory`."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "fio": _output("fio", "--version"),
        "commit": _output("git", "describe", "--always", "--dirty"),
        "file_system": file_system(directory),
    }


def file_system(directory: Path) -> dict[str, Any]:
    """Type, mount options, device and its queue's settings, as far as the kernel tells them."""
    best: tuple[int, dict[str, Any]] = (-1, {})
    real = directory.resolve()
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split()
        kind, device, super_options = source.split(" ", 2)
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        # Of several mounts on one point the last is the one that is seen.
        if real.is_relative_to(point) and len(point.parts) >= best[0]:
            facts = {
                "type": kind,
                "device": device,
                "options": f"{fields[5]},{super_options}",
                "queue": _queue_facts(fields[2]),
            }
            best = (len(point.parts), facts)
    return best[1]


def summary(facts: dict[str, Any]) -> str:
    """Two lines for the top of a report."""
    storage = facts["file_system"]
    packages = facts["packages"]
    return (
        f"{facts['cpu']}, {facts['cpus']} CPUs, {facts['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {facts['kernel']}; {storage.get('type', '?')} on {storage.get('device', '?')}\n"
        f"fastpersist {packages['fastpersist']}, torch {packages['torch']}, "
        f"{facts['fio'] or 'no fio'}, {facts['time']}"
    )


def busy_warning(facts: dict[str, Any]) -> str | None:
    """A warning if others kept the CPUs busy when `facts` were taken; None if not."""
    load = facts["load_average"]
    if load <= BUSY_LOAD_PER_CPU * facts["cpus"]:
        return None
    return f"the machine is busy (load {load:.1f} on {facts['cpus']} CPUs): figures may mislead"


def _queue_facts(device_number: str) -> dict[str, str]:
    device = Path("/sys/dev/block", device_number)
    queues = (
        device / "queue",
        device.resolve().parent / "queue",
    )  # A partition's is its disk's.
    queue = next((path for path in queues if path.is_dir()), None)
    if queue is None:
        return {}
    facts = {name: _read(queue / name) for name in QUEUE_FACTS}
    facts["model"] = _read(queue.parent / "device/model")
    return {name: value for name, value in facts.items() if value}


def _cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match[1] if match else platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    # Built in place, without metadata; others that are not installed fail here.
    try:
        version: str | None = getattr(importlib.import_module(package), "__version__", None)
    except ImportError:
        return None
    return version


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _output(*command: str) -> str | None:
    try:
        finished = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.strip()
