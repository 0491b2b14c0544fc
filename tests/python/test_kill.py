# SPDX-License-Identifier: Apache-2.0
"""A process that is killed while it saves: the path holds the old file or the new one, whole.

Its temporary file may stay; the next save to that path removes it (Lightning-AI/lightning#19970).
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time
from typing import Any

import faults_support as faults
import pytest
from faults_support import ENGINES, INTERCEPTED, Target

import fastpersist as fp

KILLS = 100
SIZE = 3 << 20


def save_in_a_loop(path: str, engine: str, turn: int) -> None:
    """Saves two states in turn to one path until it is killed; tells when it begins."""
    options = fp.Options(engine=engine, block_bytes=64 << 10, staging_bytes=1 << 20)
    states = [faults.state_of(SIZE, seed) for seed in (1, 2)]
    pathlib.Path(path + ".ready").touch()
    while True:
        fp.save(states[turn % 2], path, options=options)
        turn += 1


def wait_for(path: str) -> None:
    deadline = time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < deadline, "the child does not begin"
        time.sleep(0.0005)
    os.unlink(path)


def test_a_hundred_kills_at_random_moments_leave_the_old_or_the_new_file(tmp_path: Any) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)  # shown when the test fails
    chance = random.Random(seed)
    path = str(tmp_path / "model.pt")
    whole = {faults.torch_bytes(faults.state_of(SIZE, n), path): n for n in (1, 2)}
    fp.save(faults.state_of(SIZE, 1), path)
    left = 0
    for turn in range(KILLS):
        child = faults.start(save_in_a_loop, path, chance.choice(ENGINES), turn)
        wait_for(path + ".ready")
        time.sleep(chance.uniform(0, 0.05))
        child.kill()
        assert child.wait() == -signal.SIGKILL
        assert faults.content(path) in whole, f"kill {turn}: neither the old file nor the new one"
        # A killed process may have died before it could remove what an earlier one left.
        now = len(faults.temporaries(tmp_path))
        assert now <= left + 1, f"kill {turn}: more than one temporary file of one process"
        left = now
    # The kernel gives up an io_uring of the process killed last, and its lock with it, a moment
    # after wait() has returned: until then its file passes for that of a living process.
    deadline = time.monotonic() + 60
    while os.listdir(tmp_path) != ["model.pt"]:
        assert time.monotonic() < deadline, "no later save removes what killed ones left"
        fp.save(faults.state_of(SIZE, 2), path)
    fp.save(faults.state_of(SIZE, 2), path)
    assert whole[faults.content(path)] == 2
    assert os.listdir(tmp_path) == ["model.pt"]


def save_and_die(folder: str, engine: str, rule: str) -> None:
    target = Target(folder)
    with faults.failing(rule):
        target.save(engine)
    raise AssertionError("the process survived")


# (call, which, path, whether the new file is in place, whether a temporary file stays)
MOMENTS = [
    ("fallocate", 1, ".fp-", False, True),
    ("pwrite", 1, ".fp-", False, True),
    ("pwrite", 5, ".fp-", False, True),
    ("ftruncate", 1, ".fp-", False, True),
    ("fdatasync", 1, ".fp-", False, True),
    ("close", 1, ".fp-", False, True),
    ("renameat", 1, ".fp-", False, True),
    ("fsync", 1, "/", True, False),
]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: f"{moment[0]} {moment[1]}")
@pytest.mark.parametrize("engine", INTERCEPTED)
def test_a_kill_just_before_this_call_leaves_the_old_or_the_new_file(
    engine: str, moment: tuple[str, int, str, bool, bool], tmp_path: Any
) -> None:
    call, nth, path, is_new, leaves = moment
    target = Target(tmp_path)
    rule = f"{call} {nth} {nth} signal {int(signal.SIGKILL)} {path}"
    child = faults.start(save_and_die, str(tmp_path), engine, rule, shim=True)
    assert child.wait() == -signal.SIGKILL
    assert faults.content(target.path) == (target.new if is_new else target.old)
    assert len(faults.temporaries(tmp_path)) == leaves
    target.succeeds(engine)


def kill_while_another_saves(folder: str) -> None:
    """A temporary file whose owner lives is not a leftover."""
    target = Target(folder)
    os.mkfifo(f"{folder}/go")
    with faults.failing(f"fdatasync 1 1 signal {int(signal.SIGSTOP)} .fp-"):
        target.succeeds("threads")


def test_the_temporary_file_of_a_living_process_is_left_alone(tmp_path: Any) -> None:
    child = faults.start(kill_while_another_saves, str(tmp_path), shim=True)
    wait_for(str(tmp_path / "go"))
    stat = pathlib.Path(f"/proc/{child.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    (theirs,) = faults.temporaries(tmp_path)
    path = str(tmp_path / "model.pt")
    state = faults.state_of(5_000, 3)
    fp.save(state, path)  # a save of ours to the same path
    assert faults.content(path) == faults.torch_bytes(state, path)
    assert faults.temporaries(tmp_path) == [theirs]
    child.kill(signal.SIGCONT)
    child.result()  # it succeeded: the last rename wins


def test_what_is_no_leftover_of_this_path_is_left_alone(tmp_path: Any) -> None:
    target = Target(tmp_path)
    digits = "0123456789abcdef"
    others = [f".fp-{digits}-{digits}.tmp", ".fp-x.tmp", "model.pt.tmp", ".model.pt.fp", ".fp-"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    target.save("auto")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "model.pt"])
    for name in others:
        os.unlink(tmp_path / name)
