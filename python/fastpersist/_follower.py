# SPDX-License-Identifier: Apache-2.0
"""Follows saves in flight on a thread of its own: verdict, outcome, log, callbacks, failures.

The thread waits without the GIL and holds it for moments only.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastpersist import _log
from fastpersist._info import SaveInfo

if TYPE_CHECKING:
    from fastpersist._ticket import Ticket

_SLICE = 0.1
"""Seconds between two calls of `progress`."""
_FAILURES_IN_A_ROW = 3
_FAILURES_KEPT = 8
"""Failures that wait to be told; all but the newest are in the log only."""


class _Quit(Exception):
    """The process ends."""


class Follower:
    """One thread; saves are followed in the order in which they were added."""

    def __init__(
        self,
        log: str | os.PathLike[str] | None,
        progress: Callable[[int, int], Any] | None,
        on_error: str,
        commit_timeout: float,
    ) -> None:
        self.last_error: BaseException | None = None
        self._log_path = log
        self._progress = progress
        self.raises = on_error == "raise"
        """Failures are raised by the next `save`, not only logged."""
        self._commit_timeout = commit_timeout
        self._failed: collections.deque[Ticket] = collections.deque(maxlen=_FAILURES_KEPT)
        self._counting = threading.RLock()
        self._in_a_row = 0
        self._last: tuple[int, int, int] | None = None
        self._totals = {"saves": 0, "failed": 0, "bytes": 0, "stall_seconds": 0.0}
        self._quitting = False
        self.queue: queue.SimpleQueue[tuple[Ticket, Any] | None] = queue.SimpleQueue()
        """What is to be followed, and whom to keep alive meanwhile. None ends the thread."""
        self._thread = threading.Thread(target=self._run, name="fastpersist", daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Returns when everything that was added is done, callbacks included; or, with a warning,
        when the time is over. False: the thread still runs."""
        self.queue.put(None)
        if self.is_this_thread():
            return True
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.logger.warning("a callback of a save has not returned; it is not waited for")
            return False
        return True

    def quit(self, timeout: float) -> None:
        """Ends the thread although a save is not done: nobody will be told of it any more."""
        self._quitting = True
        self.stop(timeout)

    def add_failed(self, ticket: Ticket, error: BaseException, owner: Any) -> None:
        """A save that failed before it was begun. Its line of the log waits for the thread: who
        trains does not write files."""
        self._count(ticket, None, error)
        ticket._finish(None, error)
        self.queue.put((ticket, owner))

    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def due(self) -> BaseException | None:
        """What the next `save` has to raise."""
        if self.raises or self._in_a_row >= _FAILURES_IN_A_ROW:
            return self.undelivered()
        return None

    def undelivered(self) -> BaseException | None:
        """The newest failure that nobody was told of; all are told of with it."""
        newest: Ticket | None = None
        with contextlib.suppress(IndexError):  # the thread may add while we take
            while True:
                ticket = self._failed.popleft()
                newest = newest if ticket._delivered else ticket
        if newest is None:
            return None
        self._in_a_row = 0
        return newest._take_error()

    def _run(self) -> None:
        while (item := self.queue.get()) is not None and not self._quitting:
            try:
                self._follow(item[0])
            except _Quit:
                return
            except BaseException as error:  # a fault here must not leave anybody waiting
                _log.logger.exception("following the save of step %d failed", item[0].step)
                if not self._end(item[0], error):
                    return
            del item

    def _end(self, ticket: Ticket, fault: BaseException) -> bool:
        """Of a save that could not be followed to its end. Its memory is let go of when nobody
        reads it any more, and it became what the writer says. False: the process ends."""
        source = ticket._source
        if source is None:
            return True
        if not source.judged:
            source.give_up(f"following it failed: {fault!r}")
        while not source.core.wait_done(_SLICE):
            if self._quitting:
                return False
        info: SaveInfo | None = None
        error: BaseException | None = fault
        try:
            info, error = ticket._outcome()
            if not ticket._counted:
                self._account(ticket, info, error)
        except BaseException:
            _log.logger.exception("the save of step %d was not accounted for", ticket.step)
        ticket._finish(info, error)
        return True

    def _follow(self, ticket: Ticket) -> None:
        source = ticket._source
        if source is None:  # it never began
            self._write_log(ticket, ticket._info, ticket._error)
            return
        core = source.core
        self._while_waiting(ticket, lambda: core.wait_released(_SLICE, False))
        source.judge()
        self._while_waiting(ticket, lambda: core.wait_written(_SLICE))
        written = time.monotonic()
        self._while_waiting(ticket, lambda: core.wait_done(_SLICE), since=written)
        info, error = ticket._outcome()
        self._account(ticket, info, error)
        ticket._finish(info, error)

    def _while_waiting(
        self, ticket: Ticket, wait: Callable[[], bool], since: float | None = None
    ) -> None:
        while not wait():
            if self._quitting:
                raise _Quit
            self._tell_progress(ticket)
            if since is not None and time.monotonic() - since > self._commit_timeout:
                _log.logger.warning(
                    "the commit of step %d takes longer than %g s",
                    ticket.step,
                    self._commit_timeout,
                )
                since = None
        self._tell_progress(ticket)

    def _tell_progress(self, ticket: Ticket) -> None:
        if self._progress is None:
            return
        try:
            self._progress(*ticket.progress())
        except BaseException:  # SystemExit too: without this thread nobody would be answered
            _log.logger.exception("the progress callback failed")

    def _account(self, ticket: Ticket, info: SaveInfo | None, error: BaseException | None) -> None:
        self._count(ticket, info, error)
        if info is not None:
            if info.warning:
                _log.warn_once(info.warning)
            self._compare(ticket, info)
            _log.logger.debug("saved %r; engine: %s", info, info.engine_reason)
        self._write_log(ticket, info, error)

    def _count(self, ticket: Ticket, info: SaveInfo | None, error: BaseException | None) -> None:
        ticket._counted = True
        with self._counting:  # this thread counts, and so does whoever calls `save`
            self.last_error = error
            self._totals["saves"] += 1
            self._totals["stall_seconds"] += ticket.stall
            if info is not None:
                self._in_a_row = 0
                self._totals["bytes"] += info.bytes
                return
            self._in_a_row += 1
            self._totals["failed"] += 1
            self._failed.append(ticket)
        _log.logger.error("the checkpoint of step %d was not saved: %s", ticket.step, error)

    def _compare(self, ticket: Ticket, info: SaveInfo) -> None:
        """A run whose state stops changing is most likely saving something else than it trains."""
        digest = (ticket.crc, info.bytes, ticket.step)
        before, self._last = self._last, digest
        if before is not None and before[:2] == digest[:2] and before[2] != ticket.step:
            _log.logger.warning(
                "the checkpoint of step %d equals that of step %d, byte for byte; is this what is "
                "trained?",
                ticket.step,
                before[2],
            )

    def _write_log(
        self, ticket: Ticket, info: SaveInfo | None, error: BaseException | None
    ) -> None:
        if self._log_path is None or ticket._logged:
            return
        ticket._logged = True
        line: dict[str, Any] = {"time": time.time(), "step": ticket.step, "ok": error is None}
        line["stall_seconds"] = ticket.stall
        if info is not None:
            line |= {
                "path": info.path,
                "bytes": info.bytes,
                "in_place_bytes": info.in_place_bytes,
                "captured_bytes": ticket.captured_bytes,
                "engine": info.engine,
                "crc32": f"{ticket.crc:08x}",
                "seconds": dict(info.seconds),
            }
        if error is not None:
            line["error"] = f"{type(error).__name__}: {error}"
        line["totals"] = dict(self._totals)
        try:
            with open(self._log_path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as problem:
            _log.warn_once(f"the log of saves cannot be written: {problem}")
