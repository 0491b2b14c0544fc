# SPDX-License-Identifier: Apache-2.0
"""How a checkpointer saves.

The way of one save: a snapshot is taken (_snapshot.py) and handed to the compiled writer; a thread
of its own follows it (_follower.py); before an optimizer changes what is still being read, training
waits (_wait_point.py); once the witnesses agree (_ticket.py) the writer commits.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from fastpersist import _core, _log, _snapshot, _wait_point
from fastpersist._attached import Attached
from fastpersist._errors import SaveInFlightError
from fastpersist._follower import Follower
from fastpersist._options import Options, resolve
from fastpersist._ticket import Source, Ticket

_DEFAULT_STAGING = 64 << 20
_TORCH_ALIGNMENT = 64
"""Bytes. Of the addresses that torch gives tensors on the CPU."""
_GIVING_UP = 1.0
"""Seconds from giving a save up to its end, unless the storage does not answer at all."""
_STREAM = "state.pt"
_RANK_STREAM = "rank-00000.pt"


class Saver:
    """One save at a time; whoever calls `save` meanwhile waits for it, or is refused."""

    def __init__(
        self,
        root: _core.Root,
        options: Options,
        *,
        keep_last: int | None,
        keep_every: int | None,
        memory: int,
        refuse: bool,
        wait_timeout: float,
        commit_timeout: float,
        log: str | os.PathLike[str] | None,
        progress: Callable[[int, int], Any] | None,
        verify_source: str,
        on_error: str,
    ) -> None:
        core_options = resolve(options)
        staging = options.staging_bytes or _DEFAULT_STAGING
        self.attached = Attached()
        self._refuse = refuse
        self._wait_timeout = wait_timeout
        self._verify = verify_source
        self._turn = 0
        self._last: Ticket | None = None
        self._saving = threading.Lock()
        self._pid = os.getpid()
        self._pool = _core.CapturePool(max(memory - staging, 0))
        # Devices that take memory at page addresses only: records at pages can be written in place.
        self._page_aligned = _core.memory_align(root) > _TORCH_ALIGNMENT
        self._writer = _core.CheckpointWriter(root, core_options, keep_last, keep_every)
        self._follower = Follower(log, progress, on_error, commit_timeout)

    def save(self, step: int, state: Any, per_rank: Any, metadata: Any) -> Ticket:
        """See Checkpointer.save."""
        start = time.perf_counter()
        with self._saving:
            waited = self._wait_for_last(start)
            ticket = self._start(step, state, per_rank, metadata)
            ticket._follow(start, waited)
            self._last = ticket
            self._follower.add(ticket)
            if (error := self._follower.due()) is not None:
                error.ticket = ticket  # type: ignore[attr-defined]
                raise error
            return ticket

    @property
    def last_error(self) -> BaseException | None:
        return self._follower.last_error

    def before_loading(self) -> None:
        """Somebody is about to overwrite what may still be read."""
        last = self._last
        if last is not None and not last.done() and os.getpid() == self._pid:
            last._wait_before_change()

    def finish(self, timeout: float | None) -> None:
        """Waits for the save in flight. Raises TimeoutError."""
        last = self._last
        if last is not None and not last._wait(timeout):
            raise TimeoutError(f"the save of step {last.step} takes longer than {timeout} s")

    def finish_or_give_up(self, timeout: float) -> bool:
        """Waits that long; then nothing more is read of anybody's memory. True: it was finished."""
        last = self._last
        if last is None or last._wait(timeout):
            return True
        last._give_up(f"the interpreter exits, and {timeout:g} s were not enough")
        return False

    def raise_undelivered(self) -> None:
        if (error := self._follower.undelivered()) is not None:
            raise error

    def close(self) -> None:
        """Precondition: nothing is in flight."""
        self._follower.stop()
        self._writer.close()

    def in_flight(self) -> bool:
        """Takes no lock: for signal handlers."""
        last = self._last
        return last is not None and not last._settled()

    def forget_in_child(self) -> list[Any]:
        _wait_point.clear()
        last, self._last = self._last, None
        return [self, self._writer, self._pool, self._follower, last]

    def _start(self, step: int, state: Any, per_rank: Any, metadata: Any) -> Ticket:
        text = _snapshot.dumps_metadata(metadata)
        self._pool.reset()
        # In a step some tensors have their new values already, and the rest will have them soon.
        attached = None if _wait_point.inside_step() else self.attached
        main = _snapshot.take(state, _STREAM, attached, self._pool, self._page_aligned)
        streams = [(_STREAM, main.stream, main.live)]
        overflow, keep = main.overflow_bytes, [main.keep]
        if per_rank is not None:
            own = _snapshot.take(per_rank, _RANK_STREAM, None, self._pool, False)
            streams.append((_RANK_STREAM, own.stream, own.live))
            overflow += own.overflow_bytes
            keep.append(own.keep)
        self._turn += 1
        core = self._writer.submit(step, streams, text, self._verify, self._turn, self._pool)
        source = Source(
            core, main.owned, main.index, main.places, main.name_of, keep, self._wait_timeout
        )
        if overflow:
            self._read_now(source, overflow)
        return Ticket(step, source)

    def _read_now(self, source: Source, overflow: int) -> None:
        """What could not be copied has to be read before anybody may change it."""
        _log.warn_once(
            f"{overflow} bytes of the state are neither attached nor fit into the memory for "
            "copies, so that save() waits until they are written; attach the optimizer, or give "
            "the checkpointer more memory"
        )
        source.wait_before_change()

    def _wait_for_last(self, start: float) -> float:
        """Seconds that it took."""
        last = self._last
        if last is None or last.done():
            return 0.0
        if self._refuse:
            raise SaveInFlightError(
                f"save failed: the save of step {last.step} is still in flight; wait for its "
                'ticket, or use in_flight="wait"'
            )
        if not last._wait(self._wait_timeout):
            last._give_up(f"the next save waited for it for {self._wait_timeout:g} s")
            if not last._wait(_GIVING_UP):
                raise SaveInFlightError(
                    f"save failed: the storage has not answered for {self._wait_timeout:g} s, and "
                    f"still holds the save of step {last.step}; this step is not saved"
                )
        return time.perf_counter() - start
