# SPDX-License-Identifier: Apache-2.0
"""Makes a torch tensor of some rows of a stored tensor. Needs torch."""

from __future__ import annotations

from typing import Any

import torch

from fastpersist import _core
from fastpersist._errors import ArgumentError, UnsupportedFileError
from fastpersist._open import Piece, span


def torch_tensor(
    entry: _core.StoredTensor, rows: range, rest: tuple[Any, ...], piece: Piece
) -> torch.Tensor:
    """The tensor indexed with rest, after only these rows of its first dimension were kept."""
    name, dtype, shape, strides, storage, offset, _, _, conjugate, negative = entry
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise UnsupportedFileError(
            f"read failed: tensor '{name}' has type {dtype}, which torch {torch.__version__} lacks"
        )
    if dtype.startswith(("quint", "qint")):
        raise UnsupportedFileError(
            f"read failed: tensor '{name}' is quantized and cannot be read alone; use load"
        )
    if any(isinstance(item, slice) and (item.step or 1) < 0 for item in rest):
        raise ArgumentError("read failed: torch knows no negative steps")
    if shape:
        offset += rows.start * strides[0] * kind.itemsize
        shape = (len(rows), *shape[1:])
    if storage is None:
        made = torch.empty_strided(shape, strides, dtype=kind, device="meta")
        return made[rest].contiguous() if rest else made
    # A factory function would follow a default device.
    data = torch.empty(span(shape, strides), dtype=kind, device="cpu")
    size = data.numel() * data.element_size()
    piece.read(storage, offset, size, data.data_ptr())
    if piece.must_swap():
        data.untyped_storage().byteswap(kind)  # type: ignore[no-untyped-call]
    made = torch.as_strided(data, shape, strides)
    if rest:
        made = made[rest]
    if conjugate:
        made = made.conj_physical()
    if negative:
        made = made.neg()
    made = made.contiguous()
    whole = made.untyped_storage().nbytes() == made.numel() * made.element_size()
    return made if whole else made.clone()
