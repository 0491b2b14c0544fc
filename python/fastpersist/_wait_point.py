# SPDX-License-Identifier: Apache-2.0
"""Where training waits: just before an optimizer changes what a save still reads.

One process-wide hook runs before every optimizer's step. With a closure, forward and backward run
inside the step: an optimizer of torch evaluates it before it changes anything, so the wait moves to
the closure's first return; every other one waits before its step begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fastpersist._log import logger


class InFlight(Protocol):
    """A save that reads memory where it lies."""

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """The optimizer's step may change bytes that are still being read."""

    def wait_before_change(self) -> None:
        """Returns when those bytes may be changed. Never raises."""


_in_flight: set[InFlight] = set()
_lock = threading.Lock()
_steps = threading.local()
_hooked = False


def install() -> None:
    """Hooks every optimizer of the process, once."""
    global _hooked
    with _lock:
        if _hooked:
            return
        _hooked = True
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def add(save: InFlight) -> None:
    with _lock:
        _in_flight.add(save)


def discard(save: InFlight) -> None:
    with _lock:
        _in_flight.discard(save)


def clear() -> None:
    """In a forked child: the saves are the parent's."""
    global _lock
    _lock = threading.Lock()
    _in_flight.clear()


def inside_step() -> bool:
    """This thread is in the step of an optimizer, or in its closure."""
    return bool(getattr(_steps, "open", None))


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Never raises: a failing save is no reason to stop training."""
    opened = _open_steps()
    # A step that raised never closed its entry.
    while id(optimizer) in opened:
        opened.pop()
    opened.append(id(optimizer))
    if not _in_flight:
        return None
    try:
        return _wait_or_wrap(optimizer, args, kwargs)
    except Exception:
        logger.exception("waiting for a save before an optimizer step failed")
        return None


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    opened = _open_steps()
    while opened and opened.pop() != id(optimizer):
        pass


def _open_steps() -> list[int]:
    if not hasattr(_steps, "open"):
        _steps.open = []
    opened: list[int] = _steps.open
    return opened


def _wait_or_wrap(optimizer: Any, args: Any, kwargs: Any) -> Any:
    with _lock:
        saves = [save for save in _in_flight if save.concerns(optimizer)]
    if not saves:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure) or not _evaluates_first(optimizer):
        for save in saves:
            save.wait_before_change()
        return None
    waiting = _wait_after_first(closure, saves)
    if len(args) > 1:
        return (args[0], waiting, *args[2:]), kwargs
    return args, {**kwargs, "closure": waiting}


def _evaluates_first(optimizer: Any) -> bool:
    """Its step is one of torch's, all of which call the closure before they change anything."""
    for kind in type(optimizer).__mro__:
        if "step" in vars(kind):
            return kind.__module__.startswith("torch.optim.")
    return False


def _wait_after_first(closure: Callable[[], Any], saves: list[InFlight]) -> Callable[[], Any]:
    waited = False

    def waiting() -> Any:
        nonlocal waited
        value = closure()
        if not waited:
            waited = True
            for save in saves:
                save.wait_before_change()
        return value

    return waiting
