# SPDX-License-Identifier: Apache-2.0
"""What we do not serve ourselves is written by torch.save, and published atomically all the same."""

from __future__ import annotations

import os
import time
import types
from typing import Any

import torch

from fastpersist import _capture, _core, _log
from fastpersist._info import SaveInfo


def reason(new_format: bool) -> str:
    """Why torch.save has to write; empty when we can."""
    if not new_format:
        return "the format from before torch 1.6 was asked for"
    if _capture.skips_data():
        return "torch.serialization.skip_data is active"
    return _capture.self_test()


def save(
    obj: Any,
    path: bytes | None,
    target: Any,
    torch_arguments: tuple[Any, int, bool, bool],
    options: _core.Options,
    why: str,
) -> SaveInfo:
    """torch.save(obj), to a temporary file that replaces path, or to the file object."""
    if problem := _capture.self_test():
        _log.warn_once(f"torch.save writes in our place: {problem}")
    start = time.perf_counter()
    if path is None:
        torch.save(obj, target, *torch_arguments)
        size = 0
    elif _capture.skips_data():
        torch.save(obj, os.fsdecode(path), *torch_arguments)  # seeks: needs a path
        size = os.path.getsize(path)
    else:
        size = _publish(obj, path, torch_arguments, options)
    total = time.perf_counter() - start
    return SaveInfo(
        path=None if path is None else os.fsdecode(path),
        bytes=size,
        seconds=types.MappingProxyType({"total": total, "stall": total}),
        engine="torch",
        engine_reason=why,
        direct=False,
    )


def _publish(
    obj: Any, path: bytes, torch_arguments: tuple[Any, int, bool, bool], options: _core.Options
) -> int:
    publication = _core.Publication(path, options)
    try:
        with os.fdopen(os.dup(publication.fileno()), "wb") as file:
            torch.save(obj, file, *torch_arguments)
            file.flush()
            size = file.tell()
        publication.publish(size)
    finally:
        publication.close()
    return size
