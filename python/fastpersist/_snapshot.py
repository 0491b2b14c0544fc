# SPDX-License-Identifier: Apache-2.0
"""From a state to a stream that can be written while training goes on.

Every storage is either live, read where it lies because only an optimizer step changes it, or
copied now into bounded memory. What fits nowhere stays live until `save` returns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from fastpersist import _capture, _core, _foresee, _log
from fastpersist._attached import SMALL, Attached, Owned, Ranges
from fastpersist._errors import UnsupportedStateError

PAGE = 4096
_PAGE_TEXT = str(PAGE).encode()
_MOST_PADDING = 0.01

LiveRecord = tuple[int, str, int]
"""Record, name for messages, identity of its storage (0: not to be watched)."""


@dataclasses.dataclass
class Snapshot:
    """One stream of a checkpoint."""

    stream: _core.Stream
    live: list[LiveRecord]
    owned: list[Owned]
    """The attached tensors among what is live: their version counters are a witness."""
    keep: list[Any]
    overflow_bytes: int
    """Live only because there was no memory left to copy it: must be read before `save` returns."""
    place_of: Callable[[int, int], str | None]
    """Identity and address of a storage to its place in the state, for messages."""
    spans: list[tuple[int, int]]
    """(address, bytes) of each live record."""

    def live_records_of(self, item: Owned) -> list[int]:
        """Indices of the live records that share memory with an attached tensor."""
        end = item.address + item.bytes
        return [
            place
            for place, (address, size) in enumerate(self.spans)
            if address < end and item.address < address + size
        ]

    def place_of_record(self, record: str) -> str | None:
        """Of a live record's tensor in the state; None if it is none."""
        for (_, name, identity), (address, _) in zip(self.live, self.spans, strict=True):
            if name == record:
                return self.place_of(identity, address)
        return None


def take(
    state: Any,
    name: str,
    attached: Attached | None,
    pool: _core.CapturePool,
    page_aligned: bool,
) -> Snapshot:
    """attached: None copies everything. Raises UnsupportedStateError, naming the key."""
    captured = _pickled(state)
    owned = attached.owned() if attached is not None else []
    ranges = Ranges((item.address, item.bytes) for item in owned)
    records = captured.records
    live: list[tuple[int, int, int]] = []
    pieces: list[tuple[int, int, int]] = []
    for number, (_, body) in enumerate(records):
        if type(body) is tuple and body[1] > 0:
            address, size = body
            in_place = size >= SMALL and ranges.whole(address, size)
            (live if in_place else pieces).append((number, address, size))
    copies = pool.copy([(address, size) for _, address, size in pieces])
    overflow = 0
    for (number, address, size), copy in zip(pieces, copies, strict=True):
        if copy:
            records[number] = (records[number][0], (copy, size))
        else:
            overflow += size
            live.append((number, address, size))
    live.sort()
    stream = _laid_out(records, name, captured.alignment, page_aligned)
    read = Ranges((address, size) for _, address, size in live)
    watched = [item for item in owned if read.meets(item.address, item.bytes)]
    identities = _identities(watched)
    return Snapshot(
        stream=stream,
        live=[(number, records[number][0], identities.get(at, 0)) for number, at, _ in live],
        owned=watched,
        keep=[captured.keep, state, [item.storage for item in watched]],
        overflow_bytes=overflow,
        place_of=functools.partial(_place_of, state),
        spans=[(address, size) for _, address, size in live],
    )


def _pickled(state: Any) -> _capture.Capture:
    if reason := _capture.self_test():
        raise UnsupportedStateError(f"save failed: the installed torch cannot be served: {reason}")
    captured = _capture.capture_or_explain(state)
    _foresee.foresee(state, captured, _log.warn_once)
    return captured


def _laid_out(records: list[Any], name: str, alignment: int, page_aligned: bool) -> _core.Stream:
    prefix = _core.archive_prefix(name.encode())
    if page_aligned and alignment < PAGE and _is_worth_pages(records):
        records = [(key, _PAGE_TEXT if key == ".storage_alignment" else b) for key, b in records]
        alignment = PAGE
    return _core.torch_stream(records, prefix, alignment)


def _is_worth_pages(records: list[Any]) -> bool:
    """The file states its alignment (torch from 2.7 on reads it there), and half a page for each
    record makes it hardly larger."""
    content = sum(body[1] for _, body in records if type(body) is tuple)
    states = any(key == ".storage_alignment" for key, _ in records)
    return states and len(records) * PAGE / 2 <= _MOST_PADDING * content


def _identities(owned: list[Owned]) -> dict[int, int]:
    """Address of a storage's memory to the storage, where its layout is known."""
    if not storage_layout_known():
        return {}
    return {item.storage.data_ptr(): int(item.storage._cdata) for item in owned}


def _place_of(state: Any, identity: int, address: int) -> str | None:
    """Where in the state the storage is. For messages: never raises."""
    from fastpersist._locate import storage_place

    try:
        return storage_place(state, identity, address)
    except Exception:  # containers of the user's own may do anything
        return None


@functools.cache
def storage_layout_known() -> bool:
    """Learns where torch keeps a storage's address and size, and tries it on one that moves."""
    make: Any = torch.UntypedStorage
    storages = [make(size) for size in (1000, 3000, 70_000)]
    known = [(int(s._cdata), s.data_ptr(), s.nbytes()) for s in storages]
    try:
        if not _core.learn_storage_layout(known):
            return False
        storages[1].resize_(90_000)
        storages[2].resize_(0)
        works = all(
            _core.peek_storage(int(s._cdata)) == (s.data_ptr(), s.nbytes()) for s in storages
        )
    except (RuntimeError, AttributeError, TypeError):
        works = False
    if not works:
        _core.learn_storage_layout([])
    return works


def dumps_metadata(metadata: Any) -> str:
    """The text of a JSON object. Raises UnsupportedStateError."""
    import json

    try:
        text = json.dumps({} if metadata is None else dict(metadata), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnsupportedStateError(
            f"save failed: metadata is no JSON object: {error}; use strings, numbers, lists, dicts"
        ) from error
    return text
