# SPDX-License-Identifier: Apache-2.0
"""What a finished save reports: how much, by which engine and why, and where the time went."""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Mapping
from typing import Any

from fastpersist import _core


@dataclasses.dataclass(frozen=True, repr=False)
class SaveInfo:
    """One finished save. Frozen; `repr` is one readable line."""

    path: str | None
    """As given; None for a file object."""
    bytes: int
    """Size of the file."""
    seconds: Mapping[str, float] = dataclasses.field(hash=False)
    """Where the time went: capture (pickling), plan, fill (copy and checksums), write (submitting
    and waiting), sync, commit (rename and directory sync), stall (the caller's wait), total."""
    engine: str
    """"uring", "libaio", "threads", "buffered"; "torch" where torch.save wrote; "file object"."""
    engine_reason: str
    """Why that engine."""
    direct: bool
    """True when the page cache was bypassed to the end."""
    in_place_bytes: int = 0
    """Bytes that went to the device straight from tensor memory, without a copy."""
    referenced_bytes: int | None = None
    """Bytes of storages that tensors of the state refer to; `bytes` is larger when views drag whole
    storages along (`compact=True` leaves those out). None where it was not counted."""
    parts: int = 1
    """Number of files."""
    step: int | None = None
    """The training step; None for a single file."""
    warning: str = ""
    """Something to know once; mostly empty."""

    def __getstate__(self) -> dict[str, Any]:
        # Views of mappings cannot be pickled, and processes send what they saved to each other.
        return {**vars(self), "seconds": dict(self.seconds)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        seconds = types.MappingProxyType(state["seconds"])
        vars(self).update(state, seconds=seconds)

    def __repr__(self) -> str:
        total = self.seconds.get("total", 0.0)
        speed = f"{self.bytes / total / 1e9:.2f} GB/s" if total > 0 else "no time"
        how = f"{self.engine}, {'direct' if self.direct else 'buffered'}"
        return f"<SaveInfo {self.path}: {_size(self.bytes)} in {total:.3f} s, {speed}, {how}>"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def all_in_the_call(total: float, **parts: float) -> Mapping[str, float]:
    """The seconds of a save that did nothing in the background; parts not named took none."""
    names = ("capture", "plan", "fill", "write", "sync", "commit")
    return types.MappingProxyType(
        {**dict.fromkeys(names, 0.0), **parts, "stall": total, "total": total}
    )


def of_checkpoint(
    result: Mapping[str, Any], path: str, capture_seconds: float, stall_seconds: float
) -> SaveInfo:
    """A checkpoint that was written beside its caller. `total` runs from the call of `save` to the
    commit, `stall` is what training waited for in all, capture included."""
    parts = dict(result["seconds"])
    total = parts.pop("total") + capture_seconds
    seconds = {"capture": capture_seconds, **parts, "stall": stall_seconds, "total": total}
    return SaveInfo(
        path=path,
        bytes=result["bytes"],
        seconds=types.MappingProxyType(seconds),
        engine=result["engine"],
        engine_reason=result["engine_reason"],
        direct=result["direct"],
        in_place_bytes=result["in_place_bytes"],
        step=result["step"],
        warning=os.fsdecode(result["warning"]),
    )


def from_core(
    info: _core.SaveInfo, path: str, capture_seconds: float, referenced_bytes: int | None
) -> SaveInfo:
    """Completes what the compiled core reports with what Python knows."""
    parts = dict(info.seconds)
    total = parts.pop("total") + capture_seconds
    return SaveInfo(
        path=path,
        bytes=info.bytes,
        seconds=all_in_the_call(total, capture=capture_seconds, **parts),
        engine=info.engine,
        engine_reason=info.engine_reason,
        direct=info.direct,
        in_place_bytes=info.in_place_bytes,
        referenced_bytes=referenced_bytes,
    )
