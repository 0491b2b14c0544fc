# SPDX-License-Identifier: Apache-2.0
"""Where training waits: just before an optimizer changes what a save still reads.

One process-wide hook runs before every optimizer's step. With a closure, forward and backward run
inside the step: an optimizer of torch evaluates it before it changes anything, so the wait moves to
the closure's first return. Every other one waits before its step begins, and so does one with hooks
of the user's: they run before the closure, and may clip weights or swap averages in.

A signal handler may save at any moment: this module takes no lock.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastpersist._log import logger


class InFlight(Protocol):
    """A save that reads memory where it lies."""

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """The optimizer's step may change bytes that are still being read."""

    def wait_before_change(self) -> None:
        """Returns when those bytes may be changed. Never raises, but for what signals raise."""

    def give_up(self, why: str) -> None:
        """Nothing will be committed."""


_wrap_step: Any = torch.optim.Optimizer.profile_hook_step
_WRAPPER: types.CodeType = _wrap_step(lambda optimizer: None).__code__
"""Of what torch puts around every step to call hooks; all of them share it."""

_in_flight: set[InFlight] = set()
_begun: dict[object, list[torch.optim.Optimizer]] = {}
"""For each save that is being begun: which optimizers began a step since."""
_hooked = False
_all_hooks: dict[int, Any] = getattr(
    sys.modules[torch.optim.Optimizer.__module__], "_global_optimizer_pre_hooks", {}
)
"""Those that torch calls before the steps of all optimizers."""


def install() -> None:
    """Hooks every optimizer of the process, once."""
    global _hooked
    if not _hooked:
        _hooked = True
        handle = register_optimizer_step_pre_hook(_before_step)
        with contextlib.suppress(AttributeError, KeyError):  # a torch that keeps them elsewhere
            # Before hooks that were there already and may change weights.
            _all_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


def add(save: InFlight) -> None:
    _in_flight.add(save)


def discard(save: InFlight) -> None:
    _in_flight.discard(save)


def clear() -> None:
    """In a forked child: the saves are the parent's."""
    _in_flight.clear()


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Its step calls hooks: torch wraps that of every optimizer that ran Optimizer.__init__."""
    code = getattr(type(optimizer).step, "__code__", None)
    return code is _WRAPPER and hasattr(optimizer, "_optimizer_step_pre_hooks")


def inside_step() -> bool:
    """This thread is in the step of an optimizer, or in its closure."""
    return _is_in_step(sys._getframe())


def another_thread_steps() -> bool:
    """Another thread is. Its frames tell, and not a count that hooks keep: no hook runs after a
    step that raises."""
    others = sys._current_frames()
    del others[threading.get_ident()]  # this frame in a variable of its own would keep all alive
    return any(_is_in_step(frame) for frame in others.values())


@contextlib.contextmanager
def steps_begun() -> Iterator[list[torch.optim.Optimizer]]:
    """The optimizers whose steps begin, in any thread, while the block runs."""
    key = object()
    begun = _begun[key] = []
    try:
        yield begun
    finally:
        del _begun[key]


def _is_in_step(innermost: types.FrameType) -> bool:
    frame: types.FrameType | None = innermost
    while frame is not None:
        if frame.f_code is _WRAPPER:
            return True
        frame = frame.f_back
    return False


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Raises nothing of its own: a failing save is no reason to stop training."""
    # In this order: a save is in flight before it looks at what has begun.
    for begun in list(_begun.values()):
        begun.append(optimizer)
    saves = list(_in_flight)
    if not saves:
        return None
    try:
        return _wait_or_wrap(optimizer, args, kwargs, saves)
    except Exception as error:
        logger.exception("waiting for a save before an optimizer step failed")
        for save in saves:
            save.give_up(f"waiting for it before an optimizer step failed: {error!r}")
        return None


# Compiled steps leave the compiled code to come here.
_before_step._torchdynamo_disable = True  # type: ignore[attr-defined]


def _wait_or_wrap(optimizer: Any, args: Any, kwargs: Any, in_flight: list[InFlight]) -> Any:
    saves = [save for save in in_flight if save.concerns(optimizer)]
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
    """Its step is one of torch's, all of which call the closure before they change anything, and
    nobody else's hook runs before that."""
    if len(_all_hooks) > 1 or getattr(optimizer, "_optimizer_step_pre_hooks", None):
        return False
    step: Any = type(optimizer).step
    while step is not None:  # what decorators wrap, down to the function itself
        if not getattr(step, "__globals__", {}).get("__name__", "").startswith("torch."):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


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
