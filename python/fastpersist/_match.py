# SPDX-License-Identifier: Apache-2.0
"""Compares a state with the object in a file and plans how the one is filled from the other.

By structure: keys and indices, not joined names. Nothing is read and nothing is changed here.
Needs torch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping, MutableSequence
from typing import Any

import torch

from fastpersist._contents import Contents, is_sequence, join, shown
from fastpersist._contents import is_stateful as is_stateful
from fastpersist._errors import ArgumentError, MismatchError
from fastpersist._outline import PLAIN_TENSORS

_ABSENT = object()
# A scheduler ignores an empty state, and a scaler (one that was disabled saves it) refuses it late.
_NEVER_EMPTY: tuple[type, ...] = (
    torch.amp.GradScaler,  # type: ignore[attr-defined]
    torch.optim.lr_scheduler.LRScheduler,
)


@dataclasses.dataclass(slots=True)
class Fill:
    """One tensor of the file, and the memory it goes to (None: it becomes a new tensor)."""

    name: str
    target: torch.Tensor | None
    source: torch.Tensor | None  # None once it was used
    staged: bool = False  # read to where the source lies, then copied


@dataclasses.dataclass(slots=True)
class Restore:
    """An object and what its load_state_dict is to be given."""

    owner: Any
    state: Any
    is_module: bool
    needed: bool  # False: filling its tensors is all that load_state_dict would do
    name: str = ""
    judges: bool = False  # a module that compares names and shapes itself


@dataclasses.dataclass
class Plan:
    """What fits and what does not."""

    fills: list[Fill] = dataclasses.field(default_factory=list)
    values: list[tuple[Any, Any, Any]] = dataclasses.field(default_factory=list)
    """(container, key, value); a key of None: the value is what the whole list becomes"""
    restores: list[Restore] = dataclasses.field(default_factory=list)
    given_values: int = 0  # to objects
    missing: list[tuple[str, Any]] = dataclasses.field(default_factory=list)  # and what is there
    unexpected: list[str] = dataclasses.field(default_factory=list)
    different: list[tuple[str, str]] = dataclasses.field(default_factory=list)


def match(state: Any, found: Any) -> Plan:
    """Plans how `state` is filled from `found`, the object in the file."""
    matcher = _Matcher()
    try:
        matcher.entry(state, found, "", None)
    except RecursionError:
        raise ArgumentError(
            "load_into failed: the state is nested too deeply or contains itself"
        ) from None
    return matcher.plan


def _kind(obj: Any) -> str:
    if isinstance(obj, torch.Tensor):
        return "a tensor"
    return "None" if obj is None else type(obj).__name__


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a is b or a == b or (a != a and b != b))
    except Exception:  # arrays and the like have no one answer
        return False


def tensor_problem(here: torch.Tensor, there: Any) -> str:
    """Why one cannot be filled from the other; empty if it can."""
    if not isinstance(there, torch.Tensor):
        return f"a tensor here, {_kind(there)} in the file"
    if torch.nn.parameter.is_lazy(here):
        return "not initialized here: pass its module, in place of the module's state_dict()"
    for tensor, where in ((here, "here"), (there, "in the file")):
        if type(tensor) not in PLAIN_TENSORS:
            return f"a {type(tensor).__name__} {where}, which only its own load_state_dict can fill"
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout)
            return f"{kind} {where}, which is not filled in place; use load"
    if here.dtype != there.dtype:
        return f"{here.dtype} here, {there.dtype} in the file"
    if here.shape != there.shape:
        return f"shape {tuple(here.shape)} here, {tuple(there.shape)} in the file"
    if there.is_meta and not here.is_meta:
        return "on the meta device in the file, so it has no data there"
    if here.is_meta and not there.is_meta:
        return "on the meta device here, so it has no memory to fill; use to_empty first"
    if not here.is_contiguous() and _is_expanded(here):
        return "expanded here: its elements share memory"
    return ""


def _is_expanded(tensor: torch.Tensor) -> bool:
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return any(step == 0 and size > 1 for step, size in steps)


class _Matcher:
    def __init__(self) -> None:
        self.plan = Plan()
        self._contents = Contents()
        self._merged: dict[tuple[int, int], Any] = {}  # in one state for one object

    def _differ(self, name: str, why: str) -> None:
        self.plan.different.append((name or "the whole state", why))

    def _miss(self, here: Any, name: str) -> None:
        self.plan.missing.extend(self._contents.names(here, name))

    def _surprise(self, there: Any, name: str) -> None:
        self.plan.unexpected.extend(found for found, _ in self._contents.names(there, name))

    def entry(self, here: Any, there: Any, name: str, slot: tuple[Any, Any] | None) -> None:
        """Any value. slot: the container and key where a plain one can be replaced."""
        if isinstance(here, torch.Tensor):
            self.tensor(here, there, name or "tensor")
        elif is_stateful(here):
            self._object(here, there, name)
        elif isinstance(here, Mapping):
            self._mapping(here, there, name)
        elif is_sequence(here):
            self._sequence(here, there, name)
        else:
            self._value(here, there, name, slot)

    def tensor(self, here: torch.Tensor, there: Any, name: str) -> bool:
        if why := tensor_problem(here, there):
            self._differ(name, why)
            return False
        self.plan.fills.append(Fill(name, here, there))
        return True

    def _mapping(self, here: Mapping[Any, Any], there: Any, name: str) -> None:
        if not isinstance(there, Mapping):
            return self._differ(name, f"{_kind(here)} here, {_kind(there)} in the file")
        if not self._contents.opens(here, there):
            return None
        mutable = isinstance(here, MutableMapping)
        for key, value in here.items():
            place = join(name, key)
            if key in there:
                self.entry(value, there[key], place, (here, key) if mutable else None)
            else:
                self._miss(value, place)
        for key, value in there.items():
            if key not in here:
                self._surprise(value, join(name, key))
        return None

    def _sequence(self, here: Any, there: Any, name: str) -> None:
        if not is_sequence(there) or isinstance(here, list) != isinstance(there, list):
            return self._differ(name, f"{_kind(here)} here, {_kind(there)} in the file")
        if (
            isinstance(here, list)
            and self._contents.is_one_value(here)
            and not self._contents.holds_tensors(there)
        ):
            self.plan.values.append((here, None, there))
            return None
        if not self._contents.opens(here, there):
            return None
        mutable = isinstance(here, MutableSequence)
        for index, (mine, theirs) in enumerate(zip(here, there, strict=False)):
            self.entry(mine, theirs, join(name, index), (here, index) if mutable else None)
        for index in range(len(there), len(here)):
            self._miss(here[index], join(name, index))
        for index in range(len(here), len(there)):
            self._surprise(there[index], join(name, index))
        return None

    def _value(self, here: Any, there: Any, name: str, slot: tuple[Any, Any] | None) -> None:
        unset = here is None or there is None
        if (not unset and type(here) is not type(there)) or self._contents.holds_tensors(there):
            self._differ(name, f"{_kind(here)} here, {_kind(there)} in the file")
        elif slot is not None:
            self.plan.values.append((*slot, there))
        elif not _equal(here, there):
            why = f"{shown(here)} here, {shown(there)} in the file, in what cannot be changed"
            self._differ(name, why)

    # --- Objects with state_dict and load_state_dict ---

    def _object(self, owner: Any, there: Any, name: str) -> None:
        if isinstance(owner, torch.nn.Module) and isinstance(there, Mapping) and _adapts(owner):
            # What fits is known only once its hooks have seen the state.
            state = self._merge(_ABSENT, there, name, may_change=True)
            self.plan.restores.append(Restore(owner, state, True, True, name, judges=True))
            return None
        here = owner.state_dict()
        if isinstance(here, Mapping) and not isinstance(there, Mapping):
            return self._differ(
                name, f"state of a {type(owner).__name__} here, {_kind(there)} in the file"
            )
        if isinstance(owner, torch.nn.Module):
            return self._module(owner, here, there, name)
        if isinstance(owner, _NEVER_EMPTY) and here and not there:
            return self._miss(here, name)
        plan = self.plan
        before = (len(plan.different), len(plan.fills), plan.given_values)
        is_optimizer = isinstance(owner, torch.optim.Optimizer)
        if is_optimizer:
            self._parameter_groups(here, there, name)
        state = self._merge(here, there, name, may_change=not is_optimizer)
        if len(plan.different) == before[0]:
            plan.restores.append(Restore(owner, state, is_module=False, needed=True))
        else:  # It would refuse the whole, after other tensors were filled: it stays as it is.
            del plan.fills[before[1] :]
            plan.given_values = before[2]
        return None

    def _module(
        self, owner: torch.nn.Module, here: Mapping[str, Any], there: Mapping[str, Any], name: str
    ) -> None:
        state: OrderedDict[str, Any] = OrderedDict()
        extra = False
        may_lack = _added_later(owner, getattr(there, "_metadata", None))
        for key, value in here.items():
            place = join(name, key)
            if key not in there:
                if key not in may_lack:
                    self._miss(value, place)
            elif isinstance(value, torch.Tensor):
                self.tensor(value, there[key], place)
                state[key] = value
            else:
                extra = True
                state[key] = self._merge(value, there[key], place, may_change=True)
        for key, value in there.items():
            if key not in here:
                self._surprise(value, join(name, key))
        if (metadata := getattr(there, "_metadata", None)) is not None:
            state._metadata = metadata  # type: ignore[attr-defined]
        needed = extra or not _only_copies(owner)
        self.plan.restores.append(Restore(owner, state, is_module=True, needed=needed))

    def _parameter_groups(
        self, here: Mapping[str, Any], there: Mapping[str, Any], name: str
    ) -> None:
        def sizes(state: Mapping[str, Any]) -> list[int] | None:
            groups = state.get("param_groups")
            if not isinstance(groups, list) or not all(isinstance(g, Mapping) for g in groups):
                return None
            lists = [group.get("params") for group in groups]
            return [len(ids) for ids in lists if is_sequence(ids)]

        mine, theirs = sizes(here), sizes(there)
        if mine != theirs:
            found = "none" if theirs is None else f"of {theirs}"
            why = f"groups of {mine} parameters here, {found} in the file"
            self._differ(join(name, "param_groups"), why)
        if isinstance(here.get("state"), Mapping) and not isinstance(there.get("state"), Mapping):
            found = _kind(there["state"]) if "state" in there else "nothing"
            self._differ(join(name, "state"), f"dict here, {found} in the file")

    def _merge(self, here: Any, there: Any, name: str, may_change: bool) -> Any:
        """What load_state_dict gets: the file's state with the tensors that exist already in it.

        may_change: a tensor of another shape or type is for the object to judge.
        """
        self._merged.clear()
        try:
            return self._merge_part(here, there, name, may_change)
        except RecursionError:
            why = "nested too deeply or contains itself in the file"
            name = name or "the whole state"
            message = f"load_into failed: '{name}' is {why}, so no object can be given it"
            raise MismatchError(
                f"{message}; nothing was touched", different=[(name, why)]
            ) from None

    def _merge_part(self, here: Any, there: Any, name: str, may_change: bool) -> Any:
        if isinstance(there, torch.Tensor):
            return self._merge_tensor(here, there, name, may_change)
        holds_tensors = self._contents.holds_tensors
        holds_any = holds_tensors(there)
        is_mapping = isinstance(there, Mapping)
        pair = (id(here), id(there))
        if holds_any and not self._contents.opens(here, there) and pair in self._merged:
            return self._merged[pair]
        if is_mapping and (holds_any or holds_tensors(here)):
            merged: Any = copy.copy(there)
            entries = here if isinstance(here, Mapping) else {}
            for key, value in there.items():
                mine = entries.get(key, _ABSENT)
                merged[key] = self._merge_part(mine, value, join(name, key), may_change)
        elif holds_any and is_sequence(there):
            mine = here if is_sequence(here) else ()
            items = [
                self._merge_part(
                    mine[i] if i < len(mine) else _ABSENT, item, join(name, i), may_change
                )
                for i, item in enumerate(there)
            ]
            plain = isinstance(there, list) or not hasattr(there, "_fields")
            merged = type(there)(items) if plain else type(there)(*items)
        else:
            merged = there
            self.plan.given_values += 1
        self._miss_tensors(here, merged, name)
        if holds_any:
            self._merged[pair] = merged
        return merged

    def _merge_tensor(self, here: Any, there: torch.Tensor, name: str, may_change: bool) -> Any:
        if isinstance(here, torch.Tensor):
            if not (why := tensor_problem(here, there)):
                self.plan.fills.append(Fill(name, here, there))
                return here
            if not may_change:
                self._differ(name, why)
                return here
        self.plan.fills.append(Fill(name, None, there))
        return there

    def _miss_tensors(self, here: Any, merged: Any, name: str) -> None:
        """Tensors right here that the file lacks; unless that is an error, they stay."""
        if not isinstance(here, Mapping) or not isinstance(merged, Mapping):
            return
        for key, value in here.items():
            if key not in merged and self._contents.holds_tensors(value):
                self._miss(value, join(name, key))
                if isinstance(merged, MutableMapping):
                    merged[key] = value


def _adapts(module: torch.nn.Module) -> bool:
    """Whether load_state_dict may take other names and shapes than state_dict gives now.

    Those of torch's own modules (batch norms) are known: `_added_later`.
    """
    for part in module.modules():
        method = type(part)._load_from_state_dict
        own = method is torch.nn.Module._load_from_state_dict
        if not own and not method.__module__.startswith("torch.nn.modules."):
            return True
        is_lazy: Any = torch.nn.parameter.is_lazy
        tensors = (*part._parameters.values(), *part._buffers.values())
        if part._load_state_dict_pre_hooks or any(map(is_lazy, tensors)):
            return True
    return False


def _added_later(module: torch.nn.Module, metadata: Any) -> set[str]:
    """Names that older files lack and load_state_dict does without: batch norms' of torch 0.4."""
    names = set()
    for place, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.track_running_stats:
            about = metadata.get(place, {}) if isinstance(metadata, Mapping) else {}
            version = about.get("version") if isinstance(about, Mapping) else None
            if version is None or version < 2:  # the version of the module's part of the state
                names.add(join(place, "num_batches_tracked"))
    return names


def _only_copies(module: torch.nn.Module) -> bool:
    """Whether state_dict gives the tensors themselves, and load_state_dict only fills them."""
    base = torch.nn.Module
    methods = (
        "state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict",
        "get_extra_state",
    )  # fmt: skip
    hooks = (
        "_state_dict_hooks", "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    )  # fmt: skip
    for part in module.modules():
        if any(getattr(type(part), name) is not getattr(base, name) for name in methods):
            return False
        if any(getattr(part, name, True) for name in hooks):
            return False
    return True
