# SPDX-License-Identifier: Apache-2.0
"""How a process ends while a save is in flight: the save is finished, or the last complete
checkpoint stays; and nobody waits longer than was allowed."""

from __future__ import annotations

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


def steps_in(folder: Any) -> list[int]:
    """The complete checkpoints there, each of which must load."""
    with support.open_run(folder) as ckpt:
        steps = ckpt.all_steps()
        for step in steps:
            assert ckpt.load(step).state["model"], step
        return steps


def let_go_when(hold: support.Hold, condition: Any) -> None:
    """Lets the device go, in a thread, once the condition holds."""

    def watch() -> None:
        while not condition():
            time.sleep(0.0005)
        hold.release()

    threading.Thread(target=watch, daemon=True).start()


def is_in(name: str, file: str = "") -> Any:
    """A condition: this thread is in a function of that name."""
    thread = threading.get_ident()

    def condition() -> bool:
        frame = sys._current_frames().get(thread)
        while frame is not None:
            if frame.f_code.co_name == name and file in frame.f_code.co_filename:
                return True
            frame = frame.f_back
        return False

    return condition


# --- The interpreter's exit ---


def leave(folder: str, how: str, **arguments: Any) -> None:
    """Ends the interpreter while the device is held; it is let go once the exit waits for it."""
    training = Training()
    ckpt = support.open_run(folder, drain_timeout=MANY)
    if how == "context":
        with ckpt:
            save_held(folder, ckpt, training)
            return
    save_held(folder, ckpt, training)
    if how == "dropped":
        del ckpt
    if how == "sys.exit":
        sys.exit(3)
    if how == "exception":
        raise KeyError("uncaught")
    if how == "os._exit":
        os._exit(4)
    if how == "close":
        ckpt.close()


def save_held(folder: str, ckpt: fp.Checkpointer, training: Training) -> None:
    ckpt.attach(training.optimizer)
    ckpt.save(1, training.state()).result()
    hold = held(folder)
    device = hold.__enter__()  # not left: the interpreter ends in it
    ckpt.save(2, training.state())
    device.reached()
    let_go_when(device, is_in("_wait", "_ticket.py"))
    _kept.append(hold)


_kept: list[Any] = []

ENDS = {"return": 0, "sys.exit": 3, "exception": 1, "close": 0, "context": 0, "dropped": 0}


def ended(fn: Any, *args: Any, folder: Any, timeout: float = 60) -> tuple[int, str]:
    """How a child ended, and what it wrote to stderr."""
    errors = pathlib.Path(folder, "stderr")
    child = faults.start(fn, *args, shim=True, exits=True, stderr=str(errors))
    code = child.wait(timeout)
    return code, errors.read_text()


@pytest.mark.parametrize("how", ENDS)
def test_however_the_interpreter_ends_the_save_in_flight_is_finished(
    how: str, tmp_path: Any
) -> None:
    code, errors = ended(leave, str(tmp_path), how, folder=tmp_path)
    assert code == ENDS[how], errors
    assert ("KeyError: 'uncaught'" in errors) is (how == "exception")
    assert steps_in(tmp_path) == [1, 2]


def test_os_exit_leaves_the_last_complete_checkpoint(tmp_path: Any) -> None:
    code, errors = ended(leave, str(tmp_path), "os._exit", folder=tmp_path)
    assert code == 4, errors
    assert steps_in(tmp_path) == [1]


def leave_a_dead_device(folder: str, how: str) -> None:
    training = Training()
    ckpt = support.open_run(folder, drain_timeout=0.3)
    other = fp.Checkpointer(os.path.join(folder, "other"), drain_timeout=0.3)
    other.save(1, training.state()).result()
    ckpt.attach(training.optimizer)
    ckpt.save(1, training.state()).result()
    hold = held(folder)
    device = hold.__enter__()
    _kept.append(hold)
    globals()["never_collected"] = ckpt
    ticket = ckpt.save(2, training.state())
    device.reached()
    if how == "context":
        with ckpt:
            raise KeyError("uncaught")
    if how == "waiting":
        threading.Thread(target=ticket.exception, daemon=True).start()
    if how == "exception":
        raise KeyError("uncaught")


@pytest.mark.parametrize("how", ["return", "exception", "context", "waiting"])
def test_a_device_that_does_not_answer_holds_the_exit_up_for_drain_timeout_only(
    how: str, tmp_path: Any
) -> None:
    code, errors = ended(leave_a_dead_device, str(tmp_path), how, folder=tmp_path)
    assert code == (1 if how in ("exception", "context") else 0), errors
    assert "Fatal" not in errors and "terminate" not in errors
    assert steps_in(tmp_path) == [1]


# --- Signals ---


def get_signal(folder: str, number: int, earlier: str, phase: tuple[str, str]) -> None:
    """Sends itself a signal while the device is held in a phase of the save."""
    log = pathlib.Path(folder, "log")

    def handler(got: int, frame: Any) -> None:
        log.write_text(f"{got}")
        if earlier == "exits":
            sys.exit(7)

    if earlier == "ignored":
        signal.signal(number, signal.SIG_IGN)
    elif earlier != "none":
        signal.signal(number, handler)
    training = Training()
    ckpt = support.open_run(folder, drain_timeout=MANY)
    ckpt.attach(training.optimizer)
    ckpt.save(1, training.state()).result()
    call, path = phase
    hold = held(folder, path=path, call=call) if call else held(folder)
    device = hold.__enter__()
    _kept.append(hold)
    ticket = ckpt.save(2, training.state())
    device.reached()
    let_go_when(device, is_in("_drain"))
    if earlier == "ignored":
        device.release()
    os.kill(os.getpid(), number)
    ticket.result(60)
    ckpt.close()


PHASES = {
    "write": ("", ""),
    "fdatasync": ("fdatasync", "state.pt"),
    "manifest": ("openat", "manifest"),
    "rename": ("renameat", "manifest"),
    "directory sync": ("fsync", "step-00000002"),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_in_any_phase_ends_the_process_once_the_save_is_complete(
    number: int, phase: str, tmp_path: Any
) -> None:
    code, errors = ended(get_signal, str(tmp_path), number, "none", PHASES[phase], folder=tmp_path)
    assert code == -number, errors
    assert ("KeyboardInterrupt" in errors) is (number == signal.SIGINT)
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("earlier", ["returns", "exits", "ignored"])
def test_an_earlier_handler_runs_once_the_save_is_complete(earlier: str, tmp_path: Any) -> None:
    code, errors = ended(
        get_signal, str(tmp_path), signal.SIGTERM, earlier, PHASES["write"], folder=tmp_path
    )
    assert code == (7 if earlier == "exits" else 0), errors
    assert (tmp_path / "log").exists() is (earlier != "ignored")
    assert steps_in(tmp_path) == [1, 2]


def get_signals_with_a_dead_device(folder: str, numbers: list[int], timeout: float) -> None:
    training = Training()
    ckpt = support.open_run(folder, drain_timeout=timeout)
    ckpt.attach(training.optimizer)
    ckpt.save(1, training.state()).result()
    hold = held(folder)
    device = hold.__enter__()
    _kept.append(hold)
    ckpt.save(2, training.state())
    device.reached()
    draining = is_in("_drain")

    def send_more() -> None:
        for number in numbers[1:]:
            while not draining():
                time.sleep(0.0005)
            os.kill(os.getpid(), number)

    threading.Thread(target=send_more, daemon=True).start()
    os.kill(os.getpid(), numbers[0])
    training.step()


def test_a_device_that_does_not_answer_holds_a_signal_up_for_drain_timeout_only(
    tmp_path: Any,
) -> None:
    code, errors = ended(get_signals_with_a_dead_device, str(tmp_path), [15], 0.3, folder=tmp_path)
    assert code == -signal.SIGTERM, errors
    assert steps_in(tmp_path) == [1]


def test_a_second_signal_does_not_wait(tmp_path: Any) -> None:
    code, errors = ended(
        get_signals_with_a_dead_device, str(tmp_path), [15, 15], MANY, folder=tmp_path
    )
    assert code == -signal.SIGTERM, errors
    assert steps_in(tmp_path) == [1]


def get_a_signal_while_a_step_waits(folder: str) -> None:
    training = Training(layers=40)
    ckpt = support.open_run(folder, drain_timeout=0.2, wait_timeout=MANY, memory=1 << 20)
    ckpt.attach(training.optimizer)
    hold = held(folder)
    device = hold.__enter__()
    _kept.append(hold)
    ckpt.save(2, training.state())
    device.reached()
    waiting = is_in("wait_before_change")

    def send() -> None:
        while not waiting():
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    training.step()


def test_a_signal_is_heard_while_a_step_waits_for_the_device(tmp_path: Any) -> None:
    code, errors = ended(get_a_signal_while_a_step_waits, str(tmp_path), folder=tmp_path)
    assert code == -signal.SIGTERM, errors


def chain_handlers(folder: str) -> list[str]:
    """A user's handler that calls ours, installed between two checkpointers."""
    called: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: called.append("first"))
    one = fp.Checkpointer(os.path.join(folder, "one"))
    ours: Any = signal.getsignal(signal.SIGTERM)

    def users(number: int, frame: Any) -> None:
        called.append("users")
        ours(number, frame)

    signal.signal(signal.SIGTERM, users)
    one.close()
    two = fp.Checkpointer(os.path.join(folder, "two"))
    signal.raise_signal(signal.SIGTERM)
    two.close()
    assert signal.getsignal(signal.SIGTERM) is users
    signal.raise_signal(signal.SIGTERM)
    return called


def test_handlers_that_call_each_other_end_in_no_circle(tmp_path: Any) -> None:
    found = faults.run(chain_handlers, str(tmp_path))
    assert found == ["users", "first", "users", "first"]


def save_in_a_handler(folder: str) -> list[Any]:
    """The usual last save: a handler that saves and closes; here in the middle of a save."""
    training = Training()
    ckpt = support.open_run(folder, handle_signals=False)
    outcomes: list[Any] = []

    def handler(number: int, frame: Any) -> None:
        try:
            outcomes.append(ckpt.save(9, training.state()).result(60).step)
        except fp.SaveInFlightError as error:
            outcomes.append(str(error))

    class Interrupts:
        def __reduce__(self) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return (int, (3,))

    signal.signal(signal.SIGUSR1, handler)
    ckpt.save(1, {"model": {"x": Interrupts()}}).result(60)
    signal.raise_signal(signal.SIGUSR1)
    ckpt.close()
    return outcomes


def test_a_save_in_a_signal_handler_works_or_says_why_not(tmp_path: Any) -> None:
    inside, outside = faults.run(save_in_a_handler, str(tmp_path))
    assert "while the same thread is in save()" in inside
    assert outside == 9


def open_outside_the_main_thread(folder: str) -> Any:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def work() -> None:
        with support.open_run(folder) as ckpt:
            ckpt.save(1, {"model": {"x": 1}})

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    return steps_in(folder)


def test_a_checkpointer_made_in_another_thread_leaves_signals_alone(tmp_path: Any) -> None:
    assert faults.run(open_outside_the_main_thread, str(tmp_path)) == [1]
