# SPDX-License-Identifier: Apache-2.0
"""Says at save time what `weights_only=True`, the default, will refuse when the file is loaded.

Otherwise a run learns of it when it resumes (huggingface/transformers#40500).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastpersist import _capture, _weights_only
from fastpersist._locate import children

_GLOBAL = re.compile(rb"c([A-Za-z_][\w.]*)\n([A-Za-z_][\w.]*)\n")
_MOST_SHOWN = 5
_LONGEST = 4 << 20  # bytes of a pickle that is followed instruction by instruction

_CONTAINERS = (dict, OrderedDict, list, tuple)
_USUAL = (torch.Tensor, torch.nn.Parameter, int, float, str, bool, type(None))

_seen: set[tuple[bytes, bytes]] = set()


def foresee(state: Any, captured: _capture.Capture, say: Callable[[str], None]) -> None:
    """Calls `say` with what will be refused of a state.

    A pickle is looked at only if it is torch's own, and names a class or function that no pickle
    before it named. What is not found out is left out: this is about a warning.
    """
    pickled = captured.records[0][1]
    if captured.referenced_bytes is not None or not isinstance(pickled, bytes):
        return
    names = set(_GLOBAL.findall(pickled)) - _seen
    if not names:
        return
    _seen.update(names)
    try:
        refused = _refused(pickled)
    except Exception:  # private to torch, and no reason not to save
        return
    if not refused:
        return
    places = [
        f"{place or 'all of it'} ({type(leaf).__name__})"
        for place, leaf in _unusual_leaves(state)
        if _may_be(leaf, refused)
    ] or sorted(refused)
    shown = ", ".join(places[:_MOST_SHOWN])
    if len(places) > _MOST_SHOWN:
        shown += f" and {len(places) - _MOST_SHOWN} more"
    say(
        f"the state holds what weights_only=True, the default of loading, refuses: {shown}; store "
        "it as tensors, numbers and strings (fastpersist.rng_state() does so for random states), "
        "or load with torch.serialization.add_safe_globals or weights_only=False"
    )


def _refused(pickled: bytes) -> set[str]:
    """Names that are not allowed, or that nothing makes torch take; empty if all is well."""
    allowed = _weights_only._allowed()
    if len(pickled) > _LONGEST:
        found = (_weights_only._today(m.decode(), n.decode()) for m, n in _GLOBAL.findall(pickled))
        return {name for name in found if name not in allowed}
    reading = _weights_only._Reading(allowed)
    reading.follow(pickled)
    never = reading.dead or ({reading.never} if reading.never else set())
    return {*reading.wanted, *never}


def _may_be(leaf: Any, refused: set[str]) -> bool:
    """By its type: to pickle it once more by itself would call what the user wrote."""
    kind = type(leaf)
    if kind.__module__ == "numpy":  # what NumPy's objects are made by has other names
        return any(name.startswith("numpy.") for name in refused)
    return f"{kind.__module__}.{kind.__qualname__}" in refused


def _unusual_leaves(state: Any) -> Iterator[tuple[str, Any]]:
    """What plain containers hold besides tensors and plain values; each container only once."""
    seen: set[int] = set()
    stack = [("", state)]
    while stack:
        place, one = stack.pop()
        if type(one) in _CONTAINERS:
            if id(one) not in seen:
                seen.add(id(one))
                inner = [(place + text, value) for text, value in children(one)]
                stack.extend(reversed(inner))
        elif type(one) not in _USUAL:
            yield place, one
