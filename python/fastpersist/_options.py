# SPDX-License-Identifier: Apache-2.0
"""How a save is carried out, and the environment variables that override it."""

from __future__ import annotations

import dataclasses
import os

from fastpersist import _core
from fastpersist._errors import ArgumentError

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


@dataclasses.dataclass(frozen=True)
class Options:
    """How a save is carried out. None means: chosen for the device.

    The environment variables `FASTPERSIST_ENGINE` and `FASTPERSIST_DIRECT` override the fields of
    the same name, for whoever runs somebody else's script. Raises `ArgumentError` (a `ValueError`)
    for values that cannot work.
    """

    engine: str = "auto"
    """"auto", or where to start in the order "uring", "libaio", "threads", "buffered"."""
    block_bytes: int | None = None
    """Bytes per write, a multiple of 4096. Default 4 MiB."""
    queue_depth: int | None = None
    """Transfers in flight, 1 to 256. Default 8; 2 when reading where the processor copies
    (loop devices, memory used as a disk, no direct I/O)."""
    staging_bytes: int | None = None
    """Page-locked staging memory. Default 64 MiB; when reading, one block more than are in
    flight. Kept between saves."""
    direct: bool = True
    """Bypass the page cache where the file system can."""
    sync: bool = True
    """Return only when the file and its name are on stable storage."""
    atomic: bool = True
    """Write beside the target and rename. False writes in place: a failure loses the old file."""
    retries: int = 1
    """New attempts, from the first byte, after a full disk or an I/O error."""

    def __post_init__(self) -> None:
        self._to_core(self.engine, self.direct)

    def _to_core(self, engine: str, direct: bool) -> _core.Options:
        for name in ("block_bytes", "queue_depth", "staging_bytes", "retries"):
            value = getattr(self, name)
            if value is None and name != "retries":
                continue
            if type(value) is not int or not 0 <= value < 2**63:
                raise ArgumentError(f"options failed: {name} {value!r} is not a suitable number")
        for name in ("direct", "sync", "atomic"):
            if type(getattr(self, name)) is not bool:  # "no" would count as True
                value = getattr(self, name)
                raise ArgumentError(f"options failed: {name} {value!r} is neither True nor False")
        if not isinstance(engine, str):
            raise ArgumentError(f"options failed: engine {engine!r} is not a string")
        try:
            return _core.options(
                engine,
                self.block_bytes,
                self.queue_depth,
                self.staging_bytes,
                direct,
                self.sync,
                self.atomic,
                self.retries,
            )
        except TypeError:
            raise ArgumentError(f"options failed: a number in {self} is too large") from None


def resolve(options: Options | None) -> _core.Options:
    """The options for the compiled core, environment applied."""
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise ArgumentError(f"options failed: {options!r} is not a fastpersist.Options")
    direct = options.direct
    if word := os.environ.get("FASTPERSIST_DIRECT", "").lower():
        if word not in _TRUE | _FALSE:
            raise ArgumentError(f"options failed: FASTPERSIST_DIRECT={word!r} is neither 0 nor 1")
        direct = word in _TRUE
    if not (engine := os.environ.get("FASTPERSIST_ENGINE")):
        return options._to_core(options.engine, direct)
    try:
        return options._to_core(engine, direct)
    except ArgumentError as error:
        raise ArgumentError(f"{error} (FASTPERSIST_ENGINE={engine!r})") from None
