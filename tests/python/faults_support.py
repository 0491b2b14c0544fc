# SPDX-License-Identifier: Apache-2.0
"""Real trouble for the fault tests: failing calls, sandboxes, limits, file systems. Children of
`faults_child` get into it; also here is what the tests compare."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
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

from faults_child import ChildFailed, Unavailable, libc, run, start

__all__ = ["ChildFailed", "Unavailable", "run", "start"]

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


# --- Sandboxes and limits ---


def refuse_system_calls(numbers: list[int], error: int = errno.EPERM) -> None:
    """A seccomp filter for this process (for good): the system calls fail with errno."""
    load, equal, give = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    program = [(load, 0, 0, 0)]
    program += [(equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050000 | error)]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    description = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    _prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    _prctl(22, 2, ctypes.create_string_buffer(description))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def without_huge_pages() -> None:
    """PR_SET_THP_DISABLE for this process."""
    _prctl(41, 1)


def _prctl(option: int, first: int, second: Any = 0) -> None:
    words = [ctypes.c_ulong(first), second if second else ctypes.c_ulong(0)]
    if libc.prctl(option, *words, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise Unavailable(f"prctl({option}) is refused: {os.strerror(ctypes.get_errno())}")


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
            for part in ("lower", "upper", "work"):
                os.mkdir(f"{base}/{part}")
            layers = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
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
    import torch

    generator = torch.Generator().manual_seed(seed)
    shares = [size // 2, size // 3, size - size // 2 - size // 3]
    parts = [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in shares]
    return {"step": seed, "model": {f"layer{i}": part for i, part in enumerate(parts)}}


def torch_bytes(state: Any, path: Any) -> bytes:
    """The file that torch.save makes for this path, made elsewhere."""
    import torch

    name = os.path.basename(os.fspath(path))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, os.path.join(folder, name))
        return pathlib.Path(folder, name).read_bytes()


def content(path: Any) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def digest(path: Any) -> str:
    return hashlib.sha256(content(path)).hexdigest()


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
