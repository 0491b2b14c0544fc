# SPDX-License-Identifier: Apache-2.0
"""Fills the objects of a training run from a checkpoint file: what restoring in place consists of.

`load_into` fills tensors, modules, optimizers and all that has a load_state_dict. Here callables
are added, which get their part of the file once all the rest is good. Needs torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from fastpersist import _fill, _load_into, _match, _outline
from fastpersist._errors import ArgumentError, MismatchError
from fastpersist._load_into import LoadReport
from fastpersist._options import Options


def restore_into(
    targets: MutableMapping[Any, Any],
    path: Any,
    *,
    strict: bool = True,
    map_location: Any = None,
    weights_only: bool | None = None,
    options: Options | None = None,
) -> LoadReport:
    """Fills targets from a file whose top level is a dict with the same names.

    Args:
        targets: from names to what is to be filled, all that `load_into` takes: modules,
            optimizers, schedulers and other objects with `state_dict` and `load_state_dict`,
            tensors, nested dicts and lists of them. A plain value of a dict is replaced. A callable
            (also in dicts in it; classes do not count) is handed its part of the file, made anew.
        path: of a PyTorch or safetensors file; or a readable file object, as for `load_into`.
        strict: True raises MismatchError if anything is missing, unexpected or different; False
            fills what fits and reports the rest. A callable whose part is missing is not called.
        map_location: where the tensors that callables are handed are put, in the forms of
            torch.load; None: the CPU, wherever they were saved. Everything else stays on its
            device, or is placed by its own load_state_dict, as that of optimizers does.
            A file that has to be read as a whole first (see `load_into`) counts as saved from the
            CPU.
        weights_only, options: as for `load_into`.

    Returns: what was done. The tensors that callables were handed are among `filled`.

    The order: the whole structure is compared; all tensors are read, those for callables too, and
    all checksums compared; objects are given what their load_state_dict must do; plain values are
    set; callables are called, in the order of the targets.

    Raises: what `load_into` raises. What a load_state_dict or a callable raises passes through; all
        tensors have the file's values by then.

    Not thread-safe with regard to the targets. The GIL is free while bytes move.
    """
    return Restoration(targets, path, strict, map_location, weights_only, options).fill()


class Restoration:
    """A file that is open and of which the structure is known, and the targets that it may fill.

    Filling may be put off until others are open too; the file may lose its name meanwhile.
    """

    def __init__(
        self,
        targets: MutableMapping[Any, Any],
        path: Any,
        strict: bool,
        map_location: Any,
        weights_only: bool | None,
        options: Options | None = None,
    ) -> None:
        """Args, and what it raises: as of `restore_into`. Fills nothing."""
        if not isinstance(targets, MutableMapping) or _match.is_stateful(targets):
            raise ArgumentError(
                f"restore failed: targets is a {type(targets).__name__}; pass a dict from names to "
                "what is to be filled"
            )
        self._path = path
        self._strict = strict
        self._mover = None if map_location is None else _Mover(map_location)
        self._sketch = _outline.outline(path, weights_only, options)
        if not isinstance(self._sketch.object, Mapping):
            kind = type(self._sketch.object).__name__
            raise MismatchError(
                f"restore failed on {_load_into.describe(path)}: it holds a {kind}, not a dict "
                "with the names of the targets; nothing was touched. load() gives it out",
                different=[("the whole state", f"dict here, {kind} in the file")],
            )
        self._receivers: list[_Receiver] = []
        self._offered = _offer(targets, self._receivers, set())

    def check(self) -> None:
        """Finds out whether the file fits and is whole, while nothing is touched yet.

        Reads all of it. Raises as `fill`.
        """
        if self._strict:
            plan = _match.match(self._offered, self._sketch.object)
            _fill.settle_shared(plan, self._sketch)
            _load_into._refuse(plan, self._path, "restore")
        if self._sketch.file is not None and not self._sketch.loaded:
            self._sketch.file.read_all(self._sketch.options)

    def fill(self) -> LoadReport:
        """Fills the targets; once only."""
        report = _load_into.fill_from(
            self._sketch, self._offered, self._path, self._strict, "restore"
        )
        handed = [receiver for receiver in self._receivers if receiver.has_value]
        if self._mover is not None:
            self._mover.move([receiver.value for receiver in handed], self._sketch)
        for receiver in handed:
            receiver.hand_over()
        return report


# --- Callables, shown as objects that are given their state ---


class _Receiver:
    """Keeps the state that it is given until the callable may have it."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self._function = function
        self.has_value = False
        self.value: Any = None

    def state_dict(self) -> None:
        return None  # Nothing is there yet that could be filled, so all is made anew.

    def load_state_dict(self, state: Any) -> None:
        self.has_value, self.value = True, state

    def hand_over(self) -> None:
        value, self.value = self.value, None
        self._function(value)


class Targets(MutableMapping[Any, Any]):
    """A dict with receivers in the place of its callables. What is set in it is set in the dict."""

    def __init__(self, targets: MutableMapping[Any, Any], shown: dict[Any, Any]) -> None:
        self._targets = targets
        self._shown = shown

    def __getitem__(self, key: Any) -> Any:
        return self._shown[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._targets[key] = self._shown[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._targets[key], self._shown[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._shown)

    def __len__(self) -> int:
        return len(self._shown)


def _offer(target: Any, receivers: list[_Receiver], within: set[int]) -> Any:
    """The target, or what stands for it where there are callables in it."""
    if _match.is_stateful(target) or isinstance(target, type):
        return target
    if callable(target):
        receivers.append(_Receiver(target))
        return receivers[-1]
    # One that contains itself is left as it is, for the comparison to refuse.
    if not isinstance(target, MutableMapping) or id(target) in within:
        return target
    inside = within | {id(target)}
    shown = {key: _offer(value, receivers, inside) for key, value in target.items()}
    changed = any(shown[key] is not value for key, value in target.items())
    return Targets(target, shown) if changed else target


# --- Where the tensors for callables go ---


class _Mover:
    """Moves tensors on the CPU to where a map_location says, storage by storage as torch.load."""

    def __init__(self, map_location: Any) -> None:
        """Raises what torch raises for a device that is not there, if that can be told now."""
        self._map = map_location.decode() if isinstance(map_location, bytes) else map_location
        self._storages: dict[int, tuple[Any, Any]] = {}  # from, kept for its address; and to
        if isinstance(self._map, str | torch.device | Mapping):
            named = self._map.values() if isinstance(self._map, Mapping) else [self._map]
            if any(_restore_location(_empty(), str(n)).device.type == "meta" for n in named):
                raise ArgumentError(
                    "restore failed: map_location is the meta device: no data there"
                )
        elif self._map is not None and not callable(self._map):
            raise ArgumentError(
                f"restore failed: map_location is a {type(map_location).__name__}, not a device, a "
                "dict or a callable"
            )

    def move(self, values: list[Any], sketch: _outline.Outline) -> None:
        """Moves all tensors in the values, in place; those that share memory go on sharing it."""
        saved = {} if sketch.file is None else {t[4]: t[7] for t in sketch.file.tensors()}
        found = [leaf for leaf in _outline.leaves(values) if isinstance(leaf, torch.Tensor)]
        for tensor in {id(tensor): tensor for tensor in found}.values():
            if tensor.device.type == "cpu":
                place = sketch.locate(tensor)
                location = "cpu" if place is None else saved.get(place[0], "cpu")
                tensor.data = self._moved(tensor.detach(), location)

    def _moved(self, tensor: torch.Tensor, location: str) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return tensor.to(self._restored(_empty(), location).device)
        here = tensor.untyped_storage()
        if here._cdata not in self._storages:
            self._storages[here._cdata] = (here, self._restored(here, location))
        there = self._storages[here._cdata][1]
        made: Any = torch.empty(0, dtype=tensor.dtype, device=there.device)
        made.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())
        made = made.conj() if tensor.is_conj() else made
        return torch._neg_view(made) if tensor.is_neg() else made

    def _restored(self, storage: Any, location: str) -> Any:
        if isinstance(self._map, Mapping):
            location = self._map.get(location, location)
        elif callable(self._map):
            if (made := self._map(storage, location)) is not None:
                return getattr(made, "_untyped_storage", made)
        elif self._map is not None:
            location = self._map
        return _restore_location(storage, str(location))


_empty: Callable[[], Any] = functools.partial(torch.UntypedStorage, 0)
_restore_location: Any = torch.serialization.default_restore_location
