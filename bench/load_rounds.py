# SPDX-License-Identifier: Apache-2.0
"""Interleaved, shuffled rounds of loading, each load cold and in a fresh process.

What is compared runs close together, as in bench.rounds: the members of a group start and prepare
side by side, and then load one right after the other, in random order. fastpersist stands in one
group with each setting of the limit, because the one that counts is known only at the end.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from pathlib import Path

from bench import cold, limit, load_peers
from bench.equality import difference
from bench.load_process import LoadError, WaitingLoad, sample_from_json
from bench.measure import Sample
from bench.results import Measurement, StateResult
from bench.rounds import LIMIT_NAMES, Group, Progress, one_line, round_line, worth_a_line

SETTINGS = {setting.name: setting for setting in limit.SETTINGS}
LIMIT_FILE = "limit.bin"
# More of a file than this in the page cache, and a load from it is no cold one.
WARM_SHARE = 0.01
# Times the bytes of the state: a loader may need the tensors and the page cache.
READY_MEMORY = 2

OURS = (load_peers.FP_LOAD, load_peers.FP_LOAD_INTO, load_peers.VERIFY)
# Small groups: the device changes its speed within seconds.
NEIGHBOURS = (
    (load_peers.FP_LOAD, load_peers.RUNAI, load_peers.SAFETENSORS),
    (load_peers.FP_LOAD, load_peers.TORCH_MMAP, load_peers.FASTSAFETENSORS),
    (load_peers.FP_LOAD, load_peers.TORCH),
    (load_peers.FP_LOAD_INTO, load_peers.FP_LOAD, load_peers.DCP),
)


def title(name: str) -> str:
    """A loader's or a limit setting's name in tables."""
    return SETTINGS[name].title if name in SETTINGS else load_peers.LOADERS[name].title


def missing(name: str) -> str | None:
    """Why a loader or a limit setting cannot run here, or None if it can."""
    return limit.missing() if name in SETTINGS else load_peers.LOADERS[name].missing()


def plan_groups(names: Sequence[str]) -> list[Group]:
    """Who must run next to whom; each name is in at least one group."""
    groups: list[Group] = []

    def add(*members: str) -> None:
        present = tuple(name for name in members if name in names)
        if len(present) > 1:
            groups.append(Group(" | ".join(present), present))

    for setting in LIMIT_NAMES:
        if setting in names:
            add(*OURS, setting)
    for members in NEIGHBOURS:
        add(*members)
    grouped = {member for group in groups for member in group.members}
    groups.extend(Group(name, (name,)) for name in names if name not in grouped)
    return groups


def check_loads(
    result: StateResult,
    expected: dict[str, str],
    directory: Path,
    progress: Progress,
) -> None:
    """One untimed load by everybody; compares each tensor with the original.

    A loader that fails is left out from then on; one that loads something else is told of.
    """
    for name in result.titles:
        if name in SETTINGS:
            continue
        try:
            with WaitingLoad(name, directory, result.bytes, check=True) as waiting:
                waiting.wait_until_ready()
                found = waiting.go()
        except LoadError as error:
            _leave_out(result, name, error, progress)
            continue
        if load_peers.LOADERS[name].command is not None:
            continue  # It compares checksums itself and holds no tensors.
        wrong = difference(expected, found)
        result.equals_original[name] = wrong is None
        if wrong is not None:
            progress(f"{result.name}: {name} DID NOT LOAD what was saved: {wrong}")


def run_rounds(
    result: StateResult, rounds: int, directory: Path, *, seed: int, progress: Progress
) -> None:
    """Measures `rounds` rounds of everybody in `result.titles`, who read below `directory`.

    Whoever fails is left out from then on, and the result says why.
    """
    shuffler = random.Random(seed)
    started = time.monotonic()
    for number in range(1, rounds + 1):
        groups = plan_groups([name for name in result.titles if name not in result.absent])
        shuffler.shuffle(groups)
        measured: list[Measurement] = []
        for group in groups:
            order = shuffler.sample(group.members, len(group.members))
            for name, sample in run_group(order, result, directory, progress):
                measured.append(Measurement(number, group.name, name, sample))
        result.measurements.extend(measured)
        result.rounds = number
        remaining = (time.monotonic() - started) / number * (rounds - number)
        if worth_a_line(number, rounds):
            progress(round_line(result, number, rounds, measured, remaining))


def run_group(
    order: Sequence[str], result: StateResult, directory: Path, progress: Progress
) -> list[tuple[str, Sample]]:
    """Starts all, waits until all are ready, then lets one after the other load, each cold."""
    samples: list[tuple[str, Sample]] = []
    cold.drop_everything()  # Before the programs start, for it drops their unused code as well.
    with contextlib.ExitStack() as stack:
        waiting: dict[str, WaitingLoad] = {}
        for name in order:
            if name not in SETTINGS and name not in result.absent:
                load = WaitingLoad(name, directory, result.bytes, check=False)
                waiting[name] = stack.enter_context(load)
        for name, load in waiting.items():
            try:
                load.wait_until_ready()
            except LoadError as error:
                _leave_out(result, name, error, progress)
        for name in order:
            if name in result.absent:
                continue
            try:
                samples.append((name, _run_one(name, waiting, directory, result, progress)))
            except (LoadError, limit.LimitError) as error:
                _leave_out(result, name, error, progress)
    return samples


def _run_one(
    name: str,
    waiting: dict[str, WaitingLoad],
    directory: Path,
    result: StateResult,
    progress: Progress,
) -> Sample:
    cold.have_memory_ready(READY_MEMORY * result.bytes)
    if name in SETTINGS:
        return limit.read(SETTINGS[name], directory / LIMIT_FILE)
    source = directory / load_peers.LOADERS[name].source
    cold.drop(source)
    share = cold.cached_share(source)
    if share > WARM_SHARE and not result.warm_share:
        progress(f"{result.name}: {share:.0%} of {source.name} cannot be put out of the page cache")
    result.warm_share = max(result.warm_share, share if share > WARM_SHARE else 0.0)
    return sample_from_json(waiting[name].go())


def _leave_out(result: StateResult, name: str, error: Exception, progress: Progress) -> None:
    result.absent[name] = f"failed: {one_line(error)}"
    progress(f"{result.name}: {name} {result.absent[name]}")
