# SPDX-License-Identifier: Apache-2.0
"""Turns a failure of pickling into an error that names the place in the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastpersist._errors import ArgumentError, Error, UnsupportedStateError
from fastpersist._locate import locate, walk

# How torch and the compiled pickler say it.
_SAME_DATA = ("view the same data as different types", "seen as two types")


def explain(error: Exception, obj: Any, capture: Callable[[Any], Any]) -> Error:
    """An error for `raise ... from error`. capture is tried on parts of obj to find the culprit."""
    same_data = any(words in str(error) for words in _SAME_DATA)
    if same_data and (places := _types_that_clash(obj)):
        detail = f"{places[0]} and {places[1]} view the same memory as different types"
        advice = "clone one of them"
        return UnsupportedStateError(f"save failed: {detail}; {advice}")

    def fails(part: Any) -> bool:
        try:
            capture(part)
        except Exception:
            return True
        return False

    if fails([]):  # not the state's fault
        problem = f"{type(error).__name__}: {error}"
        return ArgumentError(f"save failed: nothing can be saved with these arguments: {problem}")
    place = locate(obj, fails)
    where = f"the entry {place}" if place else f"the object ({type(obj).__name__})"
    return UnsupportedStateError(
        f"save failed: {where} cannot be saved: {type(error).__name__}: {error}; "
        "remove it or replace it by plain values and tensors"
    )


def _types_that_clash(obj: Any) -> tuple[str, str] | None:
    seen: dict[int, tuple[torch.dtype, str]] = {}
    for place, leaf in walk(obj):
        if not isinstance(leaf, torch.Tensor):
            continue
        try:
            address = leaf.untyped_storage().data_ptr()
        except Exception:  # tensors without a storage take no part in this
            continue
        if address == 0:
            continue
        dtype, first = seen.setdefault(address, (leaf.dtype, place))
        if dtype is not leaf.dtype:
            return first, place
    return None
