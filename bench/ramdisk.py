# SPDX-License-Identifier: Apache-2.0
"""An ext4 file system on a loop device over memory, as long as a `with` block lasts. Needs root.

The process moves into a mount namespace of its own, mounts there with a loop device that frees
itself at unmount, and unlinks the image at once. Thus the kernel takes everything back when the
process ends, however it ends, SIGKILL included; the `with` block only does it earlier. Call it
before any thread is started: a thread that exists already stays in the old namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

MEMORY_DIRECTORY = Path("/dev/shm")
PROGRAMS = ("mkfs.ext4", "mount", "umount")
# From <sched.h> and <sys/mount.h>.
CLONE_NEWNS = 0x00020000
MS_REC = 0x4000
MS_PRIVATE = 0x40000


class RamDiskError(RuntimeError):
    """The RAM-backed file system cannot be made here; the message says why and what to do."""


@contextlib.contextmanager
def ram_disk(size_bytes: int) -> Iterator[Path]:
    """Yields the mount point of a fresh ext4 file system of `size_bytes` in memory.

    Raises RamDiskError.
    """
    _check(size_bytes)
    _enter_private_mount_namespace()
    mount_point = Path(tempfile.mkdtemp(prefix="fastpersist-ram-"))
    try:
        _make_and_mount(size_bytes, mount_point)
        try:
            yield mount_point
        finally:
            _unmount(mount_point)
    finally:
        mount_point.rmdir()


def _check(size_bytes: int) -> None:
    if os.geteuid() != 0:
        raise RamDiskError(
            "--ram needs root, because it mounts a loop device: run it with sudo, "
            "or leave --ram out and give --dir a directory"
        )
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise RamDiskError(f"--ram needs {program}: install e2fsprogs and mount")
    free = shutil.disk_usage(MEMORY_DIRECTORY).free
    available = min(free, _available_memory())
    if available < size_bytes:
        raise RamDiskError(
            f"--ram needs {size_bytes / 1e9:.1f} GB of memory in {MEMORY_DIRECTORY}, "
            f"{available / 1e9:.1f} GB are free: shrink the state with --size"
        )


def _available_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise RamDiskError("--ram: /proc/meminfo does not say how much memory is available")


def _enter_private_mount_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        reason = os.strerror(ctypes.get_errno())
        raise RamDiskError(f"--ram cannot mount here ({reason}): containers need --privileged")


def _make_and_mount(size_bytes: int, mount_point: Path) -> None:
    descriptor, name = tempfile.mkstemp(prefix="fastpersist-ram-", dir=MEMORY_DIRECTORY)
    try:
        # All memory is taken now, so that no write waits for a page to be allocated and cleared.
        os.posix_fallocate(descriptor, 0, size_bytes)
        options = "nodiscard,lazy_itable_init=0,lazy_journal_init=0"
        _call("mkfs.ext4", "-q", "-F", "-m", "0", "-E", options, name)
        _call("mount", "-t", "ext4", "-o", "loop,noatime", name, str(mount_point))
    finally:
        os.close(descriptor)
        os.unlink(name)  # The loop device keeps the memory until it is unmounted.


def _call(*command: str) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        reason = " ".join(finished.stderr.split()) or f"exit status {finished.returncode}"
        raise RamDiskError(f"--ram: {command[0]} failed: {reason}")


def _unmount(mount_point: Path) -> None:
    try:
        _call("umount", str(mount_point))
    except RamDiskError:  # Somebody still holds a file: detach, the kernel finishes later.
        _call("umount", "--lazy", str(mount_point))
