# SPDX-License-Identifier: Apache-2.0
"""Threads and processes side by side: several saves at once, forks while bytes are on their way,
children of every kind (facebook/rocksdb#11233)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import faults_support as faults
import pytest
from faults_support import ENGINES, INTERCEPTED, Target

import fastpersist as fp

MIB = 1 << 20


def in_threads(jobs: list[Callable[[], None]]) -> None:
    """Runs all at once; raises what the first failing one raised."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[job]) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# --- Threads ---


@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
def test_four_threads_save_to_four_paths_at_once(engine: str, tmp_path: Any) -> None:
    targets = []
    for i in range(4):
        (tmp_path / str(i)).mkdir()
        targets.append(Target(tmp_path / str(i), (i + 1) * 300_000 + i))

    def save(target: Target) -> None:
        for _ in range(5):
            target.put_old()
            target.succeeds(engine, block_bytes=64 << 10)

    in_threads([lambda target=target: save(target) for target in targets])


def test_threads_that_save_to_one_path_leave_one_of_their_files(tmp_path: Any) -> None:
    path = str(tmp_path / "model.pt")
    states = [faults.state_of(200_000 + i, i) for i in range(4)]
    whole = {faults.torch_bytes(state, path) for state in states}
    over = threading.Event()

    def save(i: int) -> None:
        options = fp.Options(engine=ENGINES[i], block_bytes=16 << 10)
        for _ in range(10):
            fp.save(states[i], path, options=options)

    def look() -> None:
        while not over.is_set():
            if os.path.exists(path):
                assert faults.content(path) in whole, "a reader sees a part of a file"

    reader_errors: list[BaseException] = []

    def reader() -> None:
        try:
            look()
        except BaseException as error:
            reader_errors.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    in_threads([lambda i=i: save(i) for i in range(4)])
    over.set()
    thread.join()
    assert not reader_errors, reader_errors
    assert os.listdir(tmp_path) == ["model.pt"]


def test_python_runs_while_bytes_are_written(tmp_path: Any) -> None:
    state = faults.state_of(60 * MIB)
    path = str(tmp_path / "model.pt")
    fp.save(state, path)
    beats: list[float] = []
    over = threading.Event()

    def beat() -> None:
        while not over.is_set():
            beats.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=beat)
    thread.start()
    before = time.perf_counter()
    for _ in range(3):
        fp.save(state, path)
    after = time.perf_counter()
    over.set()
    thread.join()
    # With the lock of the interpreter held no beat would fall into a save, and three into all.
    assert sum(before < moment < after for moment in beats) > 6


# --- fork ---


def save_while_forking(engine: str, folder: str) -> int:
    """A thread forks a child every millisecond; some write to their memory first."""
    target = Target(folder, 2 * MIB)
    over = threading.Event()
    children = 0

    def fork() -> None:
        nonlocal children
        while not over.wait(0.001):
            children += 1
            pid = os.fork()
            if pid != 0:
                os.waitpid(pid, 0)
                continue
            if children % 3 == 0:
                for tensor in target.state["model"].values():
                    tensor.fill_(0)  # a copy: the parent's stay as they are
            if children % 5 == 0:
                raise SystemExit  # leaves through the C library's exit, with its handlers
            os._exit(0)

    thread = threading.Thread(target=fork)
    thread.start()
    try:
        for _ in range(30):
            target.put_old()
            target.succeeds(engine, block_bytes=64 << 10, retries=0)
    finally:
        over.set()
        thread.join()
    return children


@pytest.mark.parametrize("engine", ENGINES)
def test_children_that_come_and_go_change_no_byte(engine: str, tmp_path: Any) -> None:
    assert faults.run(save_while_forking, engine, str(tmp_path)) > 5


def save_in_a_forked_child(folder: str) -> None:
    target = Target(folder)
    target.succeeds("auto")
    target.put_old()
    end, other_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            target.save("auto")
            said = "saved"
        except fp.ForkedError as error:
            said = f"{isinstance(error, fp.Error)} {error}"
        os.write(other_end, said.encode())
        os._exit(0)
    os.close(other_end)
    said = os.read(end, 10_000).decode()
    os.waitpid(pid, 0)
    assert said.startswith("True ") and "spawn" in said, said
    target.is_untouched()
    target.succeeds("auto")  # the parent is not disturbed


def test_a_forked_child_gets_an_error_and_does_not_hang(tmp_path: Any) -> None:
    faults.run(save_in_a_forked_child, str(tmp_path), timeout=30)


def save_in_a_child_forked_before(folder: str) -> None:
    import torch  # loaded, but nothing has been saved

    assert torch.ones(2).sum() == 2
    pid = os.fork()
    if pid == 0:
        Target(folder).succeeds("auto")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_child_forked_before_the_first_save_may_save(tmp_path: Any) -> None:
    faults.run(save_in_a_child_forked_before, str(tmp_path))


def save_in_a_worker(path: str, seed: int) -> fp.SaveInfo:
    return fp.save(faults.state_of(30_000, seed), path)


def test_spawned_processes_save(tmp_path: Any) -> None:
    fp.save(faults.state_of(1000), str(tmp_path / "parent.pt"))
    paths = [str(tmp_path / f"rank{i}.pt") for i in range(2)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        infos = pool.starmap(save_in_a_worker, zip(paths, range(2), strict=True))
    for seed, (path, info) in enumerate(zip(paths, infos, strict=True)):
        assert info.path == path and info.seconds["total"] > 0
        assert faults.content(path) == faults.torch_bytes(faults.state_of(30_000, seed), path)


class Forks:
    """Forks while it is pickled; the child leaves as if it had failed."""

    def __reduce__(self) -> Any:
        pid = os.fork()
        if pid == 0:
            raise SystemExit
        os.waitpid(pid, 0)
        return (int, (3,))


def fork_while_torch_writes(folder: str) -> None:
    parent = os.getpid()
    target = Target(folder)
    state = {"x": Forks()}
    try:
        fp.save(state, target.path, _use_new_zipfile_serialization=False)
    except SystemExit:
        os._exit(0)  # the child: it has left the save
    assert os.getpid() == parent
    assert faults.content(target.path) != target.old
    assert faults.temporaries(folder) == []


def test_a_child_that_leaves_a_save_removes_nothing_of_its_parent(tmp_path: Any) -> None:
    faults.run(fork_while_torch_writes, str(tmp_path))


def descriptors_of_a_child(engine: str, folder: str, call: str) -> list[str]:
    """A child forked in the middle of a save, as a loader's worker may be, and what it has open."""
    target = Target(folder)
    with faults.failing(f"{call} 1 1 fork 0 .fp-"):
        target.succeeds(engine)
    pid = faults.forked_child()
    held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    target.put_old()
    target.succeeds(engine)  # nobody's lock is in the way
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return [name for name in held if name.startswith(folder)]


@pytest.mark.parametrize("call", ["fallocate", "pwrite", "fdatasync", "renameat"])
@pytest.mark.parametrize("engine", INTERCEPTED)
def test_a_worker_forked_during_a_save_does_not_hold_its_file(
    engine: str, call: str, tmp_path: Any
) -> None:
    # It would keep the temporary file's lock, and the bytes of removed checkpoints on the disk.
    held = faults.run(descriptors_of_a_child, engine, str(tmp_path), call, shim=True)
    assert held in ([], [str(tmp_path)])  # the folder costs nothing
