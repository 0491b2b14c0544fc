# SPDX-License-Identifier: Apache-2.0
"""Children of the fault tests: whatever changes a process as a whole happens in one of them.

Children are forked, within milliseconds, from a server process that has torch loaded but has never
saved. It also has testing/preload/faults.c loaded, which is idle until it is given rules. What a
machine does not have (a loop device, another user) raises `Unavailable` in the child and becomes a
skip in the test.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import os
import pathlib
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "testing" / "preload" / "faults.c"
NOBODY = 65534
PRELOADED = ["numpy.random", "torch", "pytest", "fastpersist"]
PRELOADED += ["fastpersist._capture", "fastpersist._delegate", "fastpersist._explain"]
PRELOADED += ["fastpersist._saver", "fastpersist._recovery", "fastpersist._restore"]
PRELOADED += ["torch._dynamo"]  # which the first step of an optimizer imports, in seconds
CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000

libc = ctypes.CDLL(None, use_errno=True)


class Unavailable(Exception):
    """This machine does not have what the test needs; the message says what."""


class ChildFailed(Exception):
    """The child raised what cannot be sent, died, or took too long."""


def _compiled_shim() -> str | None:
    """Path of the compiled testing/preload/faults.c; None where there is no compiler."""
    folder = tempfile.mkdtemp(prefix="fastpersist-faults-")
    library = os.path.join(folder, "faults.so")
    command = ["gcc", "-shared", "-fPIC", "-O2", "-o", library, str(SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        os.rmdir(folder)
        return None
    return library


@functools.cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FASTPERSIST_")}
    if library := _compiled_shim():
        environment["LD_PRELOAD"] = library
    command = [sys.executable, __file__, str(theirs.fileno())]
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
    )
    theirs.close()
    atexit.register(_stop, ours, process)
    return ours


def _stop(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.wait(timeout=30)


def is_root() -> bool:
    """True where this process may act for every user, which root of a user namespace may not."""
    if os.geteuid() != 0:
        return False
    lines = pathlib.Path("/proc/self/uid_map").read_text().splitlines()
    ranges = [[int(word) for word in line.split()] for line in lines]
    return any(inside <= NOBODY < inside + count for inside, _, count in ranges)


class Child:
    """One running child; made by `start`."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]):
        self._result = os.memfd_create("result")
        request = os.memfd_create("request")
        status, status_end = os.pipe()
        self._status = status
        message = (sys.path, fn.__module__, fn.__qualname__, args, settings)
        os.write(request, pickle.dumps(message))
        socket.send_fds(_server(), [b"!"], [request, self._result, status_end])
        os.close(request)
        os.close(status_end)
        self.pid = self._next_number(180)  # the first one waits for the server's imports

    def _next_number(self, timeout: float) -> int:
        if not select.select([self._status], [], [], timeout)[0]:
            self.kill()
            raise ChildFailed(f"the child did not end within {timeout} seconds")
        return int(struct.unpack("=q", os.read(self._status, 8))[0])

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError, AttributeError):
            os.kill(self.pid, number)

    def wait(self, timeout: float = 60) -> int:
        """The exit code as subprocess knows it: negative for a signal. Call it once."""
        code = os.waitstatus_to_exitcode(self._next_number(timeout))
        os.close(self._status)
        return code

    def result(self, timeout: float = 60) -> Any:
        """What the function returned; raises what it raised."""
        code = self.wait(timeout)
        data = os.pread(self._result, os.fstat(self._result).st_size, 0)
        os.close(self._result)
        if not data:
            raise ChildFailed(f"the child ended with {code} and no result")
        value, error, text = pickle.loads(data)
        if isinstance(error, Unavailable):
            import pytest

            pytest.skip(f"skipped: {error}")
        if error is not None:
            raise error from ChildFailed(text)
        if text:
            raise ChildFailed(text)
        return value


def start(fn: Callable[..., Any], *args: Any, **settings: Any) -> Child:
    """Starts fn(*args), a function of a module, in a child. Settings:

    env: variables of the environment. user=True: as an unprivileged user. mounts=True: with mounts
    of its own, which vanish with it. shim=True: calls will be made to fail. exits=True: the whole
    interpreter ends as the function does, and gives no result; stderr goes to the file `stderr`.
    """
    return Child(fn, args, settings)


def run(fn: Callable[..., Any], *args: Any, timeout: float = 60, **settings: Any) -> Any:
    """`start`, and its result."""
    return start(fn, *args, **settings).result(timeout)


def _serve(connection: socket.socket) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    importlib.import_module("fastpersist._capture").self_test()  # as every first save does
    if library := os.environ.pop("LD_PRELOAD", None):  # not for the commands that children start
        os.unlink(library)
        os.rmdir(os.path.dirname(library))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, fds, _, _ = socket.recv_fds(connection, 1, 3)
        if not data:
            return
        if os.fork() == 0:
            connection.close()
            _keep(*fds)
        for fd in fds:
            os.close(fd)


def _keep(request: int, result: int, status: int) -> None:
    """Runs one child and tells how it ended, in a process of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _run(request, result)
        os._exit(0)
    os.write(status, struct.pack("=q", pid))
    os.write(status, struct.pack("=q", os.waitpid(pid, 0)[1]))
    os._exit(0)


def _run(request: int, result: int) -> None:
    value, error, text = None, None, ""
    path, module, name, args, settings = pickle.loads(os.pread(request, 1 << 24, 0))
    sys.path[:] = path
    if settings.pop("exits", False):
        os.dup2(os.open(settings.pop("stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        fn: Any = _function(module, name)
        _prepare(**settings)
        fn(*args)
        sys.exit(0)
    try:
        fn = _function(module, name)
        _prepare(**settings)
        value = fn(*args)
    except BaseException as caught:
        error, text = caught, traceback.format_exc()
    try:
        data = pickle.dumps((value, error, text))
        pickle.loads(data)
    except Exception:
        data = pickle.dumps((None, None, text or "the result cannot be pickled"))
    os.lseek(result, 0, os.SEEK_SET)
    os.write(result, data)


def _function(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    return functools.reduce(getattr, name.split("."), found)


def _prepare(
    env: dict[str, str] | None = None, user: bool = False, mounts: bool = False, shim: bool = False
) -> None:
    os.environ.update(env or {})
    if shim and not hasattr(libc, "fastpersist_faults_reset"):
        raise Unavailable("gcc is not installed, so the failing calls cannot be compiled")
    if mounts:
        _own_mounts()
    if user:
        if not is_root():
            raise Unavailable("becoming another user needs root")
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _own_mounts() -> None:
    if os.geteuid() != 0:
        raise Unavailable("mounting needs root")
    if libc.unshare(CLONE_NEWNS) != 0:
        raise Unavailable(f"no mounts of one's own: {os.strerror(ctypes.get_errno())}")
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None) != 0:
        raise Unavailable(f"mounts cannot be private: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    # As a module of its name, whose exceptions the parent knows.
    importlib.import_module("faults_child")._serve(socket.socket(fileno=int(sys.argv[1])))
