# SPDX-License-Identifier: Apache-2.0
"""A save on its way: what the caller of `Checkpointer.save` holds, much like a Future."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastpersist import _core
from fastpersist._log import logger

if TYPE_CHECKING:
    import torch

    from fastpersist._attached import Owned
    from fastpersist._errors import StateChangedError
    from fastpersist._info import SaveInfo


class Ticket:
    """A handle of one save in flight. Thread-safe.

    The methods of `concurrent.futures.Future` that make sense for a save: `done`, `result`,
    `exception`, `add_done_callback`; and `progress`.
    """

    def __init__(self, step: int, source: Source) -> None:
        self.step = step
        """The training step that is saved."""
        self._source: Source | None = source
        self._condition = threading.Condition()
        self._done = False
        self._info: SaveInfo | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Ticket], Any]] = []
        self._delivered = False
        self._bytes = source.core.bytes
        self._capture = 0.0
        self.stall = 0.0
        """Seconds that training waited for this save so far, `save` itself included."""
        self.crc = 0
        """CRC-32 of the state's file; 0 before it is done."""
        self.captured_bytes = 0
        """Bytes that were copied while an optimizer waited; 0 before it is done."""

    def done(self) -> bool:
        """The checkpoint is committed, or the save failed."""
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
        with self._condition:
            if not self._condition.wait_for(lambda: self._done, timeout):
                raise TimeoutError(f"the save of step {self.step} takes longer than {timeout} s")
            self._delivered = True
            return self._error

    def add_done_callback(self, function: Callable[[Ticket], Any]) -> None:
        """Calls function(ticket) when the save is done, at once if it is.

        It runs on FastPersist's thread; what it raises is logged.
        """
        with self._condition:
            if not self._done:
                self._callbacks.append(function)
                return
        self._call(function)

    def progress(self) -> tuple[int, int]:
        """(bytes on storage, bytes in all)."""
        source = self._source
        if source is None:
            return (self._bytes if self._error is None else 0, self._bytes)
        return source.core.written, self._bytes

    def __repr__(self) -> str:
        with self._condition:
            if not self._done:
                written, total = self.progress()
                return f"<Ticket step {self.step}: {written} of {total} bytes written>"
            outcome = repr(self._info) if self._error is None else f"failed: {self._error}"
            return f"<Ticket step {self.step}: {outcome}>"

    # --- For the checkpointer and its follower ---

    def _follow(self, start: float, waited: float) -> None:
        """The call of `save`, begun at start, is about to return; waited: for the save before."""
        self._capture = time.perf_counter() - start - waited
        self.stall = time.perf_counter() - start
        source = self._source
        if source is not None:
            source.stalled = self._add_stall
            if not source.core.released:
                _wait_point().add(source)

    def _add_stall(self, seconds: float) -> None:
        self.stall += seconds

    def _wait(self, timeout: float | None) -> bool:
        """Waits until it is done, without taking notice of an error. False: the time is over."""
        with self._condition:
            return self._condition.wait_for(lambda: self._done, timeout)

    def _settled(self) -> bool:
        """Nothing more will be written. Takes no lock: for signal handlers."""
        source = self._source
        return source is None or source.core.done

    def _give_up(self, why: str) -> None:
        source = self._source
        if source is not None:
            source.core.abandon(why, "look at the storage; the last complete checkpoint stays")

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
        import os

        from fastpersist._errors import StateChangedError
        from fastpersist._info import of_checkpoint

        source = self._source
        assert source is not None
        _wait_point().discard(source)
        try:
            result = source.core.result()
        except StateChangedError as error:
            return None, source.named(error)
        except Exception as error:
            return None, error
        finally:
            source.forget()
        self.crc, self.captured_bytes = result["crc"], result["captured_bytes"]
        path = os.fsdecode(result["path"])
        return of_checkpoint(result, path, self._capture, self.stall), None

    def _finish(self, info: SaveInfo | None, error: BaseException | None) -> None:
        with self._condition:
            self._info, self._error = info, error
            self._source = None
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for function in callbacks:
            self._call(function)

    def _call(self, function: Callable[[Ticket], Any]) -> None:
        if self._error is not None:
            self._delivered = True
        try:
            function(self)
        except Exception:
            logger.exception("a callback of the save of step %d failed", self.step)


class Source:
    """The memory that a save reads, its owner's side: waits, witnesses, time spent waiting.

    Nothing here takes a lock that a signal handler could find taken.
    """

    def __init__(
        self,
        core: _core.CheckpointTicket,
        live: list[Owned],
        index: dict[int, int],
        places: dict[str, int],
        name_of: Callable[[int], str],
        keep: Any,
        wait_timeout: float,
    ) -> None:
        self.core = core
        self.stalled: Callable[[float], None] = lambda _: None
        """Told of seconds that training waited."""
        self._live: list[Owned] = live
        self._addresses = {item.address for item in live}
        self._index = index
        self._places = places
        self._name_of = name_of
        self.keep = keep
        self._wait_timeout = wait_timeout
        self._judged = False

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        from fastpersist._attached import optimizer_tensors

        if self._judged or not self._live:
            return False
        addresses = self._addresses
        return any(
            tensor.data_ptr() in addresses for tensor in _hosted(optimizer_tensors(optimizer))
        )

    def wait_before_change(self) -> None:
        """Waits until the memory may be changed, copying what is left as long as that helps."""
        start = time.perf_counter()
        if not self.core.wait_released(self._wait_timeout, True):
            self.core.abandon(
                f"the storage did not take the bytes within {self._wait_timeout:g} s, and training "
                "goes on",
                "look at the storage, or raise wait_timeout or memory",
            )
        self.judge()
        self.stalled(time.perf_counter() - start)

    def judge(self) -> None:
        """Once the memory was given back: looks at the version counters, and says whether the save
        may be committed. The first verdict counts."""
        if self._judged:
            return
        changed = [item for item in self._live if not item.unchanged()]
        again = [item for item in changed if item.moved()]
        here = [item for item in changed if not item.moved()]
        if again and not here:
            # They were changed, then or since: the bytes that were captured tell.
            known = [self._index[item.address] for item in again if item.address in self._index]
            if len(known) == len(again) and self.core.still_the_same(known):
                again = []
        self._judged = True
        if bad := here or again:
            name = self._name_of(bad[0].address)
            self.core.reject(
                "state_changed",
                f"{name} was changed in place while it was being saved",
                "nothing was committed; change attached tensors in optimizer.step() only, or do "
                "not attach their optimizer",
            )
        else:
            self.core.approve()
        self._live = []

    def named(self, error: StateChangedError) -> StateChangedError:
        """The same error, with the tensor's place in the state for the record's name."""
        from fastpersist._errors import StateChangedError

        place = self._places.get(error.tensor or "")
        if place is None:
            return error
        name = self._name_of(place)
        return StateChangedError(str(error).replace(str(error.tensor), name), name)

    def forget(self) -> None:
        """Lets go of the storages."""
        self.keep = None
        self._live = []
        self._name_of = str


def _wait_point() -> Any:
    # torch is imported late: the package works without it.
    from fastpersist import _wait_point as module

    return module


def _hosted(tensors: Any) -> Any:
    return (tensor for tensor in tensors if tensor.device.type == "cpu")
