# SPDX-License-Identifier: Apache-2.0
"""Closing while something else is going on: a save in the same thread or in another one, a callback
that does not return, a fault of the thread that follows saves."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time
from typing import Any

import checkpoint_support as support
import faults_support as faults
import pytest
from checkpoint_support import Training, held

import fastpersist as fp

MANY = 300.0
"""Seconds. Longer than any test: whoever waits that long is stopped by the test's limit."""


def in_thread(function: Any) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


# --- A save in the same thread ---


def close_in_a_handler(folder: str, where: str) -> tuple[str, int]:
    """The usual end: a handler that closes; here while the interrupted code is in save()."""
    training = Training()
    ckpt = support.open_run(folder, handle_signals=False)
    ckpt.attach(training.optimizer)
    raised: list[str] = []

    def handler(number: int, frame: Any) -> None:
        try:
            ckpt.close(60)
        except fp.SaveInFlightError as error:
            raised.append(str(error))

    def interrupt() -> None:
        signal.raise_signal(signal.SIGUSR1)

    class Interrupts:
        def __reduce__(self) -> Any:
            if not raised:
                interrupt()
            return (int, (3,))

    signal.signal(signal.SIGUSR1, handler)
    state: dict[str, Any] = training.state()
    if where == "pickle":
        state["x"] = Interrupts()
    else:  # after the writer has it, and before its follower does
        saver: Any = ckpt._saver
        submit = saver._submit

        def interrupted(*arguments: Any) -> Any:
            result = submit(*arguments)
            interrupt()
            return result

        saver._submit = interrupted
    ticket = ckpt.save(1, state)
    step = ticket.result(60).step
    interrupt()  # outside of save() it closes
    with pytest.raises(fp.Error, match="closed"):
        ckpt.save(2, state)
    (told,) = raised
    return told, step or 0


@pytest.mark.parametrize("where", ["pickle", "submitted"])
def test_closing_in_a_handler_that_interrupted_a_save_is_refused_and_the_save_is_complete(
    where: str, tmp_path: Any
) -> None:
    told, step = faults.run(close_in_a_handler, str(tmp_path), where, shim=True)
    assert told.startswith("close failed") and "while the same thread is in save()" in told
    assert step == 1


def interrupt_a_save(folder: str, where: str) -> None:
    """Ctrl-C at a bad moment."""
    training = Training()
    with support.open_run(folder) as ckpt:
        ckpt.attach(training.optimizer)
        saver: Any = ckpt._saver
        original: Any = saver._submit if where == "submitted" else saver._follower.queue

        def interrupted(*arguments: Any) -> Any:
            original(*arguments)
            raise KeyboardInterrupt

        class Queue:
            """Interrupts the first time, when the item is in the queue."""

            def put(self, item: Any) -> None:
                original.put(item)
                saver._follower.queue = original
                raise KeyboardInterrupt

        if where == "submitted":
            saver._submit = interrupted
        else:
            saver._follower.queue = Queue()
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1, training.state())
        saver.__dict__.pop("_submit", None)
        ckpt.save(2, training.state()).result(60)
        assert ckpt.all_steps() == [2]


@pytest.mark.parametrize("where", ["submitted", "followed"])
def test_a_save_that_was_interrupted_is_not_committed_and_blocks_nothing(
    where: str, tmp_path: Any
) -> None:
    faults.run(interrupt_a_save, str(tmp_path), where, shim=True)


# --- A save in another thread ---


def close_in_another_thread(folder: str) -> None:
    """While a thread is in save(), close() waits for it, and for what it saves."""
    pickling, go_on = threading.Event(), threading.Event()
    tickets: list[fp.Ticket] = []

    class Slow:
        def __reduce__(self) -> Any:
            pickling.set()
            assert go_on.wait(60)
            return (int, (3,))

    ckpt = support.open_run(folder)
    saving = in_thread(lambda: tickets.append(ckpt.save(1, {"x": Slow()})))
    assert pickling.wait(60)
    with pytest.raises(TimeoutError, match="another thread"):
        ckpt.close(0.01)
    closing = in_thread(ckpt.close)
    go_on.set()
    saving.join(60)
    closing.join(60)
    assert tickets[0].result(60).step == 1
    with pytest.raises(fp.Error, match="closed"):
        ckpt.save(2, {})


def test_closing_waits_for_a_save_in_another_thread(tmp_path: Any) -> None:
    faults.run(close_in_another_thread, str(tmp_path))


def save_and_close_at_once(folder: str, rounds: int) -> None:
    for number in range(rounds):
        ckpt = fp.Checkpointer(os.path.join(folder, f"{number}"))
        tickets: list[fp.Ticket] = []
        raised: list[str] = []
        started = threading.Event()

        def save(
            ckpt: fp.Checkpointer = ckpt,
            tickets: list[fp.Ticket] = tickets,
            raised: list[str] = raised,
            started: threading.Event = started,
        ) -> None:
            for step in range(1000):
                try:
                    tickets.append(ckpt.save(step, {"x": step}))
                except fp.Error as error:
                    raised.append(str(error))
                    return
                started.set()

        thread = in_thread(save)
        assert started.wait(60)
        ckpt.close(60)
        thread.join(60)
        assert raised == ["save failed: the checkpointer is closed"]
        assert all(ticket.exception(60) is None for ticket in tickets)


def test_every_ticket_ends_when_one_thread_saves_and_another_closes(tmp_path: Any) -> None:
    faults.run(save_and_close_at_once, str(tmp_path), 5)


# --- Callbacks ---


def save_in_a_progress_callback(folder: str) -> list[str]:
    """It saves while another thread waits in save() for what this thread would have to finish."""
    training = Training()
    waiting = threading.Event()
    raised: list[str] = []

    def progress(written: int, total: int) -> None:
        if waiting.is_set() and not raised:
            try:
                ckpt.save(9, {"x": 1})
                raised.append("nothing")
            except fp.SaveInFlightError as error:
                raised.append(str(error))

    with support.open_run(folder, progress=progress) as ckpt, held(folder) as hold:
        saver: Any = ckpt._saver
        wait_for_last = saver._wait_for_last

        def wait(step: int) -> Any:
            if step == 2:
                waiting.set()
            return wait_for_last(step)

        saver._wait_for_last = wait
        ckpt.save(1, training.state())
        hold.reached()
        saving = in_thread(lambda: ckpt.save(2, training.state()))
        while not raised:
            time.sleep(0.001)
        hold.release()
        saving.join(60)
        ckpt.wait_until_finished(60)
        assert ckpt.all_steps() == [1, 2]
    return raised


def test_saving_in_a_callback_while_a_thread_waits_in_save_is_refused(tmp_path: Any) -> None:
    (told,) = faults.run(save_in_a_progress_callback, str(tmp_path), shim=True)
    assert "in a callback while a thread is in save()" in told


def leave_a_callback_running(folder: str, which: str) -> None:
    running = threading.Event()

    def block(*_: Any) -> None:
        running.set()
        time.sleep(MANY)

    progress = block if which == "progress" else None
    ckpt = support.open_run(folder, drain_timeout=0.3, progress=progress)
    ticket = ckpt.save(1, {"x": 1})
    if which == "done":
        ticket.add_done_callback(block)
    assert running.wait(60)


@pytest.mark.parametrize("which", ["done", "progress"])
def test_a_callback_that_does_not_return_holds_the_exit_up_for_drain_timeout_only(
    which: str, tmp_path: Any
) -> None:
    errors = tmp_path / "stderr"
    child = faults.start(
        leave_a_callback_running, str(tmp_path), which, shim=True, exits=True, stderr=str(errors)
    )
    assert child.wait(60) == 0, errors.read_text()
    assert "Fatal" not in errors.read_text() and "terminate" not in errors.read_text()
    with support.open_run(tmp_path) as ckpt:
        assert ckpt.all_steps() == ([1] if which == "done" else [])


def close_with_a_callback_running(folder: str) -> list[str]:
    ckpt = support.open_run(folder)
    release = threading.Event()
    ckpt.save(1, {"x": 1}).add_done_callback(lambda _: release.wait(MANY))
    with faults.warnings_logged() as warnings:
        ckpt.close(0.2)
    release.set()
    with support.open_run(folder) as again:  # the directory was let go of
        assert again.all_steps() == [1]
    return warnings


def test_close_waits_for_callbacks_as_long_as_it_is_told_to(tmp_path: Any) -> None:
    (told,) = faults.run(close_with_a_callback_running, str(tmp_path))
    assert "a callback of a save has not returned" in told


def end_the_thread(folder: str, which: str) -> None:
    def leave(*_: Any) -> None:
        raise SystemExit

    with support.open_run(folder, progress=leave if which == "progress" else None) as ckpt:
        for step in (1, 2):
            ticket = ckpt.save(step, {"x": step})
            if which == "done":
                ticket.add_done_callback(leave)
            ticket.result(60)
        assert ckpt.all_steps() == [1, 2]


@pytest.mark.parametrize("which", ["done", "progress"])
def test_a_callback_that_exits_leaves_later_saves_somebody_to_follow_them(
    which: str, tmp_path: Any
) -> None:
    faults.run(end_the_thread, str(tmp_path), which)


# --- A fault of the thread that follows ---


def fail_to_follow(folder: str, when: str) -> None:
    """An exception that nobody foresaw, before or after the verdict, while the device is held."""
    training = Training()
    log = pathlib.Path(folder, "log")
    device: dict[str, Any] = {"call": "fdatasync"} if when == "after" else {}
    with support.open_run(folder, log=log) as ckpt:
        ckpt.attach(training.optimizer)
        follower: Any = ckpt._saver._follower
        before = training.values()
        reached, faulty = threading.Event(), threading.Event()

        def follow(ticket: fp.Ticket) -> None:
            del follower._follow  # the next one is followed as ever
            if when == "after":
                source: Any = ticket._source
                assert source.core.wait_released(60, False)
                source.judge()
            assert reached.wait(60)
            faulty.set()
            raise KeyError("a fault")

        follower._follow = follow
        with held(folder, **device) as hold:
            ticket = ckpt.save(1, training.state())
            hold.reached()
            reached.set()
            assert faulty.wait(60)
            assert not ticket._wait(0.2), "the writer still has its memory"
            hold.release()
            error = ticket.exception(60)
        if when == "before":
            assert isinstance(error, fp.SaveAbandonedError) and "a fault" in str(error)
            assert ckpt.all_steps() == [] and ckpt.last_error is error
        else:
            assert error is None and ckpt.all_steps() == [1]
            assert support.difference(ckpt.load().state, before) == ""
        ckpt.save(2, training.state()).result(60)
        assert len(log.read_text().splitlines()) == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fault_while_a_save_is_followed_ends_it_as_the_writer_does_and_not_earlier(
    when: str, tmp_path: Any
) -> None:
    faults.run(fail_to_follow, str(tmp_path), when, shim=True)
