# SPDX-License-Identifier: Apache-2.0
"""Compares tensors of a file that are to fill the same memory, a bounded part of them at a time.

Nothing of the caller's is written, and the memory for what is read goes back. Called between the
comparison of the structure and the filling. Needs torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

from fastpersist._outline import Outline

COMPARED_BYTES = 256 << 20
"""In memory at a time; more only for a pair that lies in different orders in the file."""

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(slots=True)
class _Part:
    """As many bytes of both tensors of a pair."""

    number: int  # of the pair
    places: tuple[tuple[int, int], tuple[int, int]]
    length: int


def which_differ(pairs: list[Pair], outline: Outline) -> set[int]:
    """Numbers of the pairs whose values are not the same bits. Types and shapes have to agree.

    Raises: as `load`, if the file is damaged where two differ.
    """
    if outline.loaded:
        return {i for i, (a, b) in enumerate(pairs) if not torch.equal(_bytes(a), _bytes(b))}
    differ: set[int] = set()
    parts: list[_Part] = []
    for i, (a, b) in enumerate(pairs):
        if a is b or _view(a, outline) == _view(b, outline):
            continue
        if same_layout(a, b) and _lazy_bits(a) == _lazy_bits(b):
            parts += _split(i, a, b, outline)
        elif not _are_equal(a, b, outline):
            differ.add(i)
    batch: list[_Part] = []
    size = 0
    for part in parts:
        if batch and size + 2 * part.length > COMPARED_BYTES:
            differ |= _compare(batch, outline)
            batch, size = [], 0
        batch.append(part)
        size += 2 * part.length
    if batch:
        differ |= _compare(batch, outline)
    if differ:
        _verify([tensor for i in sorted(differ) for tensor in pairs[i]], outline)
    return differ


def _view(tensor: torch.Tensor, outline: Outline) -> Any:
    """Equal for tensors that are the same view of the same bytes in the file."""
    return (outline.locate(tensor), tensor.stride(), _lazy_bits(tensor))


def _lazy_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()


def _split(number: int, a: torch.Tensor, b: torch.Tensor, outline: Outline) -> list[_Part]:
    """Parts of which one fits in the memory."""
    first, second = outline.locate(a), outline.locate(b)
    assert first is not None and second is not None  # the memory here is not empty
    size, step = span(a), max(COMPARED_BYTES // 2, 1 << 12)
    return [
        _Part(
            number,
            ((first[0], first[1] + start), (second[0], second[1] + start)),
            min(step, size - start),
        )
        for start in range(0, size, step)
    ]


def _compare(parts: list[_Part], outline: Outline) -> set[int]:
    sizes = [part.length for part in parts for _ in part.places]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
    ends = itertools.accumulate(sizes)
    chunks = [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    halves = list(zip(chunks[::2], chunks[1::2], strict=True))
    pieces = [
        (*place, part.length, half.data_ptr())
        for part, both in zip(parts, halves, strict=True)
        for place, half in zip(part.places, both, strict=True)
    ]
    _read(outline, pieces)
    return {part.number for part, both in zip(parts, halves, strict=True) if not torch.equal(*both)}


def _are_equal(a: torch.Tensor, b: torch.Tensor, outline: Outline) -> bool:
    """By element, of two that lie in different orders."""
    copies, pieces = [], []
    for tensor in (a, b):
        place = outline.locate(tensor)
        assert place is not None
        memory = torch.empty(span(tensor), dtype=torch.uint8, device="cpu")
        pieces.append((*place, span(tensor), memory.data_ptr()))
        view: Any = torch.empty(0, dtype=tensor.dtype, device="cpu")
        view.set_(memory.untyped_storage(), 0, tensor.shape, tensor.stride())
        view = view.conj() if tensor.is_conj() else view
        copies.append(torch._neg_view(view) if tensor.is_neg() else view)
    _read(outline, pieces)
    return torch.equal(_bytes(copies[0]), _bytes(copies[1]))


def _read(outline: Outline, pieces: list[tuple[int, int, int, int]]) -> None:
    """Without checksums, which would have whole storages read for each part.

    Those that are filled from are compared when that happens. Where both are the same, it does not
    matter which is the damaged one; where they are not, `_verify` tells.
    """
    assert outline.file is not None
    outline.file.read_pieces(pieces, False, outline.options)


def _verify(tensors: list[torch.Tensor], outline: Outline) -> None:
    """Has the checksums of the storages compared that these tensors lie in."""
    memory = torch.empty(1, dtype=torch.uint8, device="cpu")
    for storage in sorted({place[0] for t in tensors if (place := outline.locate(t))}):
        outline.read([(storage, 0, 1, memory.data_ptr())])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements, in order of the elements."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


# --- How a tensor lies in its memory ---


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
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


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element. Precondition: not empty."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size()
