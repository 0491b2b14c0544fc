# SPDX-License-Identifier: Apache-2.0
"""Signals during a save: calls that they interrupt are repeated, handlers run, Ctrl-C leaves the
old or the new file (pytorch/pytorch#8477, axboe/liburing#1360)."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import faults_support as faults
import pytest
import torch
from faults_support import ENGINES, INTERCEPTED, Target

import fastpersist as fp

SAVES = 50


@contextlib.contextmanager
def storm() -> Iterator[dict[str, int]]:
    """SIGALRM every millisecond, SIGCHLD from children that exit; counts the handlers' runs."""
    counts = {"SIGALRM": 0, "SIGCHLD": 0}
    over = threading.Event()

    def handler(number: int, frame: Any) -> None:
        counts[signal.Signals(number).name] += 1

    def spawn() -> None:
        while not over.wait(0.001):
            os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)

    signal.signal(signal.SIGALRM, handler)
    signal.signal(signal.SIGCHLD, handler)
    thread = threading.Thread(target=spawn)
    thread.start()
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        yield counts
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        over.set()
        thread.join()


def save_in_a_storm(engine: str, folder: str) -> dict[str, int]:
    target = Target(folder, 512 << 10)
    with storm() as counts:
        for _ in range(SAVES):
            target.put_old()
            target.succeeds(engine, retries=0)
    return counts


@pytest.mark.parametrize("engine", ENGINES)
def test_saves_in_a_storm_of_signals_are_right(engine: str, tmp_path: Any) -> None:
    counts = faults.run(save_in_a_storm, engine, str(tmp_path))
    assert counts["SIGALRM"] > 0 and counts["SIGCHLD"] > 0, counts


def save_much_in_a_storm(engine: str, kind: str) -> None:
    with faults.mounted(kind, 320) as folder:
        state = faults.state_of(40 << 20)
        path = f"{folder}/model.pt"
        with storm():
            fp.save(state, path, options=fp.Options(engine=engine, retries=0))
        assert faults.content(path) == faults.torch_bytes(state, path)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "xfs"])
def test_a_long_preallocation_ends_in_a_storm_of_signals(kind: str) -> None:
    # fallocate(2) on tmpfs takes everything back when a signal arrives, and starts from nothing.
    faults.run(save_much_in_a_storm, "auto", kind, mounts=True, timeout=40)


class Interrupts:
    """Raises SIGINT while it is pickled."""

    def __reduce__(self) -> Any:
        signal.raise_signal(signal.SIGINT)
        return (int, (3,))


def interrupt_the_pickling(folder: str) -> None:
    target = Target(folder)
    target.state["late"] = Interrupts()
    try:
        target.save("auto")
    except KeyboardInterrupt:
        target.is_untouched()
    else:
        raise AssertionError("KeyboardInterrupt was lost")


def test_ctrl_c_while_pickling_leaves_the_old_file(tmp_path: Any) -> None:
    faults.run(interrupt_the_pickling, str(tmp_path))


def interrupt_this_call(engine: str, folder: str, call: str) -> None:
    target = Target(folder)
    try:
        with faults.failing(f"{call} 1 1 signal {int(signal.SIGINT)} /"):
            target.save(engine)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("KeyboardInterrupt was lost")
    # Bytes move without Python: the save is carried through, and the interrupt comes after it.
    assert faults.content(target.path) == target.new
    assert faults.temporaries(folder) == []


@pytest.mark.parametrize("call", "openat fallocate pwrite fdatasync renameat fsync".split())
@pytest.mark.parametrize("engine", INTERCEPTED)
def test_ctrl_c_while_writing_is_raised_when_the_new_file_is_complete(
    engine: str, call: str, tmp_path: Any
) -> None:
    faults.run(interrupt_this_call, engine, str(tmp_path), call, shim=True)


def interrupt_at_random(folder: str, seed: int) -> set[str]:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    chance = random.Random(seed)
    target = Target(folder, 1 << 20)
    outcomes = set()
    for _ in range(40):
        target.put_old()
        interrupted = False
        engine = chance.choice(ENGINES)
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, 0.02))
            target.save(engine)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted = True
        now = faults.content(target.path)
        assert now == target.new or (interrupted and now == target.old)
        assert faults.temporaries(folder) == []
        outcomes.add(
            f"{'interrupted, ' if interrupted else ''}{'new' if now == target.new else 'old'}"
        )
    return outcomes


def test_ctrl_c_at_random_moments_leaves_the_old_or_the_new_file(tmp_path: Any) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    print(faults.run(interrupt_at_random, str(tmp_path), seed))


def interrupt_many_picklings() -> int:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    state = {f"layer{i}": torch.ones(2) for i in range(500)}
    interrupted = 0
    for i in range(300):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + (i % 30) * 0.0001)
            fp.save(state, io.BytesIO())
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
    return interrupted


def test_ctrl_c_in_the_middle_of_pickling_is_an_exception_like_any_other() -> None:
    assert faults.run(interrupt_many_picklings) > 0


def save_with_a_handler_that_raises(folder: str) -> None:
    """What a handler raises comes out of save, and the next save is not disturbed."""

    class Preempted(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise Preempted

    signal.signal(signal.SIGTERM, handler)
    target = Target(folder)
    try:
        with faults.failing(f"pwrite 2 2 signal {int(signal.SIGTERM)} .fp-"):
            target.save("threads")
    except Preempted:
        pass
    else:
        raise AssertionError("the handler's exception was lost")
    assert faults.content(target.path) == target.new
    target.put_old()
    target.succeeds("threads")


def test_what_a_handler_raises_comes_out_of_a_finished_save(tmp_path: Any) -> None:
    faults.run(save_with_a_handler_that_raises, str(tmp_path), shim=True)


def interrupt_the_wait_for_a_reader(folder: str) -> None:
    path = f"{folder}/pipe"
    os.mkfifo(path)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        fp.save(faults.state_of(100), path)
    except KeyboardInterrupt:
        return
    raise AssertionError("a pipe without a reader took the file")


@pytest.mark.xfail(
    strict=True, reason="open(2) is repeated after a signal before Python handlers can run"
)
def test_ctrl_c_ends_the_wait_for_a_reader_of_a_pipe() -> None:
    with tempfile.TemporaryDirectory() as folder:
        faults.run(interrupt_the_wait_for_a_reader, folder, timeout=3)
