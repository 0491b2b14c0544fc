# SPDX-License-Identifier: Apache-2.0
"""The clock of the machine is set back and forth between saves and during them, as by a first NTP
answer or by hand: what is the newest, what stays and what was measured does not depend on it. A
library that is loaded before all others moves the clock of one interpreter only."""

from __future__ import annotations

import collections
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import checkpoint_support as support
import faults_support as faults
import pytest
import torch
from checkpoint_support import Training

import fastpersist as fp

SOURCE = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

volatile long clock_offset = 0;  // seconds that the wall clock is ahead

int clock_gettime(clockid_t id, struct timespec* now) {
  const int result = (int)syscall(SYS_clock_gettime, id, now);
  if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) now->tv_sec += clock_offset;
  return result;
}

time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != NULL) *out = now.tv_sec;
  return now.tv_sec;
}

int gettimeofday(struct timeval* now, void* zone) {
  struct timespec precise;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}
"""
DAY = 86400
HOUR = 3600.0
"""Seconds of the limits that a jump of the clock by days must not make pass."""


# --- In the interpreter whose clock moves ---


def move(days: float) -> None:
    """The clock is now that far from the true time, in Python and in the C library."""
    ctypes.c_long.in_dll(ctypes.CDLL(None), "clock_offset").value = int(days * DAY)
    with open("/proc/uptime") as uptime, open("/proc/stat") as stat:
        booted = next(int(line.split()[1]) for line in stat if line.startswith("btime"))
        true = booted + float(uptime.read().split()[0])
    assert abs(time.time() - true - days * DAY) < 600, "the clock does not move"


class Jumps:
    """Moves the clock while it is pickled."""

    def __init__(self, days: float) -> None:
        self.days = days

    def __reduce__(self) -> Any:
        move(self.days)
        return (collections.OrderedDict, ())


def train_under_a_moving_clock(folder: str) -> dict[str, Any]:
    """The steps, in their order: day of the clock before, while it is pickled, while written."""
    plan = [(0, 0, 0), (0, 0, -1), (-2, 3, -3), (-4, -5, -6), (-30000, -30001, -30002), (9, -9, 9)]
    training = Training()
    seen: dict[str, Any] = {"left": [], "newest": [], "seconds": [], "stall": [], "equal": []}
    now: list[float] = []

    def progress(*_: int) -> None:
        move(now[0])

    arguments: dict[str, Any] = {
        "keep_last": 2, "keep_every": 4, "log": os.path.join(folder, "log"), "progress": progress,
        "wait_timeout": HOUR, "commit_timeout": HOUR, "drain_timeout": HOUR,
    }  # fmt: skip
    with faults.warnings_logged() as warnings:
        for step, (before, pickled, written) in enumerate(plan, 1):
            now[:] = [written]
            with support.open_run(folder, **arguments) as ckpt:  # each as a new run would
                ckpt.attach(training.optimizer)
                move(before)
                state = {**training.state(), "jumps": Jumps(pickled)}
                expected = {**training.values(), "jumps": collections.OrderedDict()}
                ticket = ckpt.save(step, state, metadata={"day": before})
                training.step()
                info = ticket.result(60)
                seen["stall"].append(ticket.stall)
                seen["seconds"].append(dict(info.seconds))
                seen["left"].append(ckpt.all_steps())
                seen["newest"].append(ckpt.latest_step())
                seen["equal"].append(support.difference(ckpt.load().state, expected))
                ckpt.wait_until_finished(60)
    return {**seen, "warnings": warnings}


def main(folder: str) -> None:
    result = train_under_a_moving_clock(folder)
    Path(folder, "result").write_text(json.dumps(result))


# --- What came of it ---


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the run, and what it saw."""
    if shutil.which("gcc") is None:
        pytest.skip("skipped: gcc is not installed, so the clock cannot be moved")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(SOURCE)
    library = str(folder / "clock.so")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O2", "-o", library, str(folder / "clock.c")], check=True
    )
    paths = [str(Path(fp.__file__).resolve().parents[1]), str(Path(__file__).parent)]
    environment = {**os.environ, "LD_PRELOAD": library, "PYTHONPATH": os.pathsep.join(paths)}
    program = "import sys, test_checkpointer_clock; test_checkpointer_clock.main(sys.argv[1])"
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "result").read_text())


def test_a_clock_that_goes_back_changes_neither_what_is_newest_nor_what_stays(moved: Any) -> None:
    folder, seen = moved
    assert seen["newest"] == [1, 2, 3, 4, 5, 6]
    assert seen["left"] == [[1], [1, 2], [2, 3], [3, 4], [4, 5], [4, 5, 6]]
    assert seen["equal"] == [""] * 6
    with support.open_run(folder) as ckpt:  # by the true time
        assert ckpt.latest_step() == 6 and ckpt.load().metadata == {"day": 9}
    created = {}
    for step in (4, 5, 6):
        path = folder / "run" / f"step-{step:08}" / "manifest.json"
        created[step] = json.loads(path.read_text())["manifest"]["created"]
    assert created[5] < "1970" < created[4] < created[6], "the clock was moved, and it is noted"


def test_what_was_measured_under_a_moving_clock_is_never_negative_nor_days_long(moved: Any) -> None:
    folder, seen = moved
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert sorted(line["time"] for line in lines) != [line["time"] for line in lines]
    numbers = [value for seconds in seen["seconds"] for value in seconds.values()] + seen["stall"]
    for line in lines:
        numbers += [*line["seconds"].values(), line["stall_seconds"]]
        numbers.append(line["totals"]["stall_seconds"])
    assert all(0 <= number < DAY / 2 for number in numbers), numbers
    for seconds in seen["seconds"]:
        assert seconds["total"] >= seconds["capture"], seconds


def test_a_clock_that_jumps_ahead_makes_no_limit_pass(moved: Any) -> None:
    _, seen = moved
    assert seen["warnings"] == [], "no save was given up, and no commit was late"


def test_a_clock_that_jumps_in_python_only_changes_nothing_either(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([2e9, 1e9, 0.0, -1e9])
    monkeypatch.setattr(time, "time", lambda: next(times, 5e8))
    with support.open_run(tmp_path, keep_last=1, log=tmp_path / "log") as ckpt:
        for step in (7, 8, 9):
            info = ckpt.save(step, {"x": torch.full((9999,), step)}).result(60)
            assert all(value >= 0 for value in info.seconds.values())
            assert ckpt.all_steps() == [step] and ckpt.load().state["x"][0] == step
