# SPDX-License-Identifier: Apache-2.0
"""What a checkpointer may read where it lies: memory that only an optimizer step changes.

Ownership is by byte range. A storage is read in place only if every byte of it belongs to the
parameters or the state of attached optimizers, or to weights that were declared unchanging.
"""

from __future__ import annotations

import bisect
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from fastpersist._errors import ArgumentError

SMALL = 16 << 10
"""Bytes. Shorter storages are copied at once: a witness for each would cost more."""


@dataclasses.dataclass(slots=True)
class Owned:
    """One tensor that is attached, as it was when the save began."""

    tensor: torch.Tensor
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

    def add_optimizer(self, optimizer: Any) -> torch.optim.Optimizer:
        """Raises ArgumentError for what has no step that can be hooked. Returns torch's own."""
        inner = unwrap(optimizer)
        if not isinstance(inner, torch.optim.Optimizer) or not _is_hooked(inner):
            raise ArgumentError(
                f"attach failed: {type(optimizer).__name__} does not step through "
                "torch.optim.Optimizer, so that nothing could make it wait; do not attach it: its "
                "state is then copied when save() is called"
            )
        if not any(known() is inner for known in self._optimizers):
            self._optimizers.append(weakref.ref(inner))
        return inner

    def add_frozen(self, module: torch.nn.Module) -> None:
        if not any(known() is module for known in self._frozen):
            self._frozen.append(weakref.ref(module))

    def __bool__(self) -> bool:
        return bool(self._optimizers or self._frozen)

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(known() is optimizer for known in self._optimizers)

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
        found = []
        for tensor in self.tensors():
            if tensor.device.type != "cpu" or not _is_dense(tensor):
                continue
            size = tensor.numel() * tensor.element_size()
            if size < SMALL:
                continue
            found.append(Owned(tensor, tensor.data_ptr(), size, _version(tensor)))
        return found


class Ranges:
    """Which addresses are owned. For the records of one save."""

    def __init__(self, owned: list[Owned]) -> None:
        self._at: dict[int, Owned] = {item.address: item for item in owned}
        self._sorted: list[tuple[int, int]] | None = None

    def whole(self, address: int, size: int) -> bool:
        """Every byte is owned."""
        one = self._at.get(address)
        if one is not None and one.bytes >= size:
            return True
        if self._sorted is None:
            self._sorted = _united(self._at.values())
        index = bisect.bisect_right(self._sorted, (address, 2**64)) - 1
        return index >= 0 and address + size <= self._sorted[index][1]


def _united(owned: Any) -> list[tuple[int, int]]:
    """Disjoint ranges (begin, end), in order."""
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted((item.address, item.address + item.bytes) for item in owned):
        if ranges and begin <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((begin, end))
    return ranges


def unwrap(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper (accelerate's never ran Optimizer.__init__)."""
    for _ in range(8):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or inner is optimizer:
            return optimizer
        optimizer = inner
    return optimizer


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """torch wraps the step of every optimizer that ran Optimizer.__init__."""
    return "_optimizer_step_pre_hooks" in vars(optimizer) and bool(
        getattr(type(optimizer).step, "hooked", False)
    )


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


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else int(tensor._version)
