# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run goes on from: the newest one that is complete and whole.

The newest is the one with the highest commit sequence number; names, steps and times decide
nothing. Structure is looked at first, checksums in the pass that reads the data. Whatever is
skipped is logged with the reason, and nothing good among what is there is an error of its own.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fastpersist import _core, _load
from fastpersist._errors import (
    CorruptCheckpointError,
    Error,
    MismatchError,
    NotFoundError,
    StorageError,
    UnsupportedFileError,
)
from fastpersist._log import logger

_T = TypeVar("_T")
STATE_FILE = "state.pt"
_RANK_PREFIX = "rank-"
RANK_FILE = f"{_RANK_PREFIX}00000.pt"
_CHECKPOINTS = ("complete", "damaged", "newer")


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint, loaded as new objects."""

    state: Any
    per_rank: Any
    """What was saved as per_rank, or None."""
    step: int
    metadata: Mapping[str, Any]
    path: Path
    """Its directory."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A checkpoint that is complete as far as its structure tells."""

    path: Path
    step: int
    streams: Mapping[str, tuple[int, int]]
    """From the names of its files to their sizes and CRC-32."""
    metadata: str

    @property
    def state_path(self) -> Path:
        return self.path / STATE_FILE

    @property
    def rank_path(self) -> Path | None:
        found = [name for name in self.streams if name.startswith(_RANK_PREFIX)]
        return self.path / found[0] if found else None


def candidates(
    root: _core.Root, directory: Path, step: int | None, generation: str | None = None
) -> list[Candidate]:
    """Newest first; empty when nothing is there. Raises when something is there and none of it can
    be taken, and when a step was asked for that is not there.

    What is foreign, retired or not finished was never a checkpoint.
    """
    entries = [entry for entry in root.catalog() if entry["state"] in _CHECKPOINTS]
    if generation is not None:
        entries = [entry for entry in entries if entry["name"] == generation]
    if step is not None:
        entries = [entry for entry in entries if entry["step"] == step]
    if not entries:
        if step is None and generation is None:
            return []
        wanted = generation or f"a checkpoint of step {step}"
        raise not_found(directory, f"{wanted} is not there")
    for entry in entries:
        if entry["state"] == "newer":
            raise UnsupportedFileError(
                f"restore failed on {directory / entry['name']}: {entry['reason']}"
            )
    complete = [entry for entry in entries if entry["state"] == "complete"]
    if not complete:
        raise _none_good(directory, [(e["name"], e["reason"]) for e in entries], False)
    if complete[0]["reason"] and generation is None:
        raise CorruptCheckpointError(
            f"restore failed on {directory}: {complete[0]['name']}: {complete[0]['reason']}; "
            "choose with generation=",
            str(directory),
        )
    for entry in entries:
        if entry["state"] != "complete":
            logger.warning("checkpoint %s is passed over: %s", entry["name"], entry["reason"])
    return [_candidate(directory, entry) for entry in complete]


def restore_first(
    found: list[Candidate],
    targets: Any,
    per_rank: Any,
    strict: bool,
    map_location: Any,
    weights_only: bool | None,
) -> int:
    """Fills the targets from the first candidate that is whole; its step."""
    from fastpersist._restore import restore_into

    def restore(candidate: Candidate) -> int:
        own = _rank_part(candidate, per_rank, strict, weights_only)
        parts = [(targets, candidate.state_path)]
        if own is not None:
            parts.append((per_rank, own))
        for part, path in parts:
            restore_into(
                part,
                path,
                strict=strict,
                map_location=map_location,
                weights_only=weights_only,
            )
        logger.info("restored step %d from %s", candidate.step, candidate.path)
        return candidate.step

    return _first_whole(found, restore)


def load_first(found: list[Candidate], map_location: Any, weights_only: bool | None) -> Saved:
    """Loads the first candidate that is whole."""

    def load(candidate: Candidate) -> Saved:
        own = candidate.rank_path
        return Saved(
            state=_load.load(candidate.state_path, map_location, weights_only=weights_only),
            per_rank=None
            if own is None
            else _load.load(own, map_location, weights_only=weights_only),
            step=candidate.step,
            metadata=json.loads(candidate.metadata),
            path=candidate.path,
        )

    return _first_whole(found, load)


def _first_whole(found: list[Candidate], take: Callable[[Candidate], _T]) -> _T:
    skipped: list[tuple[str, str]] = []
    partially = False
    for candidate in found:
        try:
            return take(candidate)
        except (CorruptCheckpointError, StorageError) as error:
            partially = partially or error.partially_restored
            last: Error = error
        except UnsupportedFileError as error:
            # Damage can look like a file of another kind.
            if _is_as_written(candidate):
                raise
            last = error
        skipped.append((candidate.path.name, str(last)))
        if candidate is not found[-1]:
            logger.warning("checkpoint %s is passed over: %s", candidate.path.name, last)
    raise _none_good(found[0].path.parent, skipped, partially) from last


def _is_as_written(candidate: Candidate) -> bool:
    """All bytes of all files are what the manifest says."""
    for name, (size, expected) in candidate.streams.items():
        crc, read = 0, 0
        with (candidate.path / name).open("rb") as file:
            while block := file.read(1 << 20):
                crc, read = zlib.crc32(block, crc), read + len(block)
        if (read, crc) != (size, expected):
            return False
    return True


def _rank_part(
    candidate: Candidate, per_rank: Any, strict: bool, weights_only: bool | None
) -> Path | None:
    """The file with this process's own state: read and compared before anything is filled."""
    if per_rank is None:
        return None
    path = candidate.rank_path
    if path is None:
        if not strict:
            return None
        raise MismatchError(
            f"restore failed on {candidate.path}: it holds nothing that was saved as per_rank; "
            "nothing was touched",
            missing=["per_rank"],
        )
    saved = _load.load(path, weights_only=weights_only)
    if not isinstance(saved, Mapping):
        raise MismatchError(
            f"restore failed on {path}: a {type(saved).__name__} was saved as per_rank, not a dict "
            "with the names of the targets; nothing was touched. load() gives it out",
            different=[("per_rank", f"dict here, {type(saved).__name__} in the file")],
        )
    names = set(saved)
    if strict and names != set(per_rank):
        raise MismatchError(
            f"restore failed on {path}: per_rank has {sorted(map(str, per_rank))}, the file "
            f"{sorted(map(str, names))}; nothing was touched. strict=False fills what fits",
            missing=[str(name) for name in per_rank if name not in names],
            unexpected=[str(name) for name in names if name not in per_rank],
        )
    return path


def _candidate(directory: Path, entry: Mapping[str, Any]) -> Candidate:
    return Candidate(
        directory / entry["name"],
        entry["step"],
        {stream["name"]: (stream["size"], stream["crc"]) for stream in entry["streams"]},
        entry["metadata"] or "{}",
    )


def not_found(directory: Path, what: str, operation: str = "restore") -> NotFoundError:
    """what: a sentence, with what to do about it."""
    message = f"{operation} failed on {directory}: {what}"
    return NotFoundError(message, errno.ENOENT, str(directory), None, operation)


def _none_good(
    directory: Path, skipped: list[tuple[str, str]], partially: bool
) -> CorruptCheckpointError:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped)
    touched = "; tensors were overwritten in part" if partially else ""
    return CorruptCheckpointError(
        f"restore failed on {directory}: none of the checkpoints there is good{touched}: {reasons}",
        str(directory),
        partially_restored=partially,
    )
