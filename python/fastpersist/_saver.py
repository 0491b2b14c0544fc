# SPDX-License-Identifier: Apache-2.0
"""How a checkpointer saves.

The way of one save: a snapshot is taken (_snapshot.py) and handed to the compiled writer; a thread
of its own follows it (_follower.py); before an optimizer changes what is still being read, training
waits (_wait_point.py); once the witnesses agree (_ticket.py) the writer commits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from fastpersist import _core, _log, _snapshot, _wait_point
from fastpersist._attached import Attached
from fastpersist._errors import ArgumentError, Error, SaveInFlightError
from fastpersist._follower import Follower
from fastpersist._options import Options, resolve
from fastpersist._recovery import RANK_FILE, STATE_FILE
from fastpersist._ticket import Source, Ticket, slice_until

LEAST_MEMORY = 1 << 20
_MOST_STAGING = 64 << 20
_TORCH_ALIGNMENT = 64
"""Bytes. Of the addresses that torch gives tensors on the CPU."""
_GIVING_UP = 1.0
"""Seconds from giving a save up, or telling the follower to end, to its end; unless the storage
does not answer at all, or a callback does not return."""


def settled_options(options: Options, memory: int) -> Options:
    """What a checkpointer with that much memory saves with. Raises ArgumentError."""
    if not isinstance(options, Options):
        raise ArgumentError(
            f"checkpointer failed: options {options!r} is not a fastpersist.Options"
        )
    staging = options.staging_bytes or min(_MOST_STAGING, memory // 2 // 4096 * 4096)
    if staging > memory:
        raise ArgumentError(
            f"checkpointer failed: staging_bytes {staging} is more than memory {memory}, of which "
            "it is a part"
        )
    return dataclasses.replace(options, staging_bytes=staging, atomic=True, sync=True)


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
        """options: of `settled_options`."""
        self.attached = Attached()
        self._directory = os.fsdecode(root.path)
        self._refuse = refuse
        self._wait_timeout = wait_timeout
        self._verify = verify_source
        self._turn = 0
        self._last: Ticket | None = None
        self._drain: tuple[Ticket, float] | None = None
        self._saving = threading.RLock()
        self._inside = False
        self._closed = False
        self._pid = os.getpid()
        self._pool = _core.CapturePool(memory - (options.staging_bytes or 0))
        # Devices that take memory at page addresses only: records at pages can be written in place.
        self._page_aligned = _core.memory_align(root) > _TORCH_ALIGNMENT
        self._writer = _core.CheckpointWriter(root, resolve(options), keep_last, keep_every)
        self._follower = Follower(log, progress, on_error, commit_timeout)
        # Whoever drops a checkpointer without closing it keeps no thread.
        finalizer = weakref.finalize(self, self._follower.queue.put, None)
        finalizer.atexit = False

    def save(self, step: int, state: Any, per_rank: Any, metadata: Any, owner: Any) -> Ticket:
        """See Checkpointer.save. owner: kept alive until the save is done."""
        start = time.perf_counter()
        with self._alone(f"save of step {step}"):
            self._inside = True
            try:
                if self._closed:  # by another thread, or by a handler, since it was looked at
                    raise Error("save failed: the checkpointer is closed")
                refused = self._wait_for_last(step)
                waited = time.perf_counter() - start
                if refused is None:
                    ticket = self._start(step, state, per_rank, metadata, start, waited, owner)
                else:
                    ticket = Ticket(step, None, waited, 0.0)
                    self._follower.add_failed(ticket, refused, owner)
            finally:
                self._inside = False
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
        if last is not None and os.getpid() == self._pid and not last.done():
            last._wait_before_change()

    def settle(self) -> None:
        """Waits for the save in flight, as long as training would: it may be what is wanted."""
        self.before_loading()
        last = self._last
        if last is not None and not self._follower.is_this_thread():
            last._wait(self._wait_timeout)

    def finish(self, timeout: float | None) -> None:
        """Waits for the save in flight. Raises TimeoutError."""
        last = self._last
        if last is None or last.done():
            return
        if self._follower.is_this_thread():
            raise Error("wait failed: a callback cannot wait for a save that its thread finishes")
        if not last._wait(timeout):
            raise TimeoutError(f"the save of step {last.step} takes longer than {timeout} s")

    def drain_deadline(self, timeout: float) -> float:
        """When (time.monotonic) a process that ends no longer waits for the save in flight. Who
        asks first decides, so that a handler, a `with` and the exit do not add up."""
        last, drain = self._last, self._drain
        if last is None:
            return time.monotonic()
        if drain is None or drain[0] is not last:
            drain = self._drain = (last, time.monotonic() + timeout)
        return drain[1]

    def close_at_exit(self, timeout: float, let_go: Callable[[], None]) -> bool:
        """Waits that long for the save in flight and its callbacks; then nothing more is read of
        anybody's memory, and nobody is told of the save any more. True: all of it ended, and the
        rest was let go of."""
        deadline = self.drain_deadline(timeout)
        if not self._saving.acquire(timeout=_seconds_until(deadline, _GIVING_UP)):
            self._closed = True  # a thread that the interpreter does not wait for is in save()
            return False
        try:
            last = self._last
            if last is not None and not last._wait(_seconds_until(deadline)):
                self._closed = True
                last._give_up(f"the interpreter exits, and {timeout:g} s were not enough")
                self._follower.quit(_GIVING_UP)
                return False
            stopped = self._stop(_seconds_until(deadline, _GIVING_UP))
            let_go()
            return stopped
        finally:
            self._saving.release()

    def undelivered(self) -> BaseException | None:
        """The newest failure that nobody was told of."""
        return self._follower.undelivered()

    def raise_undelivered(self) -> None:
        if (error := self.undelivered()) is not None:
            raise error

    def close(self, timeout: float | None, let_go: Callable[[], None]) -> None:
        """Waits for the save in flight; lets go of everything, the rest by let_go. Raises
        TimeoutError with nothing closed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._alone("close", timeout):
            self.finish(None if deadline is None else _seconds_until(deadline))
            if not self._closed:  # by another thread meanwhile, or by a handler
                self._stop(None if deadline is None else _seconds_until(deadline, _GIVING_UP))
                let_go()

    def _stop(self, timeout: float | None) -> bool:
        """Precondition: nothing is in flight. False: a callback has not returned in time."""
        self._closed = True
        stopped = self._follower.stop(timeout)
        self._writer.close()
        return stopped

    @contextlib.contextmanager
    def _alone(self, what: str, timeout: float | None = None) -> Iterator[None]:
        """Nobody else saves or closes meanwhile. Raises SaveInFlightError where waiting for whoever
        does could not end, and TimeoutError."""
        callback = self._follower.is_this_thread()  # whoever is in save() may wait for this thread
        limit = 0.0 if callback else threading.TIMEOUT_MAX if timeout is None else max(timeout, 0.0)
        taken = False
        try:
            deadline = time.perf_counter() + limit
            while not taken:  # in slices, as a ticket waits, so that no signal goes unheard
                taken = self._saving.acquire(timeout=slice_until(deadline))
                if time.perf_counter() >= deadline:
                    break
            if callback and not taken:
                raise SaveInFlightError(
                    f"{what} failed: it was called in a callback while a thread is in save() or "
                    "close(), which may wait for the callback to return"
                )
            if not taken:
                raise TimeoutError(f"{what} failed: another thread is in save() or close()")
            if self._inside:  # the same thread: a signal handler, or a __reduce__ of the state
                raise SaveInFlightError(
                    f"{what} failed: it was called while the same thread is in save(), in a signal "
                    "handler or in the state's own code; call it when save() has returned"
                )
            yield
        finally:
            if taken:
                self._saving.release()

    def in_flight(self) -> bool:
        """For signal handlers: never waits for Python code."""
        last = self._last
        return last is not None and not last._settled()

    def follow_in_handler(self) -> None:
        """Gives the verdict if it is due, without which nothing is committed."""
        last = self._last
        source = last._source if last is not None else None
        if source is not None and source.core.wait_released(0.0, False):
            source.judge()

    def never_destroy(self) -> list[Any]:
        """What must outlive a thread that does not end, or belongs to the parent's threads."""
        return [self, self._writer, self._pool, self._follower, self._last]

    def forget_in_child(self) -> list[Any]:
        _wait_point.clear()
        kept = self.never_destroy()
        self._last = None
        return kept

    def _start(
        self,
        step: int,
        state: Any,
        per_rank: Any,
        metadata: Any,
        start: float,
        waited: float,
        owner: Any,
    ) -> Ticket:
        text = _snapshot.dumps_metadata(metadata)
        self._pool.reset()
        ticket: Ticket | None = None
        try:
            with _wait_point.steps_begun() as begun:
                source, overflow = self._submit(step, state, per_rank, text)
                spent = time.perf_counter() - start
                ticket = Ticket(step, source, spent, spent - waited)
                # Also when everything is read already: a step has to come after the verdict.
                _wait_point.add(source)
                if any(source.concerns(optimizer) for optimizer in begun):
                    source.stepped_meanwhile()
            # First of all: the next save must not use its memory while the writer does.
            self._last = ticket
            self._follower.queue.put((ticket, owner))
            if overflow:
                self._read_now(source, overflow)
        except BaseException:  # KeyboardInterrupt: nobody would give the verdict
            if ticket is not None:
                self._last = ticket
                ticket._delivered = True  # by this exception
                ticket._give_up("save() was interrupted", "save again")
                self._follower.queue.put((ticket, owner))  # a second time does no harm
            raise
        return ticket

    def _submit(self, step: int, state: Any, per_rank: Any, text: str) -> tuple[Source, int]:
        """What is written from now on, and how many bytes of it must be read before `save` returns.
        Dropping it rejects it."""
        attached = self._readable_in_place()
        main = _snapshot.take(state, STATE_FILE, attached, self._pool, self._page_aligned)
        streams = [(STATE_FILE, main.stream, main.live)]
        overflow, keep = main.overflow_bytes, [main.keep]
        if per_rank is not None:
            own = _snapshot.take(per_rank, RANK_FILE, None, self._pool, False)
            streams.append((RANK_FILE, own.stream, own.live))
            overflow += own.overflow_bytes
            keep.append(own.keep)
        self._turn += 1
        core = self._writer.submit(step, streams, text, self._verify, self._turn, self._pool)
        return Source(core, main, keep, self._wait_timeout), overflow

    def _readable_in_place(self) -> Attached | None:
        """None: everything has to be copied. In a step some tensors have their new values already,
        and the rest will have them soon."""
        if _wait_point.another_thread_steps():
            _log.warn_once(
                "save() was called while another thread is in the step of an optimizer: everything "
                "is copied, and may be half of before and half of after the step; call save() in "
                "the thread that steps"
            )
            return None
        return None if _wait_point.inside_step() else self.attached

    def _read_now(self, source: Source, overflow: int) -> None:
        """What could not be copied has to be read before anybody may change it."""
        _log.warn_once(
            f"{overflow} bytes of the state are neither attached nor fit into the memory for "
            "copies, so that save() waits until they are written; attach the optimizer, or give "
            "the checkpointer more memory"
        )
        source.wait_before_change()

    def _wait_for_last(self, step: int) -> SaveInFlightError | None:
        """Why the step cannot be saved, where that is no reason to stop training."""
        last = self._last
        if last is None or last.done():
            return None
        if self._refuse or self._follower.is_this_thread():
            raise SaveInFlightError(
                f"save failed: the save of step {last.step} is still in flight; wait for its "
                'ticket, or use in_flight="wait"'
            )
        if not last._is_given_up():  # then training has waited already
            if last._wait(self._wait_timeout):
                return None
            waited = f"{self._wait_timeout:g} s"
            last._give_up(f"the next save waited for that of step {last.step} for {waited}")
        if last._wait(_GIVING_UP):
            return None
        error = SaveInFlightError(
            f"save failed on {self._directory}: the storage has not answered for "
            f"{self._wait_timeout:g} s, and still holds the save of step {last.step}; step {step} "
            "is not saved; look at the storage: saving goes on once it answers"
        )
        if self._follower.raises:
            raise error
        return error


def _seconds_until(deadline: float, least: float = 0.0) -> float:
    return max(least, deadline - time.monotonic())
