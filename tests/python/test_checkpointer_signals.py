# SPDX-License-Identifier: Apache-2.0
"""A signal from outside, as a scheduler or a container runtime sends it, in every phase of a save:
the process ends with the signal's status, the newest committed checkpoint restores bit for bit, and
the next run removes whatever is left. The device is held where the signal shall come."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import sys
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

# (call that is held, in files whose path contains this, from which call on); "" holds writes.
PHASES: dict[str, tuple[str, str, int]] = {
    "make the directory": ("mkdirat", "step-00000002", 1),
    "allocate": ("fallocate", "step-00000002/state.pt", 1),
    "write": ("", "step-00000002/state.pt", 1),
    "write per rank": ("", "step-00000002/rank-00000.pt", 1),
    "sync the file": ("fdatasync", "step-00000002/state.pt", 1),
    "sync the owner": ("fsync", "step-00000002", 1),
    "sync the directory": ("fsync", "step-00000002", 2),
    "write the manifest": ("openat", "step-00000002/manifest", 1),
    "commit": ("renameat", "step-00000002/manifest", 1),
    "sync the commit": ("fsync", "step-00000002", 3),
    "retire": ("renameat", "step-00000001/manifest", 1),
    "remove the first file": ("unlinkat", "step-00000001", 1),
    "remove the last file": ("unlinkat", "step-00000001", 3),
}
COMMITTED = ("sync the commit", "retire", "remove the first file", "remove the last file")
"""The new checkpoint counts although the device never answers again."""

_kept: list[Any] = []


# --- The runs that are ended ---


def is_in(name: str) -> Any:
    """A condition: the main thread is in a function of that name."""
    thread = threading.main_thread().ident

    def condition() -> bool:
        frame = sys._current_frames().get(thread or 0)
        while frame is not None and frame.f_code.co_name != name:
            frame = frame.f_back
        return frame is not None

    return condition


def when(condition: Any, act: Any) -> None:
    """Acts, in a thread, once the condition holds."""

    def watch() -> None:
        while not condition():
            time.sleep(0.0005)
        act()

    threading.Thread(target=watch, daemon=True).start()


def chain(folder: str, earlier: str) -> None:
    """The handler that was there before the checkpointer."""

    def handler(number: int, frame: Any) -> None:
        pathlib.Path(folder, "chained").touch()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if earlier == "chained":
        signal.signal(signal.SIGTERM, handler)


def begin(folder: str, **arguments: Any) -> tuple[fp.Checkpointer, Training]:
    """A run with one checkpoint, that of step 1, which the next one replaces."""
    training = Training()
    arguments.setdefault("drain_timeout", MANY)
    ckpt = support.open_run(folder, keep_last=1, **arguments)
    ckpt.attach(training.optimizer)
    ckpt.save(1, training.state(), per_rank={"rank": 1}).result(60)
    training.step()
    return ckpt, training


def hold_for_good(folder: str, phase: tuple[str, str, int]) -> support.Hold:
    call, path, number = phase
    hold = held(folder, path=path, call=call, number=number)
    device = hold.__enter__()  # not left: the process ends in it
    _kept.append(hold)
    return device


def be_ended_in_a_phase(folder: str, phase: str, earlier: str, answers: bool) -> None:
    """Step 2 is held in the phase; if it `answers`, the device goes on once the handler waits."""
    chain(folder, earlier)
    ckpt, training = begin(folder)
    device = hold_for_good(folder, PHASES[phase])
    if answers:
        when(is_in("_drain"), device.release)
    ckpt.save(2, training.state(), per_rank={"rank": 2})
    while True:
        training.backward()
        time.sleep(0.001)


def values_of(step: int) -> dict[str, Any]:
    """What the checkpoint of a step holds."""
    training = Training()
    for _ in range(step - 1):
        training.step()
    return training.values()


def check_what_is_left(folder: Any, newest: int) -> None:
    """The newest is there bit for bit, and the next run has a clean directory again."""
    with support.open_run(folder, keep_last=1) as ckpt:
        saved = ckpt.load()
        assert saved.step == newest == ckpt.latest_step()
        assert support.difference(saved.state, values_of(newest)) == ""
        assert saved.per_rank in ({"rank": newest}, None)
        again = Training()
        targets = {"model": again.model, "optim": again.optimizer}
        assert ckpt.restore(targets) == newest
        assert support.difference(again.state(), values_of(newest)) == ""
        ckpt.save(3, again.state()).result(60)
        assert ckpt.all_steps() == [3]
    names = [name for name in os.listdir(os.path.join(folder, "run")) if "step" in name]
    assert names == ["step-00000003"], names


def started(fn: Any, folder: Any, *args: Any, ready: str = "hold.reached") -> Any:
    """A child that runs fn(folder, ...) and has reached the place where it is held."""
    child = faults.start(
        fn, str(folder), *args, shim=True, exits=True, stderr=os.path.join(folder, "stderr")
    )
    support.wait_for(pathlib.Path(folder, ready))
    return child


def errors_of(folder: Any) -> str:
    return pathlib.Path(folder, "stderr").read_text()


# --- In every phase ---


@pytest.mark.parametrize("earlier", ["default", "chained"])
@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_in_any_phase_ends_the_process_with_its_status_and_the_save_complete(
    phase: str, earlier: str, tmp_path: Any
) -> None:
    child = started(be_ended_in_a_phase, tmp_path, phase, earlier, True)
    child.kill(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM, errors_of(tmp_path)
    assert (tmp_path / "chained").exists() is (earlier == "chained")
    check_what_is_left(tmp_path, newest=2)


def test_a_container_that_stops_kills_after_a_second_and_the_newest_stays(tmp_path: Any) -> None:
    """SIGTERM, a second, SIGKILL; in all phases at once, on devices that never answer again."""
    children = {}
    for number, phase in enumerate(PHASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        children[phase] = (folder, started(be_ended_in_a_phase, folder, phase, "chained", False))
    for _, child in children.values():
        child.kill(signal.SIGTERM)
    time.sleep(1)
    for _, child in children.values():
        child.kill(signal.SIGKILL)
    for phase, (folder, child) in children.items():
        # Who had nothing in flight any more needed no second.
        ends = (-signal.SIGTERM, -signal.SIGKILL) if phase in COMMITTED else (-signal.SIGKILL,)
        assert child.wait() in ends, (phase, errors_of(folder))
        check_what_is_left(folder, newest=2 if phase in COMMITTED else 1)


# --- In the call of save ---


def be_ended_while_pickling(folder: str, earlier: str) -> None:
    chain(folder, earlier)
    ckpt, training = begin(folder)

    class Slow:
        """Is pickled until the process ends."""

        def __reduce__(self) -> Any:
            pathlib.Path(folder, "ready").touch()
            while True:
                time.sleep(0.001)

    ckpt.save(2, {**training.state(), "slow": Slow()})


@pytest.mark.parametrize("earlier", ["default", "chained"])
def test_sigterm_while_the_state_is_pickled_ends_the_process_at_once(
    earlier: str, tmp_path: Any
) -> None:
    child = started(be_ended_while_pickling, tmp_path, earlier, ready="ready")
    child.kill(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM, errors_of(tmp_path)
    assert (tmp_path / "chained").exists() is (earlier == "chained")
    check_what_is_left(tmp_path, newest=1)


def be_ended_while_it_waits(folder: str, where: str) -> None:
    """The main thread waits for the save of step 2, and another one is interrupted: as if the
    signal had come just before Python began to block."""
    ckpt, training = begin(folder, wait_timeout=MANY)
    device = hold_for_good(folder, PHASES["write"])
    ticket = ckpt.save(2, training.state(), per_rank={"rank": 2})
    device.reached()
    when(is_in("_wait"), pathlib.Path(folder, "ready").touch)
    when(is_in("_drain"), device.release)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # in this thread
    if where == "save":
        ckpt.save(9, training.state())
    if where == "result":
        ticket.result()
    ckpt.close()


@pytest.mark.parametrize("where", ["save", "result", "close"])
def test_sigterm_is_heard_while_the_main_thread_waits_for_a_save_and_completes_it(
    where: str, tmp_path: Any
) -> None:
    child = started(be_ended_while_it_waits, tmp_path, where, ready="ready")
    child.kill(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM, errors_of(tmp_path)
    check_what_is_left(tmp_path, newest=2)


# --- With a lock of the user's ---


def be_ended_with_a_lock(folder: str, wants: str, answers: bool) -> None:
    """The main thread holds a lock that code of the user's wants, which FastPersist calls."""
    logging.basicConfig()  # to stderr
    lock, wanted, armed = threading.Lock(), threading.Event(), threading.Event()

    def take(*_: Any) -> None:
        if armed.is_set():
            wanted.set()
            with lock:
                pass

    class Locked(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            take()

    arguments: dict[str, Any] = {"drain_timeout": MANY if answers else 0.3}
    if wants == "progress":
        arguments["progress"] = take
    ckpt, training = begin(folder, **arguments)
    device = hold_for_good(folder, PHASES["write"])
    with lock:
        armed.set()
        ticket = ckpt.save(2, training.state(), per_rank={"rank": 2})
        device.reached()
        if wants == "callback":
            ticket.add_done_callback(take)
            device.release()
        if wants == "logging":
            logging.getLogger("fastpersist").addHandler(Locked())
        if wants in ("callback", "progress"):
            assert wanted.wait(60)
        if answers:
            when(is_in("_drain"), device.release)
        pathlib.Path(folder, "ready").touch()
        while True:
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("wants", "answers", "newest"),
    [
        ("nobody", True, 2),
        ("callback", True, 2),
        ("progress", True, 2),
        ("progress", False, 1),
        ("logging", False, 1),
    ],
)
def test_sigterm_while_the_main_thread_holds_a_lock_ends_the_process(
    wants: str, answers: bool, newest: int, tmp_path: Any
) -> None:
    child = started(be_ended_with_a_lock, tmp_path, wants, answers, ready="ready")
    child.kill(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM, errors_of(tmp_path)
    late = "SIGTERM: a save in flight was not finished in time" in errors_of(tmp_path)
    # With "logging" the message itself waits for the lock.
    assert late is (wants == "progress" and not answers)
    check_what_is_left(tmp_path, newest)
