# SPDX-License-Identifier: Apache-2.0
"""Says at save time what `weights_only=True`, the default, will refuse when the file is loaded.

Otherwise a run learns of it when it resumes (huggingface/transformers#40500).
"""

from __future__ import annotations

import itertools
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastpersist import _capture, _weights_only
from fastpersist._locate import children

_GLOBAL = re.compile(rb"c([A-Za-z_][\w.]*)\n([A-Za-z_][\w.]*)\n")
_MOST_SHOWN = 5
_MOST_TRIED = 100  # entries that are pickled by themselves to see whether they are the ones
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
        if not _is_refused(pickled):
            return
        places = _places(state)
    except Exception:  # private to torch, and no reason not to save
        return
    shown = ", ".join(f"{place or 'all of it'} ({kind})" for place, kind in places[:_MOST_SHOWN])
    if len(places) > _MOST_SHOWN:
        shown += f" and {len(places) - _MOST_SHOWN} more"
    say(
        f"the state holds what weights_only=True, the default of loading, refuses: "
        f"{shown or type(state).__name__}; store it as tensors, numbers and strings "
        "(fastpersist.rng_state() does so for random states), or load with "
        "torch.serialization.add_safe_globals or weights_only=False"
    )


def _is_refused(pickled: bytes) -> bool:
    allowed = _weights_only._allowed()
    if len(pickled) > _LONGEST:
        found = (_weights_only._today(m.decode(), n.decode()) for m, n in _GLOBAL.findall(pickled))
        return any(name not in allowed for name in found)
    reading = _weights_only._Reading(allowed)
    reading.follow(pickled)
    return bool(reading.wanted or reading.never)


def _pickle_of(part: Any) -> bytes:
    body = _capture._record(part, pickle).records[0][1]
    return body if isinstance(body, bytes) else b""


def _places(state: Any) -> list[tuple[str, str]]:
    """(place, type) of the entries that are refused by themselves."""
    places = []
    for place, leaf in itertools.islice(_unusual_leaves(state), _MOST_TRIED):
        if _is_refused(_pickle_of(leaf)):
            places.append((place, type(leaf).__name__))
    return places


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
