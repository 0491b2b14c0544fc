# SPDX-License-Identifier: Apache-2.0
"""How a process ends while saves are in flight: signals, the interpreter's exit, fork.

Nothing is written by a signal handler: it waits for the threads that write, at most as long as the
checkpointers allow, and hands over to whoever handled the signal before.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from fastpersist import _core
from fastpersist._log import logger

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SLICE = 0.05
"""Seconds. Between slices a second signal gets its turn."""

_Handler = Callable[[int, types.FrameType | None], Any] | int | None


class Draining(Protocol):
    """What has saves in flight."""

    drain_timeout: float
    handles_signals: bool

    def in_flight(self) -> bool: ...

    def close_at_exit(self) -> None: ...

    def forget_in_child(self) -> list[Any]:
        """Marks it as unusable; what must never be destroyed in this process."""


_open: weakref.WeakSet[Draining] = weakref.WeakSet()
_earlier: dict[int, _Handler] = {}
_draining = False
_registered = False


def opened(checkpointer: Draining) -> None:
    """From now on the process does not end without looking after it."""
    global _registered
    _open.add(checkpointer)
    if not _registered:
        _registered = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_in_child)
    if checkpointer.handles_signals:
        _take_signals()


def closed(checkpointer: Draining) -> None:
    _open.discard(checkpointer)
    if not any(other.handles_signals for other in _open):
        _give_signals_back()


def _take_signals() -> None:
    if threading.current_thread() is not threading.main_thread():
        logger.info("signals are not handled: the checkpointer was made outside the main thread")
        return
    for number in _SIGNALS:
        before = signal.getsignal(number)
        if before is not _on_signal and before is not None:  # None: installed by C code, left alone
            _earlier[number] = before
            signal.signal(number, _on_signal)


def _give_signals_back() -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number, before in list(_earlier.items()):
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, before)
        del _earlier[number]


def _on_signal(number: int, frame: types.FrameType | None) -> Any:
    global _draining
    if not _draining:  # a second signal does not wait for the first one's drain
        _draining = True
        try:
            _drain(signal.Signals(number).name)
        finally:
            _draining = False
    before = _earlier.get(number, signal.SIG_DFL)
    if callable(before):
        return before(number, frame)
    if before == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return None


def _drain(why: str) -> None:
    """Waits until nothing is in flight, or the time is over."""
    busy = [one for one in list(_open) if one.handles_signals and one.in_flight()]
    if not busy:
        return
    deadline = time.monotonic() + max(one.drain_timeout for one in busy)
    while any(one.in_flight() for one in busy):
        if time.monotonic() >= deadline:
            _log(f"{why}: a save in flight was not finished in time; the last complete one stays")
            return
        time.sleep(_SLICE)


def _log(message: str) -> None:
    # The interrupted code may hold the logger's lock, which is reentrant, or a stream's.
    with contextlib.suppress(RuntimeError):
        logger.warning(message)


def _at_exit() -> None:
    for checkpointer in list(_open):
        try:
            checkpointer.close_at_exit()
        except Exception:
            logger.exception("closing a checkpointer at the exit of the interpreter failed")


def _in_child() -> None:
    """The threads are the parent's. Their locks must not be waited for, nor destroyed."""
    for checkpointer in list(_open):
        for thing in checkpointer.forget_in_child():
            _core.keep_forever(thing)
    _open.clear()
    for number, before in list(_earlier.items()):
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, before)
    _earlier.clear()
