# SPDX-License-Identifier: Apache-2.0
"""Fills tensors from an outline: straight into their memory where that is possible.

Needs torch. The tensors that share memory here are settled first, so that no memory is written
twice; the rest is read in as few passes as the memory for intermediate copies allows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fastpersist._errors import CorruptCheckpointError, Error, StorageError
from fastpersist._match import Fill, Plan
from fastpersist._outline import Outline
from fastpersist._tied import same_layout, span, which_differ

STAGED_BYTES = 256 << 20
"""Intermediate copies at a time, or one storage if that is larger."""

_AFTERWARDS = (
    "; existing tensors were overwritten in part: restore from another checkpoint before going on"
)


# --- Tensors here that share memory ---


def settle_shared(plan: Plan, outline: Outline, strict: bool = True) -> list[str]:
    """Leaves one fill for each memory. Names that others fill along; differences go to the plan.

    strict: no values are read and compared if the plan is going to be refused anyway.
    """
    firsts: dict[Any, Fill] = {}
    kept: list[Fill] = []
    shared: list[tuple[Fill, Fill]] = []
    for fill in plan.fills:
        key = None if fill.target is None else _memory(fill.target)
        first = fill if key is None else firsts.setdefault(key, fill)
        if first is fill:
            kept.append(fill)
        else:
            shared.append((first, fill))
    missing, left_out = [], []
    for name, value in plan.missing:
        # One of several names for one memory is enough: safetensors files hold no more.
        if isinstance(value, torch.Tensor) and _memory(value) in firsts:
            left_out.append(name)
        else:
            missing.append((name, value))
    plan.missing = missing
    plan.fills = kept
    refused = strict and bool(missing or plan.unexpected or plan.different)
    along = [] if refused or not shared else _fill_along(shared, plan, outline)
    _stage_overlaps(kept)
    return along + left_out


def _fill_along(shared: list[tuple[Fill, Fill]], plan: Plan, outline: Outline) -> list[str]:
    """Names of the second of each pair, where the file has the same values for both."""
    sources = [
        (a.source, b.source) for a, b in shared if a.source is not None and b.source is not None
    ]
    assert len(sources) == len(shared)
    differ = which_differ(sources, outline)
    for i in sorted(differ):
        why = f"the memory of '{shared[i][0].name}' here, but other values in the file"
        plan.different.append((shared[i][1].name, why))
    return [fill.name for i, (_, fill) in enumerate(shared) if i not in differ]


def _memory(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same view of the same memory; None without memory."""
    if tensor.layout != torch.strided or tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
        return None
    try:
        address = tensor.data_ptr() if tensor.numel() else 0
    except RuntimeError:  # subclasses without memory of their own
        return None
    if not address:
        return None
    bits = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, address, tensor.shape, tensor.stride(), tensor.dtype, bits)


def _stage_overlaps(fills: list[Fill]) -> None:
    """Tensors here that share part of their memory are filled one after another, by copying."""
    spans = []
    for fill in fills:
        if fill.target is not None and fill.target.numel() and not fill.target.is_meta:
            start = fill.target.data_ptr()
            device = "cpu" if fill.target.is_cpu else str(fill.target.device)
            spans.append((device, start, start + span(fill.target), fill))
    spans.sort(key=lambda one: one[:3])
    reach: tuple[str, int, Fill] | None = None
    for device, start, end, fill in spans:
        if reach is not None and reach[0] == device and start < reach[1]:
            fill.staged = reach[2].staged = True
        if reach is None or reach[0] != device or end > reach[1]:
            reach = (device, end, fill)


# --- Reading ---


def fill_all(plan: Plan, outline: Outline) -> int:
    """Fills everything; bytes of the tensors. Empties the plan's sources as it goes.

    Raises: as `load`; `partially_restored` says whether a tensor may have been changed.
    """
    filler = _Filler(outline)
    try:
        for group in _by_storage(plan.fills, outline):
            filler.add(group)
        filler.flush()
    except (CorruptCheckpointError, StorageError) as error:
        if filler.touched:
            raise _partial(error) from error
        raise
    return filler.bytes


def _by_storage(fills: list[Fill], outline: Outline) -> list[list[Fill]]:
    """Groups that must be read together, since a storage's checksum covers all of it."""
    if outline.loaded:
        return [[fill] for fill in fills]
    groups: dict[int, list[Fill]] = {}
    for fill in fills:
        assert fill.source is not None
        place = outline.locate(fill.source)
        groups.setdefault(-1 if place is None else place[0], []).append(fill)
    return [groups[storage] for storage in sorted(groups)]


def _piece(fill: Fill, outline: Outline, staged: bool) -> tuple[int, int, int, int] | None:
    """What is read for it; None for tensors without data."""
    source = fill.source
    assert source is not None
    if (place := outline.locate(source)) is None:
        return None
    memory = source if staged or fill.target is None else fill.target
    if memory is source:
        outline.allocate(source)
    return (*place, span(source), memory.data_ptr())


def _must_copy(fill: Fill) -> bool:
    source, target = fill.source, fill.target
    if target is None or source is None:
        return False
    return (
        fill.staged
        or not target.is_cpu
        or not same_layout(target, source)
        or _has_lazy_bits(target)
        or _has_lazy_bits(source)
    )


def _has_lazy_bits(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


@dataclasses.dataclass
class _Filler:
    """Collects fills until the memory for copies is used up, then has them read."""

    outline: Outline
    touched: bool = False  # whether memory of the caller may have changed
    bytes: int = 0
    _fills: list[Fill] = dataclasses.field(default_factory=list)
    _staged_bytes: int = 0

    def add(self, group: list[Fill]) -> None:
        for fill in group:
            assert fill.source is not None
            self.bytes += fill.source.numel() * fill.source.element_size()
            if _must_copy(fill):
                fill.staged = True
                self._staged_bytes += span(fill.source) if fill.source.numel() else 0
        self._fills.extend(group)
        if self._staged_bytes > STAGED_BYTES:
            self.flush()

    def flush(self) -> None:
        fills, self._fills, self._staged_bytes = self._fills, [], 0
        if not self.outline.loaded:
            self._read(fills)
        for fill in fills:
            if fill.target is None or fill.source is None:
                continue
            if fill.staged or self.outline.loaded:
                self.touched = True
                _copy(fill.target, fill.source)
            fill.source = None  # its memory goes back

    def _read(self, fills: list[Fill]) -> None:
        pieces: dict[tuple[int, int, int, int], None] = {}  # some may be wanted twice
        direct = False
        for fill in fills:
            if (piece := _piece(fill, self.outline, fill.staged)) is not None:
                pieces[piece] = None
                if fill.target is not None and not fill.staged:
                    direct = True
                    _count_change(fill.target)
        self.touched = self.touched or direct
        self.outline.read(list(pieces))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    context: Any = torch.inference_mode() if target.is_inference() else torch.no_grad()
    if target.is_meta or target.numel() == 0:
        return
    plain = not _has_lazy_bits(target) and not _has_lazy_bits(source)
    with context:
        if plain and target.is_contiguous() and source.is_contiguous():
            # As bytes: not every type can be copied as what it is.
            flat = (t.detach().reshape(-1).view(torch.uint8) for t in (target, source))
            next(flat).copy_(next(flat))
            _count_change(target)
        else:
            target.copy_(source)


def _count_change(tensor: torch.Tensor) -> None:
    """Autograd graphs that kept the old values must notice, as after any change in place."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _partial(error: Error) -> Error:
    if isinstance(error, StorageError):
        fields = (error.message + _AFTERWARDS, error.errno, error.filename, error.offset)
        return type(error)(*fields, error.operation, partially_restored=True)  # type: ignore[arg-type]
    assert isinstance(error, CorruptCheckpointError)
    return CorruptCheckpointError(
        str(error) + _AFTERWARDS, error.filename, error.tensor, error.offset,
        error.expected, error.found, partially_restored=True,
    )  # fmt: skip
