# SPDX-License-Identifier: Apache-2.0
"""A checkpointer under the limits of a process: the size that a file may have, and the memory that
it promised to stay within over a long run."""

from __future__ import annotations

import errno
import os
import pathlib
import resource
import signal
import statistics
import tempfile
from typing import Any

import checkpoint_support as support
import faults_support as faults
import pytest
import torch
from checkpoint_support import Training

import fastpersist as fp

# --- The size of a file ---


def save_under_a_size_limit(folder: str, engine: str, limit: int) -> None:
    """The limit comes and goes between the saves of one checkpointer."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores unless it is told not to
    training = Training()
    options = fp.Options(engine=engine, block_bytes=support.BLOCK)
    with support.open_run(folder, keep_last=1, options=options) as ckpt:
        ckpt.attach(training.optimizer)
        before = training.values()
        ckpt.save(1, training.state(), per_rank={"rank": 1}).result(60)
        training.step()
        faults.limit(resource.RLIMIT_FSIZE, limit)
        for step in (2, 3):
            ticket = ckpt.save(step, training.state(), per_rank={"rank": step})
            training.step()
            check_that_it_was_too_large(ckpt, step, support.failure(ticket))
            assert ckpt.all_steps() == [1]
            assert support.difference(ckpt.load().state, before) == ""
        faults.limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
        for step in (3, 4):
            before = training.values()
            ckpt.save(step, training.state(), per_rank={"rank": step}).result(60)
            training.step()
            assert ckpt.all_steps() == [step] and ckpt.last_error is None
            assert support.difference(ckpt.load().state, before) == ""
    assert sorted(n for n in os.listdir(os.path.join(folder, "run")) if "step" in n) == [
        "step-00000004"
    ]


def check_that_it_was_too_large(ckpt: fp.Checkpointer, step: int, error: BaseException) -> None:
    assert isinstance(error, fp.StorageError) and error.errno == errno.EFBIG, error
    assert str(ckpt.directory / f"step-{step:08}") in str(error.filename), error
    text = str(error)
    assert str(error.filename) in text and os.strerror(errno.EFBIG) in text, text
    assert error.operation and error.operation in text, text


@pytest.mark.parametrize("limit", [40, 100_000], ids=["40 bytes", "100000 bytes"])
@pytest.mark.parametrize("engine", faults.ENGINES)
def test_a_file_size_limit_fails_saves_until_it_is_raised_and_kills_nobody(
    engine: str, limit: int, tmp_path: Any
) -> None:
    faults.run(save_under_a_size_limit, str(tmp_path), engine, limit)


def log_under_a_size_limit(folder: str) -> list[str]:
    """The log of saves is what becomes too large; the checkpoints are not."""
    log = pathlib.Path(folder, "log")
    log.write_text("x" * 5000 + "\n")
    with support.open_run(folder, log=log) as ckpt, faults.warnings_logged() as warnings:
        faults.limit(resource.RLIMIT_FSIZE, 5001)
        ckpt.save(1, {"x": 1}).result(60)
        ckpt.wait_until_finished(60)
        ckpt.save(2, {"x": 2}).result(60)
        assert ckpt.all_steps() == [1, 2] and ckpt.last_error is None
    return warnings


def test_a_log_that_may_not_grow_is_a_warning(tmp_path: Any) -> None:
    warnings = faults.run(log_under_a_size_limit, str(tmp_path))
    assert len(warnings) == 1 and "the log of saves cannot be written" in warnings[0], warnings


# --- Memory ---

MIB = 1 << 20
STATE = 150 * MIB
SAVES = 60

# (memory of the checkpointer, whether the optimizer is attached)
BUDGETS = {
    "attached, much less memory than state": (64 * MIB, True),
    "copied": (256 * MIB, False),
}


def resident() -> int:
    """Bytes of this process in memory, without the files that are mapped, such as libraries."""
    lines = dict(
        line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines()
    )
    return sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def save_often(memory: int, attach: bool) -> dict[str, Any]:
    """Bytes that the process has more of than before it saved: after each save that returned and
    each that was done, and the most that was seen."""
    torch.set_num_threads(1)
    weights = [torch.full((STATE // 8 // 10,), float(i)).requires_grad_() for i in range(10)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
        weight.grad[:: 1 << 16] = 1.0
    optimizer.step()
    seen: dict[str, Any] = {"called": [], "done": [], "most": 0}

    def progress(*_: int) -> None:
        seen["most"] = max(seen["most"], resident() - base)

    with tempfile.TemporaryDirectory(dir=faults.image_folder()) as folder:
        base = resident()
        run = os.path.join(folder, "run")
        with fp.Checkpointer(run, keep_last=1, memory=memory, progress=progress) as ckpt:
            if attach:
                ckpt.attach(optimizer)
            for step in range(SAVES):
                state = {"weights": weights, "optim": optimizer.state_dict(), "step": step}
                ticket = ckpt.save(step, state)
                seen["called"].append(resident() - base)
                if step % 3:  # some are done before the step, some are not
                    ticket.result(60)
                optimizer.step()
                ticket.result(60)
                seen["done"].append(resident() - base)
            assert ckpt.all_steps() == [SAVES - 1] and ckpt.last_error is None
    seen["most"] = max(seen["most"], *seen["called"], *seen["done"])
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
def test_memory_stays_within_the_budget_and_is_flat_over_sixty_saves(budget: str) -> None:
    memory, attach = BUDGETS[budget]
    seen = faults.run(save_often, memory, attach, timeout=200)
    assert seen["most"] <= memory + 64 * MIB, {"MiB": seen["most"] / MIB}
    for when in ("called", "done"):
        early = statistics.median(seen[when][10:20])
        late = statistics.median(seen[when][-10:])
        assert late - early < 16 * MIB, (when, early / MIB, late / MIB)
    print("most, MiB:", seen["most"] / MIB)
