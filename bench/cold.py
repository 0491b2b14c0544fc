# SPDX-License-Identifier: Apache-2.0
"""Puts files out of the page cache, and finds out how much of a file is still in it. Linux only.

What lies below the page cache (the device's own cache, the host of a virtual machine) is out of
reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path


def files_below(path: Path) -> list[Path]:
    """The file itself, or all files in a directory and its directories."""
    if not path.is_dir():
        return [path]
    return [entry for entry in sorted(path.rglob("*")) if entry.is_file()]


def drop_everything() -> None:
    """As root, drops every clean page that nobody has mapped; else does nothing."""
    os.sync()
    if os.geteuid() == 0:
        # Where /proc is read-only it must do without: `drop` does for the files that matter.
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1", encoding="ascii")


def drop(path: Path) -> None:
    """Drops the pages of a file, or of all files below a directory; they must not be dirty."""
    for file in files_below(path):
        with _opened(file) as descriptor:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def have_memory_ready(size: int) -> None:
    """Takes memory and gives it back, so that the next to take it need not wait for the host.

    The host of a virtual machine may take back what the guest leaves free for some seconds, and
    the first use of such a page waits until the host has found another: 0.6 GB/s where it was
    seen, against 8. That says nothing of whoever happens to be the first.
    """
    populate = 23  # MADV_POPULATE_WRITE, Linux 5.14
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # Shared memory would come in small pages.
    with mmap.mmap(-1, size, flags=private) as memory, contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(populate)


def cached_share(path: Path) -> float:
    """The share of the bytes of a file, or of all files below a directory, in the page cache."""
    cached = total = 0
    for file in files_below(path):
        size = file.stat().st_size
        total += size
        cached += min(size, _cached_pages(file, size) * mmap.PAGESIZE) if size else 0
    return cached / total if total else 0.0


def _cached_pages(file: Path, size: int) -> int:
    """Asks mincore(2), which reads nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with _opened(file) as descriptor:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
    try:
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        if libc.mincore(address, size, pages) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
    finally:
        libc.munmap(address, size)
    # The lowest bit says whether the page is there; the others are reserved.
    return sum(page & 1 for page in pages.raw)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
