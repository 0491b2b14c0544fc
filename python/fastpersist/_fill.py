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

STAGED_BYTES = 256 << 20
"""Intermediate copies at a time, or one storage if that is larger."""

_AFTERWARDS = (
    "; existing tensors were overwritten in part: restore from another checkpoint before going on"
)


# --- Tensors here that share memory ---


def settle_shared(plan: Plan, outline: Outline) -> list[str]:
    """Leaves one fill for each memory. Names that others fill along; differences go to the plan."""
    firsts: dict[Any, Fill] = {}
    kept: list[Fill] = []
    along: list[str] = []
    for fill in plan.fills:
        key = None if fill.target is None else _memory(fill.target)
        first = fill if key is None else firsts.setdefault(key, fill)
        if first is fill:
            kept.append(fill)
        elif _same_in_file(first, fill, outline):
            along.append(fill.name)
        else:
            why = f"the memory of '{first.name}' here, but other values in the file"
            plan.different.append((fill.name, why))
    missing = []
    for name, value in plan.missing:
        # One of several names for one memory is enough: safetensors files hold no more.
        if isinstance(value, torch.Tensor) and _memory(value) in firsts:
            along.append(name)
        else:
            missing.append((name, value))
    plan.missing = missing
    plan.fills = kept
    _stage_overlaps(kept)
    return along


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


def _same_in_file(a: Fill, b: Fill, outline: Outline) -> bool:
    assert a.source is not None and b.source is not None
    if a.source is b.source:
        return True
    if not outline.loaded:
        views = [
            (outline.locate(tensor), tensor.stride(), tensor.is_conj(), tensor.is_neg())
            for tensor in (a.source, b.source)
        ]
        if views[0] == views[1]:
            return True
        outline.read([piece for fill in (a, b) if (piece := _piece(fill, outline, True))])
    return torch.equal(_bytes(a.source), _bytes(b.source))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _stage_overlaps(fills: list[Fill]) -> None:
    """Tensors here that share part of their memory are filled one after another, by copying."""
    spans = []
    for fill in fills:
        if fill.target is not None and fill.target.numel() and not fill.target.is_meta:
            start = fill.target.data_ptr()
            spans.append((str(fill.target.device), start, start + _span(fill.target), fill))
    spans.sort(key=lambda span: span[:3])
    reach: tuple[str, int, Fill] | None = None
    for device, start, end, fill in spans:
        if reach is not None and reach[0] == device and start < reach[1]:
            fill.staged = reach[2].staged = True
        if reach is None or reach[0] != device or end > reach[1]:
            reach = (device, end, fill)


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element. Precondition: not empty."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size()


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
    return (*place, _span(source), memory.data_ptr())


def _must_copy(fill: Fill) -> bool:
    source, target = fill.source, fill.target
    if target is None or source is None:
        return False
    return (
        fill.staged
        or target.device.type != "cpu"
        or not _same_layout(target, source)
        or _has_lazy_bits(target)
        or _has_lazy_bits(source)
    )


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are runs of bytes in the same order (two channels_last tensors, say)."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    return a.stride() == b.stride() and _is_dense(a)


def _is_dense(tensor: torch.Tensor) -> bool:
    run = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step != run:
            return False
        run *= size
    return True


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
                self._staged_bytes += _span(fill.source) if fill.source.numel() else 0
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
