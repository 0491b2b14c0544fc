# SPDX-License-Identifier: Apache-2.0
"""What a checkpointer may read where it lies: memory that only an optimizer step changes.

Ownership is by byte range. A storage is read in place only if every byte of it belongs to the
parameters or the state of attached optimizers, or to weights that were declared unchanging.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from fastpersist import _core, _wait_point
from fastpersist._errors import ArgumentError

SMALL = 16 << 10
"""Bytes. Shorter storages are copied at once: a witness for each would cost more."""


class Owned(NamedTuple):
    """One tensor that is attached, as it was when the save began."""

    tensor: torch.Tensor
    storage: Any
    address: int
    bytes: int
    version: int | None
    """None where torch keeps none (inference tensors)."""

    def unchanged(self) -> bool:
        return self.version is None or self.tensor._version == self.version

    def moved(self) -> bool:
        """It has other memory now (`p.data = new`): what was captured is as good as before."""
        return self.tensor.data_ptr() != self.address


class Attached:
    """The optimizers and modules of one checkpointer. They are not kept alive."""

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._frozen: list[weakref.ref[torch.nn.Module]] = []

    def add_optimizer(self, optimizer: Any) -> torch.optim.Optimizer | None:
        """Raises ArgumentError for what has no step that can be hooked. Returns torch's own
        optimizer; None if it is attached already."""
        inner = unwrap(optimizer)
        if not isinstance(inner, torch.optim.Optimizer) or not _wait_point.is_hooked(inner):
            raise ArgumentError(
                f"attach failed: {type(optimizer).__name__} does not step through "
                "torch.optim.Optimizer, so that nothing could make it wait; do not attach it: its "
                "state is then copied when save() is called"
            )
        if any(known() is inner for known in self._optimizers):
            return None
        self._optimizers.append(weakref.ref(inner))
        return inner

    def add_frozen(self, module: torch.nn.Module) -> None:
        if not any(known() is module for known in self._frozen):
            self._frozen.append(weakref.ref(module))

    def tensors(self) -> Iterator[torch.Tensor]:
        for reference in self._optimizers:
            if (optimizer := reference()) is not None:
                yield from optimizer_tensors(optimizer)
        for known in self._frozen:
            if (module := known()) is not None:
                yield from module.parameters()
                yield from module.buffers()

    def owned(self) -> list[Owned]:
        """All of it that lies densely in host memory of this process alone."""
        found = _core.owned_tensors(list(self.tensors()), SMALL, _is_dense)
        return [Owned(*item) for item in found]


class Ranges:
    """Which addresses belong to something."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """ranges: (address, bytes)"""
        self._bytes: dict[int, int] = {}
        for address, size in ranges:
            if size > self._bytes.get(address, 0):
                self._bytes[address] = size
        self._united: list[tuple[int, int]] | None = None

    def whole(self, address: int, size: int) -> bool:
        """Every byte does."""
        if self._bytes.get(address, -1) >= size:
            return True
        before = self._last_begin_until(address)
        return before is not None and address + size <= before[1]

    def meets(self, address: int, size: int) -> bool:
        """At least one byte does."""
        if size > 0 and address in self._bytes:
            return True
        before = self._last_begin_until(address + size - 1)
        return size > 0 and before is not None and address < before[1]

    def _last_begin_until(self, address: int) -> tuple[int, int] | None:
        if self._united is None:
            self._united = _unite(self._bytes)
        index = bisect.bisect_right(self._united, (address, 2**64)) - 1
        return self._united[index] if index >= 0 else None


def _unite(bytes_at: dict[int, int]) -> list[tuple[int, int]]:
    """Disjoint ranges (begin, end), in order."""
    ranges: list[tuple[int, int]] = []
    for begin, size in sorted(bytes_at.items()):
        if ranges and begin <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(begin + size, ranges[-1][1]))
        else:
            ranges.append((begin, begin + size))
    return ranges


def unwrap(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper that is an Optimizer itself (accelerate's, which never
    ran Optimizer.__init__; Lightning's). What else has an `optimizer` may do more than step it."""
    for _ in range(8):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(optimizer, torch.optim.Optimizer) or inner is optimizer:
            break
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Parameters and state."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from _tensors_in(state)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            if isinstance(item, torch.Tensor):
                yield item
            elif isinstance(item, dict | list | tuple):
                yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True
