# SPDX-License-Identifier: Apache-2.0
"""A save on its way: what the caller of `Checkpointer.save` holds, much like a Future."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastpersist import _core
from fastpersist._errors import ForkedError, StateChangedError
from fastpersist._info import SaveInfo, of_checkpoint
from fastpersist._log import logger

if TYPE_CHECKING:
    import torch

    from fastpersist._attached import Owned
    from fastpersist._snapshot import Snapshot

_SLICE = 0.1
"""Seconds. Python runs signal handlers between two slices of a wait."""
_LOOK = "look at the storage; the last complete checkpoint stays"


class Ticket:
    """A handle of one save in flight. Thread-safe.

    The methods of `concurrent.futures.Future` that make sense for a save: `done`, `result`,
    `exception`, `add_done_callback`; and `progress`. In a forked child they raise ForkedError.
    """

    def __init__(self, step: int, source: Source | None, stall: float, capture: float) -> None:
        """source: None for a save that was never begun. stall, capture: seconds that `save` took so
        far, and those of its own work in them."""
        self.step = step
        """The training step that is saved."""
        self.stall = stall
        """Seconds that training waited for this save so far, `save` itself included."""
        self.crc = 0
        """CRC-32 of the state's file; 0 before it is done."""
        self.captured_bytes = 0
        """Bytes that were copied while an optimizer waited; 0 before it is done."""
        self._source: Source | None = source
        self._condition = threading.Condition()
        self._done = False
        self._info: SaveInfo | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Ticket], Any]] = []
        self._delivered = False
        self._counted = self._logged = False
        self._bytes = 0
        self._capture = capture
        self._pid = os.getpid()
        if source is not None:
            self._bytes = source.core.bytes
            source.stalled = self._add_stall

    def done(self) -> bool:
        """The checkpoint is committed, or the save failed."""
        self._check_process()
        with self._condition:
            return self._done

    def result(self, timeout: float | None = None) -> SaveInfo:
        """Waits until the save is done, at most timeout seconds.

        Raises: what made the save fail; TimeoutError.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._info is not None
        return self._info

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits until the save is done; what made it fail, or None. Raises TimeoutError."""
        self._check_process()
        if not self._wait(timeout):
            raise TimeoutError(f"the save of step {self.step} takes longer than {timeout} s")
        with self._condition:
            self._delivered = True
            return self._error

    def add_done_callback(self, function: Callable[[Ticket], Any]) -> None:
        """Calls function(ticket) when the save is done, at once if it is.

        It runs on FastPersist's thread; what it raises is logged. It must not wait for saves, which
        that thread would have to finish.
        """
        self._check_process()
        with self._condition:
            if not self._done:
                self._callbacks.append(function)
                return
            self._delivered = True
        self._call(function)

    def progress(self) -> tuple[int, int]:
        """(bytes on storage, bytes in all)."""
        self._check_process()
        source = self._source
        if source is None:
            return (self._bytes if self._error is None else 0, self._bytes)
        return source.core.written, self._bytes

    def __repr__(self) -> str:
        if os.getpid() != self._pid:
            return f"<Ticket step {self.step}, of another process>"
        with self._condition:
            if not self._done:
                written, total = self.progress()
                return f"<Ticket step {self.step}: {written} of {total} bytes written>"
            outcome = repr(self._info) if self._error is None else f"failed: {self._error}"
            return f"<Ticket step {self.step}: {outcome}>"

    # --- For the checkpointer and its follower ---

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                "this process was forked from the one that saves; only that one learns what became "
                "of the save"
            )

    def _add_stall(self, seconds: float) -> None:
        self.stall += seconds

    def _wait(self, timeout: float | None) -> bool:
        """Waits until it is done, without taking notice of an error. False: the time is over.

        In slices, as a signal that comes just before Python begins to block does not end the wait.
        """
        deadline = math.inf if timeout is None else time.perf_counter() + timeout
        while True:
            with self._condition:
                if self._condition.wait_for(lambda: self._done, slice_until(deadline)):
                    return True
            if time.perf_counter() >= deadline:
                return False

    def _settled(self) -> bool:
        """Nothing more will be written. For signal handlers: never waits for Python code."""
        source = self._source
        return source is None or source.core.done

    def _give_up(self, why: str, advice: str = _LOOK) -> None:
        source = self._source
        if source is not None:
            source.give_up(why, advice)

    def _is_given_up(self) -> bool:
        source = self._source
        return source is not None and source.given_up

    def _wait_before_change(self) -> None:
        source = self._source
        if source is not None:
            source.wait_before_change()

    def _take_error(self) -> BaseException | None:
        with self._condition:
            self._delivered = True
            return self._error

    def _outcome(self) -> tuple[SaveInfo | None, BaseException | None]:
        """Of a save that the core is done with."""
        source = self._source
        assert source is not None
        try:
            result = source.core.result()
        except StateChangedError as error:
            return None, source.named(error)
        except Exception as error:
            return None, error
        self.crc, self.captured_bytes = result["crc"], result["captured_bytes"]
        path = os.fsdecode(result["path"])
        return of_checkpoint(result, path, self._capture, self.stall), None

    def _finish(self, info: SaveInfo | None, error: BaseException | None) -> None:
        """Answers whoever waits. The storages are let go of first."""
        source = self._source
        if source is not None:
            _wait_point().discard(source)
            source.forget()
        with self._condition:
            self._info, self._error = info, error
            self._source = None
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            # Before anybody can ask whether somebody was told.
            self._delivered = self._delivered or bool(callbacks)
            self._condition.notify_all()
        for function in callbacks:
            self._call(function)

    def _call(self, function: Callable[[Ticket], Any]) -> None:
        try:
            function(self)
        except Exception:
            logger.exception("a callback of the save of step %d failed", self.step)


class Source:
    """The memory that a save reads, its owner's side: waits, witnesses, time spent waiting.

    A signal handler may come at any moment. The locks are C++'s, which are never held while Python
    runs a handler; those of tickets are reentrant (RLock).
    """

    def __init__(
        self, core: _core.CheckpointTicket, snapshot: Snapshot, keep: Any, wait_timeout: float
    ) -> None:
        self.core = core
        self.stalled: Callable[[float], None] = lambda _: None
        """Told of seconds that training waited."""
        self.given_up = False
        self.judged = False
        """The verdict was given."""
        self._snapshot: Snapshot | None = snapshot
        self._watched: list[Owned] = snapshot.owned
        self._addresses = {item.address for item in snapshot.owned}
        self._keep = keep
        self._wait_timeout = wait_timeout
        self._culprit: str | None = None

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Its tensors share memory with what is watched, and no verdict was given yet."""
        from fastpersist._attached import Ranges, optimizer_tensors

        watched = self._watched
        if self.judged or not watched:
            return False
        tensors = [tensor for tensor in optimizer_tensors(optimizer) if tensor.is_cpu]
        addresses = self._addresses
        if any(tensor.data_ptr() in addresses for tensor in tensors):
            return True
        ranges = Ranges((item.address, item.bytes) for item in watched)
        return any(ranges.meets(*_memory_of(tensor)) for tensor in tensors)

    def wait_before_change(self) -> None:
        """Waits until the memory may be changed, copying what is left as long as that helps.

        Raises nothing but what Python's signal handlers raise, which run between two slices.
        """
        start = time.perf_counter()
        deadline = start + self._wait_timeout
        try:
            while not self.core.wait_released(slice_until(deadline), True):
                if time.perf_counter() >= deadline:
                    self.give_up(
                        f"the storage did not take the bytes within {self._wait_timeout:g} s, and "
                        "training goes on",
                        "look at the storage, or raise wait_timeout or memory",
                    )
                    break
            self.judge()
        finally:
            self.stalled(time.perf_counter() - start)

    def give_up(self, why: str, advice: str = _LOOK) -> None:
        """Nothing will be committed, unless it is being committed already."""
        self.given_up = True
        self.core.abandon(why, advice)

    def stepped_meanwhile(self) -> None:
        """A step began while `save` looked at the memory: some of it is older than the rest."""
        self.judged = True
        self.core.reject(
            "state_changed",
            "an optimizer began to step while save() was running",
            "nothing was committed; call save() in the thread that steps, between two steps",
        )

    def judge(self) -> None:
        """Once the memory was given back: looks at the version counters, and says whether the save
        may be committed. The first verdict counts, so that two threads may come at once."""
        snapshot = self._snapshot
        if self.judged or snapshot is None:
            return
        try:
            changed = self._changed(snapshot)
        except Exception as error:  # a tensor of the user's own class, say
            self.judged = True
            self.give_up(f"its memory could not be looked at: {error!r}")
            return
        self.judged = True
        if changed is None:
            self.core.approve()
        else:
            self._culprit = snapshot.place_of(changed.storage._cdata, changed.address)
            self.core.reject(
                "state_changed",
                "its memory was changed in place while it was being saved",
                "nothing was committed; change attached tensors in optimizer.step() only, or do "
                "not attach their optimizer",
            )
        self._watched = []

    def _changed(self, snapshot: Snapshot) -> Owned | None:
        """The first that was changed in place since the save began."""
        changed = [item for item in self._watched if not item.unchanged()]
        here = [item for item in changed if not item.moved()]
        if here or not changed:
            return here[0] if here else None
        # All have other memory now and were changed before or since: the captured bytes tell.
        records = {record for item in changed for record in snapshot.live_records_of(item)}
        return None if self.core.still_the_same(sorted(records)) else changed[0]

    def named(self, error: StateChangedError) -> StateChangedError:
        """The same error, with the tensor's place in the state."""
        place = self._culprit
        if self._snapshot is not None and error.tensor:
            place = self._snapshot.place_of_record(error.tensor)
        named = str(error).replace(": its ", f": the tensor {place}: its ", 1)
        return error if place is None else StateChangedError(named, place)

    def forget(self) -> None:
        """Lets go of the storages."""
        self._snapshot = self._keep = None
        self._watched = []


def slice_until(deadline: float) -> float:
    """Seconds to wait in one piece, for a wait that ends then (time.perf_counter)."""
    return max(0.0, min(_SLICE, deadline - time.perf_counter()))


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """(address, bytes) of its storage; nothing where it has none."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, TypeError):
        return 0, 0


def _wait_point() -> Any:
    # torch is imported late: the package works without it.
    from fastpersist import _wait_point as module

    return module
