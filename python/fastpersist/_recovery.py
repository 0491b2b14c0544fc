# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run goes on from: the newest one that is complete and whole.

The newest is the one with the highest commit sequence number; names, steps and times decide
nothing. Structure is looked at first, for all files of a checkpoint, which stay open from then on:
retention cannot pull them away. Checksums are compared in the pass that reads the data. Whatever is
skipped is logged with the reason, and nothing good among what is there is an error of its own.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fastpersist import _core, _load, _manifest
from fastpersist._errors import (
    CorruptCheckpointError,
    MismatchError,
    NotFoundError,
    StorageError,
    UnsupportedFileError,
)
from fastpersist._log import logger
from fastpersist._options import resolve

_T = TypeVar("_T")
STATE_FILE = "state.pt"
_RANK_PREFIX = "rank-"
RANK_FILE = f"{_RANK_PREFIX}00000.pt"
_CHECKPOINTS = ("complete", "damaged", "newer")
_LOST = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
"""The device cannot give it back. Any other failure may be over soon, and the newest checkpoint is
good: going on from an older one would lose steps in silence."""
_LISTINGS = 3
_LOOKS = 10
"""A checkpoint that was listed may be retired before it is open; nobody does so again and again."""


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
    parts: Mapping[str, _manifest.Part]
    metadata: str
    twin: str
    """Why it is not the newer one of two with one sequence number; empty: there is one only."""

    @property
    def state(self) -> _manifest.Part:
        if STATE_FILE not in self.parts:
            raise UnsupportedFileError(
                f"restore failed on {self.path}: it has no {STATE_FILE}, but "
                f"{', '.join(self.parts)}"
            )
        return self.parts[STATE_FILE]

    @property
    def own(self) -> _manifest.Part | None:
        """What was saved as per_rank."""
        found = [part for name, part in self.parts.items() if name.startswith(_RANK_PREFIX)]
        return found[0] if found else None


Look = Callable[[], list[Candidate]]


# --- What is there ---


def candidates(
    root: _core.Root, directory: Path, step: int | None, generation: str | None = None
) -> list[Candidate]:
    """Newest first; empty when nothing is there. Raises when something is there and none of it can
    be taken, and when a step or a generation was asked for that is not there.

    What is foreign, retired or not finished was never a checkpoint.
    """
    entries = [e for e in _listed(root, step, generation) if e["state"] in _CHECKPOINTS]
    if not entries:
        if step is None and generation is None:
            return []
        wanted = [] if generation is None else [generation]
        wanted += [] if step is None else [f"a checkpoint of step {step}"]
        raise not_found(directory, f"{' as '.join(wanted)} is not there")
    for entry in entries:
        if entry["state"] == "newer":
            raise UnsupportedFileError(
                f"restore failed on {directory / entry['name']}: {entry['reason']}"
            )
    complete = [entry for entry in entries if entry["state"] == "complete"]
    if not complete:
        raise _none_good(directory, [(e["name"], e["reason"]) for e in entries], False)
    for entry in entries:
        if entry["state"] != "complete":
            logger.warning("checkpoint %s is passed over: %s", entry["name"], entry["reason"])
    return _candidates(directory, complete)


def complete_ones(root: _core.Root, directory: Path) -> list[Candidate]:
    """Newest first, whatever else is there."""
    entries = _listed(root, None, None)
    return _candidates(directory, [e for e in entries if e["state"] == "complete"])


def check_order(candidate: Candidate, operation: str, partially: bool = False) -> None:
    """Raises when another one claims to be as new: whoever guesses may go back in time."""
    if candidate.twin:
        touched = "; tensors were overwritten in part" if partially else ""
        raise CorruptCheckpointError(
            f"{operation} failed on {candidate.path.parent}: {candidate.path.name}: "
            f"{candidate.twin}, with generation={touched}",
            str(candidate.path.parent),
            partially_restored=partially,
        )


def _listed(root: _core.Root, step: int | None, generation: str | None) -> list[dict[str, Any]]:
    """The catalog, only of what was asked for. Without anything complete it is listed again: while
    it was read the only one may have been replaced by one that it did not see yet."""
    entries: list[dict[str, Any]] = []
    for _ in range(_LISTINGS):
        entries = root.catalog()
        if generation is not None:
            entries = [entry for entry in entries if entry["name"] == generation]
        if step is not None:
            entries = [entry for entry in entries if entry["step"] == step]
        if any(entry["state"] == "complete" for entry in entries):
            break
    return entries


def _candidates(directory: Path, complete: list[dict[str, Any]]) -> list[Candidate]:
    numbers = [entry["sequence"] for entry in complete]
    return [
        Candidate(
            directory / entry["name"],
            entry["step"],
            {
                stream["name"]: _part(directory / entry["name"], stream)
                for stream in entry["streams"]
            },
            entry["metadata"] or "{}",
            entry["reason"] if numbers.count(entry["sequence"]) > 1 else "",
        )
        for entry in complete
    ]


def _part(directory: Path, stream: Mapping[str, Any]) -> _manifest.Part:
    files = tuple(directory / part["file"] for part in stream["parts"])
    crcs = tuple(stream["record_crcs"])
    return _manifest.Part(stream["name"], files, stream["size"], stream["crc"], crcs)


# --- Taking one ---


def restore_first(
    look: Look,
    targets: Any,
    per_rank: Any,
    strict: bool,
    map_location: Any,
    weights_only: bool | None,
) -> int | None:
    """Fills the targets from the first candidate that is whole; its step, or None without any."""
    from fastpersist._restore import Restoration

    def restore(candidate: Candidate) -> int:
        wanted = [(targets, candidate.state)]
        if per_rank is not None and (own := _own_part(candidate, strict)) is not None:
            wanted.append((per_rank, own))
        _manifest.compare([part for _, part in wanted])
        restorations = [
            Restoration(target, part.path, strict, map_location, weights_only)
            for target, part in wanted
        ]
        for later in restorations[1:]:  # the first is compared before it is filled
            later.check()
        for number, restoration in enumerate(restorations):
            try:
                restoration.fill()
            except (CorruptCheckpointError, StorageError) as error:
                error.partially_restored = error.partially_restored or number > 0
                raise
        logger.info("restored step %d from %s", candidate.step, candidate.path)
        return candidate.step

    return _first_whole(look, restore)


def load_first(look: Look, map_location: Any, weights_only: bool | None) -> Saved | None:
    """Loads the first candidate that is whole; None without any."""

    def load(candidate: Candidate) -> Saved:
        parts = [candidate.state]
        if candidate.own is not None:
            parts.append(candidate.own)
        _manifest.compare(parts)
        files = [(part.path, _core.open(os.fsencode(part.path))) for part in parts]
        made = [_load_opened(path, file, map_location, weights_only) for path, file in files]
        return Saved(
            state=made[0],
            per_rank=made[1] if made[1:] else None,
            step=candidate.step,
            metadata=json.loads(candidate.metadata),
            path=candidate.path,
        )

    return _first_whole(look, load)


def _load_opened(path: Path, file: _core.File, map_location: Any, weights_only: bool | None) -> Any:
    """As `load`, of a file that may have no name any more."""
    if file.kind != "torch":
        raise UnsupportedFileError(f"load failed on {path}: it is a {file.kind} file")
    name = os.fsencode(path)
    mmap = _load._mmap_is_default()
    try:
        return _load._load_torch(
            name, name, file, map_location, None, weights_only, mmap, resolve(None), {}
        )
    except FileNotFoundError as error:  # torch reads in our place, or maps it
        if isinstance(error, StorageError):
            raise
        raise not_found(path, "it was removed while it was loaded", "load") from error


def _own_part(candidate: Candidate, strict: bool) -> _manifest.Part | None:
    if candidate.own is None and strict:
        raise MismatchError(
            f"restore failed on {candidate.path}: it holds nothing that was saved as per_rank; "
            "nothing was touched",
            missing=["per_rank"],
        )
    return candidate.own


def _first_whole(look: Look, take: Callable[[Candidate], _T]) -> _T | None:
    """What take makes of the first that is not damaged; None when nothing is there."""
    skipped: list[tuple[Candidate, str]] = []
    partially = False
    last: CorruptCheckpointError | StorageError | None = None
    for _ in range(_LOOKS):
        found = look()
        if not found and last is None:
            return None
        gone = False
        known = [candidate for candidate, _ in skipped]
        for candidate in [one for one in found if one not in known]:
            check_order(candidate, "restore", partially)
            try:
                return _take(candidate, take)
            except MismatchError as error:
                if partially:
                    raise _after_damage(error) from error
                raise
            except (CorruptCheckpointError, StorageError) as error:
                error.partially_restored = partially = partially or error.partially_restored
                last = error
                gone = _is_gone(error)
                if not gone and not _is_damage(error):
                    raise
            if gone:
                break
            skipped.append((candidate, str(last)))
            if candidate is not found[-1]:
                logger.warning("checkpoint %s is passed over: %s", candidate.path.name, last)
        if not gone:
            break
    assert last is not None
    if not skipped or gone:
        raise last
    reasons = [(candidate.path.name, reason) for candidate, reason in skipped]
    raise _none_good(skipped[0][0].path.parent, reasons, partially) from last


def _take(candidate: Candidate, take: Callable[[Candidate], _T]) -> _T:
    try:
        return take(candidate)
    except UnsupportedFileError as error:
        # Damage can look like a file of another kind.
        if all(_manifest.is_as_written(part) for part in candidate.parts.values()):
            raise
        raise CorruptCheckpointError(str(error), str(candidate.path)) from error


def _after_damage(error: MismatchError) -> MismatchError:
    return MismatchError(
        f"{error} (of this checkpoint; but tensors were overwritten in part from a newer one, "
        "which is damaged)",
        error.missing,
        error.unexpected,
        error.different,
    )


def _is_gone(error: Exception) -> bool:
    """It was retired meanwhile, so that there may be a newer one."""
    stale = isinstance(error, StorageError) and error.errno == errno.ESTALE
    return stale or isinstance(error, NotFoundError)


def _is_damage(error: Exception) -> bool:
    return isinstance(error, CorruptCheckpointError) or (
        isinstance(error, StorageError) and error.errno in _LOST
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
