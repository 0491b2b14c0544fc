# SPDX-License-Identifier: Apache-2.0
"""`load_into`: fills the tensors of a state in place, after the whole structure was compared."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastpersist._errors import ArgumentError, MismatchError
from fastpersist._options import Options

if TYPE_CHECKING:
    from fastpersist._match import Plan, Restore
    from fastpersist._outline import Outline

_MOST_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What `load_into` did. Names are keys and indices joined by dots."""

    filled: tuple[str, ...]
    """Tensors that have the file's values; those that an object was given anew are among them."""
    missing: tuple[str, ...]
    """In the state and not in the file: as they were."""
    unexpected: tuple[str, ...]
    """In the file and not in the state: not used. Containers that stand in themselves, or over and
    over again, are named as one from some place on."""
    different: tuple[tuple[str, str], ...]
    """In both, but of another type, shape or kind, and how they differ: as they were."""
    values_set: int
    """Numbers, strings and the like that were taken from the file."""
    bytes: int
    """Of the tensors that were filled."""

    def __repr__(self) -> str:
        parts = [f"{len(self.filled)} tensor{'s' * (len(self.filled) != 1)} filled"]
        parts.append(f"{self.bytes / 1e6:.1f} MB")
        parts.append(f"{self.values_set} value{'s' * (self.values_set != 1)} set")
        for name in ("missing", "unexpected", "different"):
            if found := getattr(self, name):
                parts.append(f"{len(found)} {name}")
        return f"LoadReport({', '.join(parts)})"


def load_into(
    state: Any,
    f: Any,
    *,
    strict: bool = True,
    weights_only: bool | None = None,
    options: Options | None = None,
) -> LoadReport:
    """Fills existing tensors from a PyTorch or safetensors file, without a second copy of them.

    Structure first: names, shapes and types of everything are compared before the first byte is
    read. Every checksum of what is read is compared in the pass that reads it.

    Args:
        state: nested dicts, lists and tuples of tensors and plain values. A module, optimizer,
            scheduler or any other object with `state_dict` and `load_state_dict` may stand at any
            place, or be the state: its tensors are filled, and what it does not have yet (a fresh
            optimizer has no moments) is read and given to its load_state_dict with the rest.
        f: path, or a readable file object with `seek` and `tell`, which is read as a whole first.
        strict: True raises MismatchError if anything is missing, unexpected or different; False
            fills what fits and reports the rest.
        weights_only: as in `load`. Files with objects other than tensors, plain containers and
            plain values are read as a whole first.
        options: how the data is read.

    Tensors on the CPU that are contiguous here and in the file are read into directly. Others (on
    devices, strided, overlapping) go through a copy, 256 MiB at a time or one storage. Types are
    never converted. Plain values in dicts and lists are replaced once all tensors are good.
    Tensors that are one memory here and two in the file have to be equal there: the two are
    compared before anything is overwritten, 256 MiB at a time.

    Returns: a `LoadReport`.

    Modules with hooks of their own for load_state_dict judge what fits themselves, and late.

    Raises: `MismatchError`, with nothing touched unless such a module raised; what `load` raises.
        CorruptCheckpointError and StorageError have `partially_restored`: True if tensors were
        already overwritten in part.

    Not thread-safe with regard to `state`. The GIL is free while bytes move. Needs torch.
    """
    from fastpersist import _outline

    _check_state(state)
    return fill_from(_outline.outline(f, weights_only, options), state, f, strict, "load_into")


def fill_from(sketch: Outline, state: Any, f: Any, strict: bool, operation: str) -> LoadReport:
    """`load_into` from an outline, whose object is given up.

    Args: as of `load_into`; f and operation are for messages.
    """
    from fastpersist import _fill, _match

    plan = _match.match(state, sketch.object)
    sketch.object = None  # what is not needed goes back as it is used
    along = _fill.settle_shared(plan, sketch, strict)
    if strict:
        _refuse(plan, f, operation)
    names = [fill.name for fill in plan.fills]
    done = _fill.fill_all(plan, sketch)
    judged = [_restore(restore, strict, operation) for restore in plan.restores]
    missing = [name for name, _ in plan.missing] + [name for lack, _ in judged for name in lack]
    unused = {name: None for _, excess in judged for name in excess}
    for container, key, value in plan.values:
        _set(container, key, value)
    return LoadReport(
        filled=tuple(name for name in names + along if name not in unused),
        missing=tuple(missing),
        unexpected=(*plan.unexpected, *unused),
        different=tuple(plan.different),
        values_set=len(plan.values) + plan.given_values,
        bytes=done,
    )


def _check_state(state: Any) -> None:
    import torch

    from fastpersist import _match

    if isinstance(state, Mapping | list | tuple | torch.Tensor) or _match.is_stateful(state):
        return
    raise ArgumentError(
        f"load_into failed: {type(state).__name__} is no state; pass a dict, list or tuple of "
        "tensors, or an object with state_dict and load_state_dict"
    )


def _restore(restore: Restore, strict: bool, operation: str) -> tuple[list[str], list[str]]:
    """What a module that judges itself found missing and unexpected."""
    if not restore.needed:
        return [], []
    if not restore.is_module:
        restore.owner.load_state_dict(restore.state)
        return [], []
    if not restore.judges:
        restore.owner.load_state_dict(restore.state, strict=strict)
        return [], []
    try:
        result = restore.owner.load_state_dict(restore.state, strict=strict)
    except RuntimeError as error:
        where = f"'{restore.name}', a {type(restore.owner).__name__}," if restore.name else "it"
        raise MismatchError(
            f"{operation} failed: {where} did not take the file's state, and tensors may have been "
            f"overwritten: {error}",
            different=[(restore.name or "the whole state", str(error))],
        ) from error
    prefix = f"{restore.name}." if restore.name else ""
    return (
        [prefix + name for name in getattr(result, "missing_keys", ())],
        [prefix + name for name in getattr(result, "unexpected_keys", ())],
    )


def _set(container: Any, key: Any, value: Any) -> None:
    if key is None:
        container[:] = value
    else:
        container[key] = value


def _refuse(plan: Plan, f: Any, operation: str) -> None:
    """Raises if anything does not fit."""
    missing = [name for name, _ in plan.missing]
    if not missing and not plan.unexpected and not plan.different:
        return
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing in the file ({_some(missing)})")
    if plan.unexpected:
        parts.append(f"{len(plan.unexpected)} only in the file ({_some(plan.unexpected)})")
    if plan.different:
        shown = [f"{name}: {why}" for name, why in plan.different]
        parts.append(f"{len(shown)} different ({_some(shown, '; ')})")
    raise MismatchError(
        f"{operation} failed on {describe(f)}: {', '.join(parts)}; nothing was touched. "
        "strict=False fills what fits; an optimizer itself, in place of its state_dict(), takes "
        "what it does not have yet",
        missing,
        plan.unexpected,
        plan.different,
    )


def describe(f: Any) -> str:
    """A path or file object, for messages."""
    is_path = isinstance(f, str | bytes | os.PathLike)
    return f"'{os.fsdecode(f)}'" if is_path else f"a {type(f).__name__}"


def _some(names: list[str], separator: str = ", ") -> str:
    shown = separator.join(names[:_MOST_SHOWN])
    return shown + (f"{separator}..." if len(names) > _MOST_SHOWN else "")
