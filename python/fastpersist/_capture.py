# SPDX-License-Identifier: Apache-2.0
"""From a Python object to the records of a PyTorch file, without copying storages.

The pickle is torch's own. `torch.serialization._save` writes into a recorder in place of a file; it
is private, so a self-test compares a small file byte for byte with what `torch.save` makes, once
per process, unless that release of torch was compared before. For plain states a compiled pickler
takes over, after a self-test of the same kind.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import io
import pickle
from collections import OrderedDict
from typing import Any

import torch

from fastpersist import _core, _torch_release
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
    unusual = "pickle_module or pickle_protocol is not torch's default"
    if pickle_module is pickle and pickle_protocol == 2:
        fast = _pickle_fast(obj, compact) if _fast_path_works() else "the self-test failed"
        if not isinstance(fast, str):
            pickled, storages, keep, referenced = fast
            records = _in_torchs_order(pickled, storages, disable_byteorder)
            return Capture(records, alignment(), keep, referenced)
        unusual = fast
    if compact:
        raise ValueError(
            "compact=True takes plain CPU tensors in dicts, lists and tuples, numbers and strings; "
            f"found {unusual}"
        )
    return _record(obj, pickle_module, pickle_protocol, disable_byteorder)


def capture_or_explain(obj: Any, *arguments: Any) -> Capture:
    """`capture`, but what pickling raises becomes an error that names the place in obj."""
    try:
        return capture(obj, *arguments)
    except MemoryError:  # no fault of the state
        raise
    except Exception as error:
        from fastpersist import _explain

        def again(part: Any) -> Capture:
            return capture(part, *arguments)

        raise _explain.explain(error, obj, again) from error


def _in_torchs_order(
    pickled: bytes, storages: list[Record], disable_byteorder: bool = False
) -> list[Record]:
    """All records of a file, as the installed torch orders them."""
    fixed = [r for r in _fixed_records(alignment()) if _wanted(r, disable_byteorder)]
    # Before 2.7, when .format_version came, torch sorted the storages' numbers as text.
    if all(name != ".format_version" for name, _ in fixed):
        storages = sorted(storages, key=lambda record: record[0])
    return [("data.pkl", pickled), *fixed, *storages]


def _wanted(record: Record, disable_byteorder: bool) -> bool:
    return not (disable_byteorder and record[0] == "byteorder")


def _record(
    obj: Any, pickle_module: Any = pickle, pickle_protocol: int = 2, disable_byteorder: bool = False
) -> Capture:
    recorder = Recorder()
    torch.serialization._save(obj, recorder, pickle_module, pickle_protocol, disable_byteorder)  # type: ignore[no-untyped-call]
    return Capture(recorder.records, alignment(), recorder.keep, None)


@functools.lru_cache(maxsize=4)
def _fixed_records(alignment_now: int) -> tuple[Record, ...]:
    """The records that the installed torch puts between the pickle and the storages."""
    del alignment_now  # only the key of the cache: one of the records holds it
    return tuple(r for r in _record(None).records if r[0] != "data.pkl")


def _small_state(many: int = 1000) -> dict[Any, Any]:
    """What the self-tests save: a little of everything that checkpoints mostly hold.

    many: the length of what is long. Pickle writes containers in pieces of a thousand; how they
    are read does not depend on how long they are.
    """
    base = torch.arange(12, dtype=torch.float32)
    shared = "shared name"
    module = torch.nn.Sequential(torch.nn.LayerNorm((2, 2)), torch.nn.BatchNorm1d(2))
    loop: list[Any] = []
    loop.append((loop, 1, 2, 3))
    return {
        "model": module.state_dict(),
        "one": OrderedDict(only=base[2:5]),
        "parameter": torch.nn.Parameter(base.reshape(3, 4)),
        "frozen": torch.nn.Parameter(base.clone(), requires_grad=False),
        "transposed": base.reshape(3, 4).t(),
        "again": base,
        shared: [torch.tensor(3), torch.empty(0), torch.empty(2, 0, 4), shared],
        "types": [torch.zeros(2, dtype=d) for d in (torch.bool, torch.bfloat16, torch.int64)],
        "wide": torch.ones(2, 1, 2, 1, 3, dtype=torch.complex64),
        "requires_grad": torch.ones(2, requires_grad=True),
        "numbers": (1, 2.5, True, None, 300, 70000, -1, -(1 << 39), (1 << 62) + 1, (), [], {}),
        "words": ["0", "cpu", "storage", "1", "data", "\u00e9", "\u4e2d"],
        "loop": loop,
        "many": dict.fromkeys(range(many)),
        "many ordered": OrderedDict.fromkeys(range(many)),
        "more": [*range(many + 1)],
        7: {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"betas": (0.9, 0.999)}]},
    }


@functools.cache
def self_test() -> str:
    """Why our files may differ from torch.save's. Empty: they are equal. Cached."""
    return "" if _torch_release.was_compared() else compare_files()


def compare_files() -> str:
    """Compares our file with torch.save's. Empty: equal. Otherwise the reason why not."""
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
        torch.serialization.save(state, buffer)
    finally:
        if not before:
            torch.serialization.set_crc32_options(False)
    return buffer.getvalue()


def _pickle_fast(obj: Any, compact: bool) -> tuple[bytes, list[Record], list[Any], int] | str:
    """Pickle, storage records, storages and referenced bytes; or the reason why it cannot."""
    # Pickling makes many small objects and no garbage; the collector would look at all of them
    # again and again (twice the time for 100,000 tensors).
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _core.pickle_state(obj, _torch_types(), compact)
    finally:
        if collecting:
            gc.enable()


@functools.cache
def _torch_types() -> _core.TorchTypes:
    """What the compiled pickler must know of the installed torch, asked at run time."""
    kinds = {
        dtype: (getattr(torch, name), torch.empty((), dtype=dtype).element_size())
        for dtype, name in torch.storage._dtype_to_storage_type_map().items()
        if not name.startswith("Q")  # quantized tensors carry more than their storage
    }
    return _core.TorchTypes(
        torch.Tensor,
        torch.nn.Parameter,
        torch._utils._rebuild_tensor_v2,
        torch._utils._rebuild_parameter,
        torch.strided,
        kinds,
    )


@functools.cache
def _fast_path_works() -> bool:
    return _torch_release.was_compared() or compare_picklers()


def compare_picklers() -> bool:
    """Whether the compiled pickler's records are torch's."""
    try:
        state = _small_state()
        fast = _pickle_fast(state, compact=False)
        if isinstance(fast, str):
            raise ValueError(fast)
        recorded = _record(state)
        works = _in_torchs_order(fast[0], fast[1])
    except Exception as error:  # any surprise means "take torch's own pickler"
        logger.debug("compiled pickler not used: %r", error)
        return False
    if works != recorded.records:
        logger.debug("compiled pickler differs from torch %s; not used", torch.__version__)
        return False
    return True
