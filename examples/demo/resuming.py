# SPDX-License-Identifier: Apache-2.0
"""The proof of a run that is killed: it ends with the losses of one that nobody interrupted.

The program resumable.py is started, killed with SIGKILL just after it began to save in the middle
of its iterations, and started again. No process can prepare for SIGKILL.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from proofs import Proof, equal_bits, leaves
from sizes import new_training

import fastpersist as fp

PROGRAM = Path(__file__).with_name("resumable.py")
LOSSES_SHOWN = 3


def uninterrupted_losses(size: str, iterations: int) -> dict[int, str]:
    """Trains here, without a checkpoint; the losses by iteration, as hexadecimal numbers."""
    run = new_training(size)
    return {number: loss.hex() for number, (loss, _) in enumerate(run.run(iterations), 1)}


@contextmanager
def started(folder: Path, size: str, iterations: int) -> Iterator[subprocess.Popen[str]]:
    """The program as a process; at the end it is killed if it still runs."""
    command = [sys.executable, str(PROGRAM), str(folder), "--size", size]
    process = subprocess.Popen(
        [*command, "--iterations", str(iterations)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines_of(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What the program tells, as it comes."""
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def killed_run(folder: Path, size: str, iterations: int) -> dict[int, str]:
    """Kills the program when it told of the iteration in the middle; the losses up to there."""
    losses: dict[int, str] = {}
    with started(folder, size, iterations) as process:
        for line in lines_of(process):
            if "loss" in line:
                losses[line["iteration"]] = line["loss"]
            if line.get("iteration") == max(1, iterations // 2):
                process.send_signal(signal.SIGKILL)
                break
        status = process.wait()
    if status != -signal.SIGKILL:
        raise OSError(f"{PROGRAM.name} ended by itself, with status {status}")
    return losses


def resumed_run(folder: Path, size: str, iterations: int) -> tuple[int, dict[int, str]]:
    """Starts the program again; the iteration it went on from, and the losses after it."""
    losses: dict[int, str] = {}
    start = -1
    with started(folder, size, iterations) as process:
        for line in lines_of(process):
            start = line.get("start", start)
            if "loss" in line:
                losses[line["iteration"]] = line["loss"]
        status = process.wait()
    if status != 0:
        raise OSError(f"{PROGRAM.name} failed with status {status}")
    return start, losses


def show(text: str) -> None:
    """One line of the story."""
    print(f"  {text}", flush=True)


def kill_and_resume(folder: Path, size: str, iterations: int) -> list[Proof]:
    """Tells the story and returns what it proves. Raises OSError if a program fails."""
    checkpoints = folder / "run"
    print(f"\nA run of {iterations} iterations, a checkpoint after each, killed in the middle")
    show(f"uninterrupted, for comparison: {iterations} iterations")
    expected = uninterrupted_losses(size, iterations)
    before = killed_run(checkpoints, size, iterations)
    last = max(before)
    show(f"killed with SIGKILL when it began to save iteration {last}")
    start, after = resumed_run(checkpoints, size, iterations)
    show(f"started again: went on after iteration {start}, {last - start} to be done again")
    seen = {**before, **after}
    wrong = [number for number in expected if seen.get(number) != expected[number]]
    shown = " ".join(f"{float.fromhex(after[n]):.4f}" for n in sorted(after)[:LOSSES_SHOWN])
    return [
        Proof(
            "resumed after SIGKILL, losses against the uninterrupted run",
            not wrong and seen.keys() == expected.keys() and last - 1 <= start <= last,
            f"differ at {wrong[:3]}" if wrong else f"equal to the last bit, {shown} ...",
        ),
        newest_is_plain(checkpoints, iterations),
    ]


def newest_is_plain(checkpoints: Path, iterations: int) -> Proof:
    """The newest checkpoint, read with plain torch.load, against what fastpersist loads."""
    with fp.Checkpointer(checkpoints) as ckpt:
        saved = ckpt.load()
    path = saved.path / "state.pt"
    ours, theirs = dict(leaves(saved.state)), dict(leaves(torch.load(path, weights_only=True)))
    equal = ours.keys() == theirs.keys() and all(equal_bits(ours[k], theirs[k]) for k in ours)
    return Proof(
        f"torch.load({path.parent.name}/{path.name}), the newest checkpoint",
        equal and saved.step == iterations,
        f"step {saved.step}, {len(theirs)} entries" if equal else "they differ",
    )
