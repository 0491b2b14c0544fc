# SPDX-License-Identifier: Apache-2.0
"""Training runs for the tests of `Checkpointer`, and a device that answers when it is told to.

`held` needs a child of `faults_child` with shim=True.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import faults_support as faults
import torch

import fastpersist as fp
from fastpersist._locate import walk

BLOCK = 16 << 10
END = 1 << 62
BUFFERED = fp.Options(engine="buffered", block_bytes=BLOCK, retries=0)
"""Every write is a pwrite(2) of the writer's thread, so that a held one stops the reading too."""


def open_run(folder: Any, **arguments: Any) -> fp.Checkpointer:
    """A checkpointer in folder/run whose writes can be held."""
    arguments.setdefault("options", BUFFERED)
    return fp.Checkpointer(os.path.join(folder, "run"), **arguments)


class Training:
    """A small model and its optimizer. Weights are long enough to be read in place, and there are
    buffers, biases and counters, which are not. Its gradients are random, by a seed."""

    def __init__(self, kind: Any = torch.optim.Adam, layers: int = 4, **arguments: Any):
        torch.set_num_threads(1)  # several wait for each other, for long where others compute
        torch.manual_seed(0)
        blocks = [(torch.nn.Linear(96, 96), torch.nn.BatchNorm1d(96)) for _ in range(layers)]
        self.model = torch.nn.Sequential(*(part for block in blocks for part in block))
        self.optimizer = kind(self.model.parameters(), lr=0.01, **arguments)
        self.step()

    def weights(self) -> list[Any]:
        return [p for p in self.model.parameters() if p.dim() == 2]

    def backward(self) -> Any:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 96)).square().mean()
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def values(self) -> dict[str, Any]:
        """A copy of the state."""
        return copy.deepcopy(self.state())


def difference(found: Any, expected: Any) -> str:
    """Where two states differ first, bit for bit; empty if they do not."""
    ours, theirs = dict(walk(found)), dict(walk(expected))
    if ours.keys() != theirs.keys():
        return f"keys: {sorted(ours.keys() ^ theirs.keys())}"
    for place, value in ours.items():
        if not _same(value, theirs[place]):
            return f"{place}: {value} instead of {theirs[place]}"
    return ""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)
    if hasattr(a, "tobytes") and hasattr(b, "tobytes"):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    return type(a) is type(b) and bool(a == b)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


class Hold:
    """A device that does not answer."""

    def __init__(self, folder: Any):
        self._file = pathlib.Path(folder, "hold")
        self._reached = pathlib.Path(folder, "hold.reached")
        self._reached.unlink(missing_ok=True)
        self._file.touch()

    def reached(self) -> None:
        """Returns once something waits for the device."""
        wait_for(self._reached)

    def is_held(self) -> bool:
        return self._file.exists()

    def release(self) -> None:
        self._file.unlink(missing_ok=True)


@contextlib.contextmanager
def held(
    folder: Any, at: int = 0, path: str = "state.pt", call: str = "", number: int = 1
) -> Iterator[Hold]:
    """Until it is released: writes to the file that reach byte `at` or one after it wait; with
    call: that call from the given number on. The end of the block releases it."""
    hold = Hold(folder)
    os.environ["FASTPERSIST_HOLD"] = str(hold._file)
    rule = f"pwrite-at {at} {END}" if not call else f"{call} {number} {END}"
    with faults.failing(f"{rule} hold 0 {path}"):
        try:
            yield hold
        finally:
            hold.release()


def wait_for(path: pathlib.Path, seconds: float = 60) -> None:
    """Returns once the file is there, and removes it."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.0005)
    path.unlink()


def failure(ticket: fp.Ticket) -> BaseException:
    """What made the save fail; it must have."""
    error = ticket.exception(60)
    assert error is not None, "the save did not fail"
    return error


def waits(hold: Hold, function: Callable[[], Any]) -> bool:
    """Calls the function. The device is let go when the function waits for a save, or has returned.
    True: it waited."""
    seen, over = [], threading.Event()
    thread = threading.get_ident()

    def watch() -> None:
        while not over.is_set():
            if _is_waiting(sys._current_frames()[thread]):
                seen.append(True)
                break
            time.sleep(0.0005)
        hold.release()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        function()
    finally:
        over.set()
        watcher.join()
    return bool(seen)


def _is_waiting(frame: types.FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "wait_before_change":
            return True
        frame = frame.f_back
    return False


SMALL = 1 << 20
"""Bytes of memory: too little to copy what the device does not take."""


def large(kind: Any = torch.optim.Adam, **arguments: Any) -> Training:
    """More than fits into SMALL."""
    return Training(kind, layers=40, **arguments)


def check_that_it_waits(
    folder: str,
    training: Training,
    change: Callable[[Training, Hold], Any],
    attach: Callable[[fp.Checkpointer], Any],
    expected: bool = True,
) -> None:
    """The change waits for the save in flight (or need not), and the file has the old values."""
    with open_run(folder, memory=SMALL, verify_source="full") as ckpt:
        attach(ckpt)
        before = training.values()
        with held(folder) as hold:
            ticket = ckpt.save(1, training.state())
            hold.reached()
            assert waits(hold, lambda: change(training, hold)) is expected
            info = ticket.result(60)
        assert difference(ckpt.load().state, before) == ""
        assert expected is False or info.seconds["stall"] > info.seconds["capture"]
