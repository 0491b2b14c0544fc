# SPDX-License-Identifier: Apache-2.0
"""From a Python object to the records of a PyTorch file, without copying storages.

The pickle is torch's own. `torch.serialization._save` writes into a recorder in place of a file; it is
private, so a self-test compares a small file byte for byte with what `torch.save` makes, once per
process. A faster pickler (`_fast_pickle`) takes over where it makes the same bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
from typing import Any

import torch

from fastpersist import _core, _fast_pickle
from fastpersist._log import logger

Record = tuple[str, bytes | tuple[int, int]]
"""A name without the archive prefix, and the body: bytes, or address and size of a storage."""

SELF_TEST_ALIGNMENT = 64


@dataclasses.dataclass
class Capture:
    """The records of one file, in torch's order."""

    records: list[Record]
    alignment: int
    keep: list[Any]
    """Strong references to every storage: held until the last byte is written."""
    referenced_bytes: int | None


class Recorder:
    """Stands in for torch's file writer; `_save` calls `write_record` once per record."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.keep: list[Any] = []

    def write_record(self, name: str, data: Any, size: int) -> None:
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes):
            self.records.append((name, data[:size]))
        elif isinstance(data, int):  # an address; torch keeps its owner alive until _save returns
            raise TypeError("torch hands out bare addresses")
        else:
            self.keep.append(data)
            self.records.append((name, (data.data_ptr() if size else 0, size)))


def alignment() -> int:
    """torch's `config.save.storage_alignment`; 64 before torch 2.7, which has no such setting."""
    get = getattr(torch.serialization, "_get_storage_alignment", None)
    return SELF_TEST_ALIGNMENT if get is None else int(get())


def skips_data() -> bool:
    """True inside `torch.serialization.skip_data()`."""
    tls = getattr(torch.serialization, "_serialization_tls", None)
    return bool(getattr(tls, "skip_data", False))


def capture(
    obj: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    disable_byteorder: bool = False,
    compact: bool = False,
) -> Capture:
    """Pickles obj and lists its storages. Raises what pickling raises; touches no file.

    Precondition: `self_test()`.
    """
    if pickle_module is pickle and pickle_protocol == 2 and _fast_path_works():
        fast = _fast_pickle.dump(obj, compact)
        if fast is not None:
            records: list[Record] = [("data.pkl", fast.pickle)]
            records += [r for r in _fixed_records(alignment()) if _wanted(r, disable_byteorder)]
            records += fast.storage_records()
            return Capture(records, alignment(), fast.keep, fast.referenced_bytes())
    if compact:
        raise ValueError("compact=True takes plain CPU tensors only (no subclasses, no quantized ones)")
    return _record(obj, pickle_module, pickle_protocol, disable_byteorder)


def _wanted(record: Record, disable_byteorder: bool) -> bool:
    return not (disable_byteorder and record[0] == "byteorder")


def _record(
    obj: Any, pickle_module: Any = pickle, pickle_protocol: int = 2, disable_byteorder: bool = False
) -> Capture:
    recorder = Recorder()
    torch.serialization._save(obj, recorder, pickle_module, pickle_protocol, disable_byteorder)
    return Capture(recorder.records, alignment(), recorder.keep, None)


@functools.lru_cache(maxsize=4)
def _fixed_records(alignment_now: int) -> tuple[Record, ...]:
    """The records that the installed torch puts between the pickle and the storages."""
    del alignment_now  # only the key of the cache: one of the records holds it
    return tuple(r for r in _record(None).records if r[0] != "data.pkl")


def _small_state() -> dict[str, Any]:
    """What the self-tests save: a little of everything that checkpoints mostly hold."""
    base = torch.arange(12, dtype=torch.float32)
    shared = "shared name"
    return {
        "model": {
            "w": torch.nn.Parameter(base.reshape(3, 4)),
            "frozen": torch.nn.Parameter(base.clone(), requires_grad=False),
            "tagged": _tagged_parameter(),
            "view": base[2:5],
            "transposed": base.reshape(3, 4).t(),
            "again": base,
        },
        shared: [torch.tensor(3), torch.empty(0), torch.empty(2, 0, 4), shared],
        "types": [torch.zeros(2, dtype=d) for d in (torch.bool, torch.bfloat16, torch.int64)],
        "wide": torch.ones(2, 1, 2, 1, 3, dtype=torch.complex64),
        "requires_grad": torch.ones(2, requires_grad=True),
        "meta": torch.empty(2, 3, device="meta"),
        "numbers": (1, 2.5, True, None, 300, -1, 1 << 70),
        "step": 7,
    }


def _tagged_parameter() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tag = "kept"  # type: ignore[attr-defined]
    return parameter


@functools.cache
def self_test() -> str:
    """Compares our file with torch.save's. Empty: equal. Otherwise the reason why not; cached."""
    try:
        state = _small_state()
        captured = _record(state)
        stream = _core.torch_stream(captured.records, "archive", captured.alignment)
        ours = _core.Reader(stream).read(stream.size)
        theirs = _torch_bytes(state)
    except Exception as error:  # a private function changed: whatever it raises means "delegate"
        return f"torch {torch.__version__} does not work as known: {error!r}"
    return "" if ours == theirs else f"torch {torch.__version__} writes files that we do not know"


def _torch_bytes(state: Any) -> bytes:
    """What torch.save makes, with checksums even if the user switched them off."""
    get = getattr(torch.serialization, "get_crc32_options", None)
    before = True if get is None else get()
    buffer = io.BytesIO()
    try:
        if not before:
            torch.serialization.set_crc32_options(True)
        torch.save(state, buffer)
    finally:
        if not before:
            torch.serialization.set_crc32_options(False)
    return buffer.getvalue()


@functools.cache
def _fast_path_works() -> bool:
    try:
        state = _small_state()
        fast = _fast_pickle.dump(state, compact=False)
        if fast is None:
            return False
        recorded = _record(state)
        known = [("data.pkl", fast.pickle), *_fixed_records(recorded.alignment)]
        works = [*known, *fast.storage_records()] == recorded.records
    except Exception as error:  # any surprise means "take torch's own pickler"
        logger.debug("fast pickler fails: %r", error)
        return False
    if not works:
        logger.debug("fast pickler differs from torch %s; not used", torch.__version__)
    return works
