# SPDX-License-Identifier: Apache-2.0
"""How a process ends while saves are in flight: signals, the interpreter's exit, fork.

Nothing is written by a signal handler: it waits for the threads that write, at most as long as the
checkpointers allow, and hands over to whoever handled the signal before.
"""

from __future__ import annotations

import _thread
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
_LOGGING = 1.0
"""Seconds that a message may take when the process ends by a signal."""


class Draining(Protocol):
    """What has saves in flight."""

    handles_signals: bool

    def in_flight(self) -> bool: ...

    def follow_in_handler(self) -> None:
        """What its thread does for the save in flight, which may be kept from it: by a callback
        that wants a lock of the interrupted code's."""

    def drain_deadline(self) -> float:
        """When (time.monotonic) waiting for it ends."""

    def close_at_exit(self) -> list[Any]:
        """Waits until the deadline; what must never be destroyed after all."""

    def forget_in_child(self) -> list[Any]:
        """Marks it as unusable; what must never be destroyed in this process."""


_Before = Callable[[int, types.FrameType | None], Any] | int

_open: weakref.WeakSet[Draining] = weakref.WeakSet()
_handlers: dict[int, _Handler] = {}
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
    if not any(other.handles_signals for other in list(_open)):
        _give_signals_back()


class _Handler:
    """Drains, then hands over. One for each time that a signal was taken: whoever installs a
    handler that calls ours, as ours calls an earlier one, must not end in a circle."""

    def __init__(self, number: int, before: _Before) -> None:
        self._number = number
        self._before = before

    def __call__(self, number: int, frame: types.FrameType | None) -> Any:
        global _draining
        if not _draining:  # a second signal does not wait for the first one's drain
            _draining = True
            try:
                _drain(signal.Signals(number).name)
            finally:
                _draining = False
        if callable(self._before):
            return self._before(number, frame)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return None

    def give_back(self) -> None:
        # Somebody else's may be there by now; it may call ours, which then only hands over.
        if signal.getsignal(self._number) is self:
            signal.signal(self._number, self._before)


def _take_signals() -> None:
    if threading.current_thread() is not threading.main_thread():
        logger.info("signals are not handled: the checkpointer was made outside the main thread")
        return
    for number in _SIGNALS:
        before = signal.getsignal(number)
        # None: installed by C code, left alone. What is ignored stays so, in children too.
        if before is None or before == signal.SIG_IGN or isinstance(before, _Handler):
            continue
        _handlers[number] = _Handler(number, before)
        signal.signal(number, _handlers[number])


def _give_signals_back() -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for handler in _handlers.values():
        handler.give_back()
    _handlers.clear()


def _drain(why: str) -> None:
    """Waits until nothing is in flight, or the time is over."""
    busy = [one for one in list(_open) if one.handles_signals]
    while busy := [one for one in busy if one.in_flight()]:
        now = time.monotonic()
        late = [one for one in busy if now >= one.drain_deadline()]
        if late:
            _log(f"{why}: a save in flight was not finished in time; the last complete one stays")
            busy = [one for one in busy if one not in late]
            continue
        for one in busy:
            one.follow_in_handler()
        time.sleep(_SLICE)


def _log(message: str) -> None:
    """In a thread that is waited for briefly: the interrupted code may hold a lock that a handler
    of the program's log needs, or one of the modules queue and threading."""
    told = _thread.allocate_lock()

    def tell() -> None:
        try:
            logger.warning(message)
        finally:
            told.release()

    told.acquire()
    with contextlib.suppress(RuntimeError):  # no more threads
        _thread.start_new_thread(tell, ())
        told.acquire(timeout=_LOGGING)


def _at_exit() -> None:
    still_open = list(_open)
    for checkpointer in still_open:
        checkpointer.drain_deadline()  # begins now for all of them
    for checkpointer in still_open:
        try:
            for thing in checkpointer.close_at_exit():
                _core.keep_forever(thing)
        except Exception:
            logger.exception("closing a checkpointer at the exit of the interpreter failed")


def _in_child() -> None:
    """The threads are the parent's. Their locks must not be waited for, nor destroyed."""
    for checkpointer in list(_open):
        for thing in checkpointer.forget_in_child():
            _core.keep_forever(thing)
    _open.clear()
    with contextlib.suppress(ValueError):  # a thread that may not: its signals are as they were
        for handler in _handlers.values():
            handler.give_back()
    _handlers.clear()
