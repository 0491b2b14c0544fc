# SPDX-License-Identifier: Apache-2.0
"""Alternating blocks of steps: everybody trains the same under the same drift of the machine.

An arm with fastpersist stands in one group with its baseline, and they run one right after the
other, in random order; so do the groups of a round.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import overlap_arms as arms
from bench import throttle
from bench.measure import Sample
from bench.overlap_process import MAPPED, TrainingError, TrainingProcess, page_allocator
from bench.results import Measurement, StateResult
from bench.rounds import Group, Progress, one_line, worth_a_line

STEPS_PER_BLOCK = 10
SLOW_WRITE_SECONDS = 0.7
GROUPS = (
    (arms.NONE, arms.STAGING),
    (arms.NONE_ALIGNED, arms.ZERO_COPY),
    (arms.TORCH,),
    (arms.DCP,),
)


@dataclass(frozen=True)
class Setting:
    """What is trained, by whom it is saved, and on what device."""

    title: str
    workload: str
    sleep: float
    """Seconds of a step that sleeps."""
    arms: tuple[str, ...]
    slow: bool = False
    """The device is held so far down that a write takes longer than a step."""


_UNALIGNED = (arms.NONE, arms.STAGING, arms.TORCH, arms.DCP)
SETTINGS: dict[str, Setting] = {
    "gpt": Setting(
        "a GPT with Adam, all cores computing",
        "gpt",
        0.0,
        (arms.NONE, arms.STAGING, arms.NONE_ALIGNED, arms.ZERO_COPY, arms.TORCH, arms.DCP),
    ),
    "sleep": Setting("the step sleeps 1 s, then SGD with momentum", "sleep", 1.0, _UNALIGNED),
    "slow": Setting(
        "the step sleeps 0.3 s, and the device needs longer", "sleep", 0.3, _UNALIGNED, slow=True
    ),
}


def wanted(setting: str, only: Sequence[str] | None) -> list[str]:
    """The arms of a setting, in order; the baselines of those asked for belong to them."""
    names = SETTINGS[setting].arms
    if only is None:
        return list(names)
    needed = {*only, *(arms.BASELINE[name] for name in only if name in arms.BASELINE)}
    return [name for name in names if name in needed]


def plan_groups(names: Sequence[str]) -> list[Group]:
    """Who must run next to whom; each name is in one group."""
    found = []
    for members in GROUPS:
        present = tuple(name for name in members if name in names)
        if present:
            found.append(Group(" | ".join(present), present))
    return found


@dataclass(frozen=True)
class Run:
    """What a setting is measured with."""

    size: float
    seed: int
    rounds: int
    steps: int
    memory: int | None
    only: Sequence[str] | None


def measure(
    name: str, run: Run, directory: Path, progress: Progress
) -> tuple[StateResult | None, dict[str, Any]]:
    """All blocks of one setting; None, and the reason as "skipped", if it cannot run here.

    Whoever fails is left out from then on, and the result says why.
    """
    setting = SETTINGS[name]
    names = wanted(name, run.only)
    if not names:
        return None, {"skipped": "skipped: none of the arms asked for has a part in it"}
    with contextlib.ExitStack() as stack:
        try:
            facts, processes = _start(setting, names, run, directory, stack, progress)
        except (TrainingError, throttle.ThrottleError) as error:
            reason = f"skipped: {one_line(error)}"
            progress(f"{name}: {reason}")
            return None, {"skipped": reason}
        result = StateResult(
            name=name,
            title=setting.title,
            bytes=facts["bytes"],
            tensors=facts["tensors"],
            titles={arm: arms.TITLES[arm] for arm in names},
        )
        for arm in names:
            if (why := arms.missing(arm)) is not None:
                _leave_out(result, arm, why, progress)
        _run_rounds(result, run, processes, progress)
    return result, facts


def _start(
    setting: Setting,
    names: Sequence[str],
    run: Run,
    directory: Path,
    stack: contextlib.ExitStack,
    progress: Progress,
) -> tuple[dict[str, Any], dict[str, TrainingProcess]]:
    """The processes for the arms, ready; and what is known of them."""

    def start(alignment: str | None) -> tuple[TrainingProcess, dict[str, Any]]:
        process = TrainingProcess(
            setting.workload,
            directory,
            size=run.size,
            seed=run.seed,
            sleep=setting.sleep,
            alignment=alignment,
        )
        stack.enter_context(process)
        return process, process.facts()

    limits = stack.enter_context(contextlib.ExitStack())  # Left last, when the processes are gone.
    default, facts = start(None)
    processes = dict.fromkeys(names, default)
    if setting.slow:
        wanted_rate = round(facts["bytes"] / SLOW_WRITE_SECONDS)
        limited = limits.enter_context(throttle.throttled(directory, wanted_rate))
        facts["direct_rate"], facts["buffered_rate"] = limited.verify(directory)
        progress(f"device held to {facts['direct_rate'] / 1e6:.0f} MB/s, as fio finds")
        limited.add(default.pid)
    if any(name in arms.ALIGNED for name in names):
        facts["alignment"] = page_allocator() or MAPPED
        aligned, aligned_facts = start(facts["alignment"])
        facts["aligned_share"] = aligned_facts["aligned_share"]
        processes |= {name: aligned for name in names if name in arms.ALIGNED}
        share = facts["aligned_share"]
        progress(f"page-aligned by {facts['alignment']}: {share:.1%} of the state")
    return facts, processes


def _run_rounds(
    result: StateResult, run: Run, processes: dict[str, TrainingProcess], progress: Progress
) -> None:
    shuffler = random.Random(run.seed)
    for arm in result.titles:  # Buffers are made, files and code brought into memory.
        _block(arm, 1, result, run, processes, progress)
    started = time.monotonic()
    for number in range(1, run.rounds + 1):
        groups = plan_groups([name for name in result.titles if name not in result.absent])
        shuffler.shuffle(groups)
        for group in groups:
            for arm in shuffler.sample(group.members, len(group.members)):
                sample = _block(arm, run.steps, result, run, processes, progress)
                if sample is not None:
                    result.measurements.append(Measurement(number, group.name, arm, sample))
        result.rounds = number
        if worth_a_line(number, run.rounds):
            remaining = (time.monotonic() - started) / number * (run.rounds - number)
            progress(_round_line(result, number, run, remaining))


def _block(
    arm: str,
    steps: int,
    result: StateResult,
    run: Run,
    processes: dict[str, TrainingProcess],
    progress: Progress,
) -> Sample | None:
    if arm in result.absent:
        return None
    os.sync()
    try:
        return Sample(**processes[arm].ask("block", arm, steps, run.memory))
    except TrainingError as error:
        _leave_out(result, arm, f"failed: {one_line(error)}", progress)
        return None


def _leave_out(result: StateResult, arm: str, reason: str, progress: Progress) -> None:
    result.absent[arm] = reason
    progress(f"{result.name}: without {arm}: {reason}")


def _round_line(result: StateResult, number: int, run: Run, remaining: float) -> str:
    found = [entry for entry in result.measurements if entry.round == number]
    figures = ", ".join(
        f"{entry.contender} {entry.sample.seconds / run.steps * 1e3:.0f}" for entry in found
    )
    return (
        f"{result.name}: round {number}/{run.rounds}, ms a step: {figures}; {remaining:.0f} s to go"
    )
