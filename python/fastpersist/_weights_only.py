# SPDX-License-Identifier: Apache-2.0
"""Says which entries of a file weights_only=True refuses, and how to allow them."""

from __future__ import annotations

import _compat_pickle
import os
from typing import Any

import torch

from fastpersist import _core
from fastpersist._errors import WeightsOnlyError

_MOST_SHOWN = 5


def explain(error: Exception, file: _core.File, path: bytes | None) -> WeightsOnlyError:
    """An error for `raise ... from error`."""
    entries = refused(file)
    where = "" if path is None else f" on {os.fsdecode(path)}"
    if not entries:
        return WeightsOnlyError(f"load failed{where}: weights_only=True refuses it: {error}", [])
    outer = _outermost(entries)
    shown = ", ".join(f"'{place}' ({what})" for place, what in outer[:_MOST_SHOWN])
    if len(outer) > _MOST_SHOWN:
        shown += f" and {len(outer) - _MOST_SHOWN} more"
    wanted = sorted({_importable(what) for _, what in entries})
    return WeightsOnlyError(
        f"load failed{where}: weights_only=True does not make {shown}; if you trust the file, "
        f"allow them with torch.serialization.add_safe_globals([{', '.join(wanted)}]), or load "
        "with weights_only=False, which may run any code that the file asks for",
        entries,
    )


def _outermost(entries: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without what lies within another one of them."""
    outer: list[tuple[str, str]] = []
    for place, what in entries:
        if not outer or not place.startswith(outer[-1][0] + "."):
            outer.append((place, what))
    return outer


def _importable(what: str) -> str:
    """How a program of today names "module name", which may be a name of Python 2."""
    module, _, name = what.partition(" ")
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    module = _compat_pickle.IMPORT_MAPPING.get(module, module)
    return name if module == "builtins" else f"{module}.{name}"


def refused(file: _core.File) -> list[tuple[str, str]]:
    """(place in the state, "module name") of what weights_only=True would not make."""
    allowed = _allowed()
    return [
        (place, what)
        for place, what, opaque in file.values()
        if opaque and what.replace(" ", ".") not in allowed
    ]


def _allowed() -> dict[str, Any]:
    """What torch makes anyway and what the user allowed; both are private to torch."""
    module = torch._weights_only_unpickler
    names: dict[str, Any] = {}
    for function in ("_get_allowed_globals", "_get_user_allowed_globals"):
        try:
            names.update(getattr(module, function)())
        except Exception:  # then more entries are listed than need be
            continue
    return names
