# SPDX-License-Identifier: Apache-2.0
"""Finds the place in a state that cannot be saved, for the error message. Runs on failure only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_MAX_DEPTH = 100


def children(obj: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a plain container, with the text that indexes them."""
    if isinstance(obj, Mapping):
        for key, value in obj.items():
            yield f"[{key!r}]", value
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(obj):
            yield f"[{index}]", value
    elif hasattr(obj, "__dict__") and not isinstance(obj, type) and not callable(obj):
        for name, value in vars(obj).items():
            yield f".{name}", value


def locate(obj: Any, fails: Callable[[Any], bool]) -> str:
    """The deepest place where an entry fails by itself, such as "['model']['fn']"; "" for obj."""
    place = ""
    for _ in range(_MAX_DEPTH):
        for text, value in children(obj):
            if fails(value):
                place += text
                obj = value
                break
        else:
            return place
    return place


def walk(obj: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every leaf of nested plain containers with its place; shared ones each time they appear."""
    if depth < _MAX_DEPTH and isinstance(obj, Mapping | list | tuple):
        for text, value in children(obj):
            yield from walk(value, place + text, depth + 1)
    else:
        yield place, obj


def storage_place(obj: Any, identity: int, address: int) -> str | None:
    """Of the first tensor in obj with that storage (torch's _cdata), or whose storage begins at
    that address."""
    for place, leaf in walk(obj):
        storage = getattr(leaf, "untyped_storage", None)
        try:
            if storage is None:
                continue
            found = storage()
            if found._cdata == identity or found.data_ptr() == address:
                return place
        except Exception:  # tensors without a storage cannot be meant
            continue
    return None
