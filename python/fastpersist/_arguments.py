# SPDX-License-Identifier: Apache-2.0
"""Checks of what a checkpointer is given. Each raises ArgumentError, which names the argument."""

from __future__ import annotations

import math
import operator
from typing import Any

from fastpersist._errors import ArgumentError


def check_word(name: str, value: Any, words: tuple[str, ...]) -> None:
    """One of those words."""
    if value not in words:
        allowed = " or ".join(repr(word) for word in words)
        raise ArgumentError(f"checkpointer failed: {name} {value!r} is not {allowed}")


def check_count(name: str, value: Any, least: int) -> None:
    """None, or a number from least on."""
    if value is not None and (type(value) is not int or value < least):
        raise ArgumentError(f"checkpointer failed: {name} {value!r} is no number from {least} on")


def check_seconds(name: str, value: Any) -> None:
    """A finite number from 0 on."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ArgumentError(f"checkpointer failed: {name} {value!r} is no number of seconds")


def step_number(step: Any) -> int:
    """Integers of any kind, NumPy's among them. Raises ArgumentError."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise ArgumentError(f"save failed: step {step!r} is no integer from 0 on")
    return number
