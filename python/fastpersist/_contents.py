# SPDX-License-Identifier: Apache-2.0
"""What the containers of a state or of a file hold, and how their places are called.

A file of some hundred bytes can have lists that stand in each other many times over, or in
themselves. As a tree that has no end, so nothing here walks it as one without a bound. Used by
the comparison of a state with a file. Needs torch.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import torch

MOST_AGAIN = 50_000
"""Entries of containers that are looked at once more, for they stand at several places."""
_LONGEST_NAME = 1000
_DEEPEST = 100
_TENSORS, _MORE = 1, 2
_VALUES = frozenset((int, float, bool, str, bytes, type(None), complex))


def is_stateful(obj: Any) -> bool:
    """Whether it saves and restores itself, as modules, optimizers and schedulers do."""
    if isinstance(obj, type):
        return False
    # Nearly all have neither, and the first look tells.
    saves = callable(getattr(obj, "state_dict", None))
    return saves and callable(getattr(obj, "load_state_dict", None))


def is_sequence(obj: Any) -> bool:
    """Whether it is a list or tuple whose items have places of their own."""
    return isinstance(obj, list | tuple) and not isinstance(obj, torch.Size)


def join(name: str, key: Any) -> str:
    """The name of an entry; shortened where keys are so long that names would fill the memory."""
    try:
        joined = f"{name}.{key}" if name else str(key)
    except ValueError:  # Python does not print numbers of many thousand digits
        joined = f"{name}.<{type(key).__name__}>" if name else f"<{type(key).__name__}>"
    return joined if len(joined) <= _LONGEST_NAME else joined[: _LONGEST_NAME - 3] + "..."


def shown(value: Any) -> str:
    """A plain value for messages, in bounded length."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return f"<{type(value).__name__}>"


def _is_container(obj: Any) -> bool:
    return isinstance(obj, Mapping | list | tuple) and not isinstance(obj, torch.Size)


class Contents:
    """Answers what containers hold, in time linear in what there is, however often it is asked.

    Precondition: what it was asked about does not change.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}
        """By id, with the container, so that no other gets that id"""
        self._one_values: dict[int, tuple[Any, bool]] = {}
        self._opened: dict[tuple[int, int], Any] = {}
        self._listed: dict[int, Any] = {}
        self._again = MOST_AGAIN

    def holds_tensors(self, obj: Any) -> bool:
        """Whether there is a tensor at any depth, or it is one."""
        if isinstance(obj, torch.Tensor):
            return True
        return _is_container(obj) and bool(self._flags(obj) & _TENSORS)

    def is_one_value(self, obj: list[Any]) -> bool:
        """Whether a list has neither dicts, tensors nor objects in it, as a history of losses."""
        if (known := self._one_values.get(id(obj))) is None:
            found = self._at_first_sight(obj)
            known = (obj, not self._flags(obj) & _MORE if found is None else found)
            self._one_values[id(obj)] = known
        return known[1]

    @staticmethod
    def _at_first_sight(obj: list[Any]) -> bool | None:
        """What `is_one_value` answers if that can be told without looking into its items."""
        answer: bool | None = True
        for item in obj:
            if type(item) in _VALUES:
                continue
            if isinstance(item, dict | torch.Tensor):
                return False
            if _is_container(item):
                answer = None
            elif is_stateful(item):
                return False
        return answer

    def opens(self, here: Any, there: Any) -> bool:
        """Whether this pair of containers is to be walked: it is new, or was not met too often."""
        key = (id(here), id(there))
        if key not in self._opened:
            self._opened[key] = (here, there)
            return True
        self._again -= 1 + len(there)
        return self._again > 0

    def names(self, obj: Any, name: str) -> list[tuple[str, Any]]:
        """Names and values of all leaves; of empty containers and objects as well.

        So are containers that stand in themselves, too deep, or at too many places.
        """
        found: list[tuple[str, Any]] = []
        self._name(obj, name, found, set())
        return found

    def _name(self, obj: Any, name: str, found: list[tuple[str, Any]], within: set[int]) -> None:
        entries: Any = ()
        if isinstance(obj, Mapping):
            if type(obj) is dict or not is_stateful(obj):
                entries = obj.items()
        elif is_sequence(obj) and not (isinstance(obj, list) and self.is_one_value(obj)):
            entries = enumerate(obj)
        endless = id(obj) in within or len(within) >= _DEEPEST
        if not entries or not obj or endless or not self._lists(obj):
            found.append((name, obj))
            return
        within.add(id(obj))
        for key, value in entries:
            if type(value) in _VALUES or isinstance(value, torch.Tensor):
                found.append((join(name, key), value))
            else:
                self._name(value, join(name, key), found, within)
        within.remove(id(obj))

    def _lists(self, obj: Any) -> bool:
        """As `opens`, for a container of which the entries are named."""
        if id(obj) not in self._listed:
            self._listed[id(obj)] = obj
            return True
        self._again -= 1 + len(obj)
        return self._again > 0

    def _flags(self, root: Any) -> int:
        if (known := self._known.get(id(root))) is None:
            self._explore(root)
            known = self._known[id(root)]
        return known[1]

    def _explore(self, root: Any) -> None:
        """Each container once, then from those that hold something up to what they stand in."""
        known, flags = self._known, {id(root): 0}
        containers, parents = [root], {id(root): list[int]()}
        for one in containers:  # grows meanwhile
            mine = 0
            for item in _items(one):
                kind = type(item)
                if kind in _VALUES:
                    continue
                if isinstance(item, torch.Tensor):
                    mine |= _TENSORS | _MORE
                elif not _is_container(item):
                    mine |= _MORE if is_stateful(item) else 0
                else:
                    mine |= _MORE if isinstance(item, Mapping) else 0
                    if id(item) in known:
                        mine |= known[id(item)][1]
                    elif id(item) in flags:
                        parents[id(item)].append(id(one))
                    else:
                        flags[id(item)], parents[id(item)] = 0, [id(one)]
                        containers.append(item)
            flags[id(one)] = mine
        for flag in (_TENSORS, _MORE):
            reached = [key for key, mine in flags.items() if mine & flag]
            for key in reached:  # grows meanwhile
                for parent in parents[key]:
                    if not flags[parent] & flag:
                        flags[parent] |= flag
                        reached.append(parent)
        for one in containers:
            known[id(one)] = (one, flags[id(one)])


def _items(container: Any) -> Any:
    if isinstance(container, Mapping):
        return (*container.keys(), *container.values())
    return container
