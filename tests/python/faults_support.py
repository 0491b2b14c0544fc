# SPDX-License-Identifier: Apache-2.0
"""Real trouble for the fault tests: failing calls, sandboxes, limits, file systems. Children of
`faults_child` get into it; also here is what the tests compare."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import pathlib
import resource
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from faults_child import NOBODY, ChildFailed, Unavailable, is_root, libc, run, start

import fastpersist as fp

__all__ = ["NOBODY", "ChildFailed", "Unavailable", "is_root", "run", "start"]

ENGINES = ("uring", "libaio", "threads", "buffered")
INTERCEPTED = ("threads", "buffered")  # their writes go through the C library


# --- Failing calls ---


@contextlib.contextmanager
def failing(rules: str) -> Iterator[None]:
    """The rules of testing/preload/faults.c ("": only record). In a child with shim=True."""
    os.environ["FASTPERSIST_FAULTS"] = rules
    libc.fastpersist_faults_reset()
    try:
        yield
    finally:
        del os.environ["FASTPERSIST_FAULTS"]
        trace = _trace()
        libc.fastpersist_faults_reset()
        _last_trace[:] = trace


_last_trace: list[tuple[str, int, int, int, str]] = []


def _trace() -> list[tuple[str, int, int, int, str]]:
    libc.fastpersist_faults_trace.restype = ctypes.c_char_p
    calls = []
    for line in libc.fastpersist_faults_trace().splitlines():
        call, result, offset, length, path = line.split(b" ", 4)
        name = os.fsdecode(path)
        calls.append((call.decode(), int(result), int(offset), int(length), name))
    return calls


def calls() -> list[tuple[str, int, int, int, str]]:
    """What the last `failing` block called: (call, result or -errno, offset, length, path)."""
    return list(_last_trace)


def forked_child() -> int:
    """The process that the action "fork" made."""
    return ctypes.c_int.in_dll(libc, "fastpersist_faults_child").value


# --- Sandboxes and limits ---


def refuse_system_calls(
    numbers: list[int], error: int = errno.EPERM, all_threads: bool = False
) -> None:
    """A seccomp filter, for good: these system calls fail with errno in this thread, or in all."""
    if os.uname().machine != "x86_64":
        raise Unavailable("system calls are known by number on x86-64 only")
    load, equal, give = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    program = [(load, 0, 0, 0)]
    program += [(equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050000 | error)]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    description = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    words = (1, 1 if all_threads else 0, ctypes.create_string_buffer(description))
    if libc.syscall(317, *words) != 0:  # seccomp: SECCOMP_SET_MODE_FILTER, with FILTER_FLAG_TSYNC
        raise Unavailable(f"no seccomp filter: {os.strerror(ctypes.get_errno())}")


def prctl(option: int, value: int) -> None:
    """prctl(2) with one value."""
    zero = ctypes.c_ulong(0)
    if libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero) != 0:
        raise Unavailable(f"prctl({option}) is refused: {os.strerror(ctypes.get_errno())}")


def without_huge_pages() -> None:
    """PR_SET_THP_DISABLE for this process."""
    prctl(41, 1)


def limit(kind: int, soft: int) -> None:
    """Sets a soft resource limit of this process."""
    resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))


# --- File systems ---


def command(*words: str) -> str:
    """Runs a command; what it printed. Unavailable where it is not there or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise Unavailable(f"{words[0]} is not installed") from None
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(words)}: {error.stderr.strip()}") from None
    return done.stdout.strip()


def image_folder() -> str:
    """Where images of file systems are quick: memory, if there is room."""
    with contextlib.suppress(OSError):
        room = os.statvfs("/dev/shm")
        if room.f_bavail * room.f_frsize > 512 << 20:
            return "/dev/shm"
    return tempfile.gettempdir()


def attach(mib: int, sector: int = 512) -> str:
    """A loop device over a sparse file that has no name any more. `detach` it, once."""
    with tempfile.NamedTemporaryFile(dir=image_folder(), prefix="fastpersist-image-") as image:
        image.truncate(mib << 20)
        words = ["losetup", "--find", "--show", "--sector-size", str(sector), image.name]
        for _ in range(20):  # somebody else may take the device that was found free
            with contextlib.suppress(Unavailable):
                return command(*words)
            time.sleep(0.1)
        return command(*words)


def detach(device: str) -> None:
    """Frees the device as soon as its last user is gone: at once, or when it is unmounted."""
    subprocess.run(["losetup", "--detach", device], capture_output=True)


MAKE = {
    "ext2": ["mkfs.ext2", "-q", "-F", "-m", "0"],
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}


@contextlib.contextmanager
def mounted(kind: str, mib: int = 32, sector: int = 512) -> Iterator[str]:
    """A folder on a new file system of this kind. In a child with mounts=True."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpersist-mount-"))
        if kind in MAKE:
            _mount_device(kind, folder, mib, sector)
        elif kind == "overlay":
            base = stack.enter_context(mounted("tmpfs", mib))
            for part in ("lower", "upper", "scratch"):
                os.mkdir(f"{base}/{part}")
            layers = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/scratch"
            command("mount", "-t", "overlay", "-o", layers, "overlay", folder)
        else:
            command("mount", "-t", kind, "-o", f"size={mib}m", kind, folder)
        stack.callback(command, "umount", "--lazy", folder)
        yield folder


def _mount_device(kind: str, folder: str, mib: int, sector: int) -> None:
    device = attach(mib, sector)
    try:
        command(*MAKE[kind], device)
        command("mount", "-t", kind, device, folder)
    finally:
        detach(device)


# --- What is compared ---


def state_of(size: int, seed: int = 0) -> dict[str, Any]:
    """A few tensors of random values, about size bytes in all."""
    import numpy
    import torch

    generator = numpy.random.default_rng(seed)
    shares = [size // 2, size // 3, size - size // 2 - size // 3]
    parts = [torch.from_numpy(generator.integers(0, 256, n, numpy.uint8)) for n in shares]
    return {"step": seed, "model": {f"layer{i}": part for i, part in enumerate(parts)}}


def torch_bytes(state: Any, path: Any) -> bytes:
    """The file that torch.save makes for this path, made elsewhere."""
    import torch

    name = os.path.basename(os.fspath(path))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, os.path.join(folder, name))
        return pathlib.Path(folder, name).read_bytes()


class Target:
    """A path with an old file, and a state whose save must replace it, completely or not at all."""

    def __init__(self, folder: Any, size: int = 40_000, name: str = "model.pt"):
        self.folder = os.fspath(folder)
        self.path = os.path.join(self.folder, name)
        self.state = state_of(size, seed=1)
        self.new = torch_bytes(self.state, self.path)
        self.old = torch_bytes(state_of(9_000, seed=2), self.path)
        self.put_old()

    def put_old(self) -> None:
        pathlib.Path(self.path).write_bytes(self.old)

    def save(self, engine: str, **options: Any) -> fp.SaveInfo:
        """In blocks of 4096 bytes, so that a small state takes many writes."""
        chosen = {"block_bytes": 4096, "queue_depth": 4, **options}
        return fp.save(self.state, self.path, options=fp.Options(engine=engine, **chosen))

    def succeeds(self, engine: str, **options: Any) -> fp.SaveInfo:
        info = self.save(engine, **options)
        assert content(self.path) == self.new, "the file is not what torch.save makes"
        assert temporaries(self.folder) == []
        assert info.bytes == len(self.new)
        return info

    def fails(self, engine: str, **options: Any) -> fp.StorageError:
        """The save must fail, name the path, and leave the old file and nothing else."""
        try:
            self.save(engine, **options)
        except fp.StorageError as error:
            assert isinstance(error, OSError)
            assert error.filename == self.path and self.path in str(error), str(error)
            assert error.operation in str(error) and os.strerror(error.errno or 0) in str(error)
            self.is_untouched()
            return error
        raise AssertionError("the save did not fail")

    def is_untouched(self) -> None:
        assert content(self.path) == self.old, "the old file has changed"
        assert temporaries(self.folder) == []


def content(path: Any) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def drop_from_page_cache(path: Any) -> None:
    """What is read next comes from the device."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def temporaries(folder: Any) -> list[str]:
    """Names of the temporary files in a folder."""
    return [name for name in os.listdir(folder) if name.startswith(".fp-")]


@contextlib.contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """Collects what is logged under "fastpersist", from warnings up."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastpersist").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("fastpersist").removeHandler(handler)
