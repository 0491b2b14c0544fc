# SPDX-License-Identifier: Apache-2.0
"""Interleaved, shuffled rounds: everybody saves the same state under the same drift of the storage.

Storage changes its speed within seconds, so what is compared must run close together. Contenders
form groups; a round runs every group once, in random order, and a group its members one right after
the other, in random order. fastpersist stands in one group with each setting of the limit, because
the one that counts is known only at the end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import limit, peers
from bench.measure import Sample, measure
from bench.results import Measurement, StateResult
from bench.states import State
from bench.statistics import three_digits

LIMIT_NAMES = tuple(setting.name for setting in limit.SETTINGS)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Contender:
    """Somebody who saves the state into an empty directory and is measured while doing so."""

    name: str
    title: str
    run: Callable[[Path], Sample]


@dataclass(frozen=True)
class Group:
    """Contenders that run next to each other within a round."""

    name: str
    members: tuple[str, ...]


def contenders(
    state: State, names: Iterable[str], progress: Progress
) -> tuple[list[Contender], dict[str, str]]:
    """Prepares the named contenders. Returns them, and for those that cannot run the reason."""
    ready: list[Contender] = []
    absent: dict[str, str] = {}
    settings = {setting.name: setting for setting in limit.SETTINGS}
    for name in names:
        reason = limit.missing() if name in settings else peers.PEERS[name].missing()
        if reason is not None:
            absent[name] = reason
        elif name in settings:
            ready.append(_limit_contender(settings[name], state))
        else:
            try:
                ready.append(_peer_contender(peers.PEERS[name], state))
            except Exception as error:  # Whatever another's package raises.
                absent[name] = f"failed to start: {one_line(error)}"
        if name in absent:
            progress(f"{state.name}: without {name}: {absent[name]}")
    return ready, absent


def _limit_contender(setting: limit.Setting, state: State) -> Contender:
    return Contender(
        setting.name,
        setting.title,
        lambda directory: limit.run(setting, directory, state.bytes),
    )


def _peer_contender(peer: peers.Peer, state: State) -> Contender:
    save = peer.prepare(state)
    return Contender(
        peer.name,
        peer.title,
        lambda directory: measure(lambda: save(directory), state.bytes),
    )


def plan_groups(names: Sequence[str]) -> list[Group]:
    """Who must run next to whom; each contender is in at least one group."""
    groups: list[Group] = []

    def add(*members: str) -> None:
        present = tuple(name for name in members if name in names)
        if len(present) > 1:
            groups.append(Group(" | ".join(present), present))

    for setting in LIMIT_NAMES:
        add(peers.FASTPERSIST, setting)
    add(*(peers.engine_peer_name(engine) for engine in peers.ENGINES))
    add(peers.FASTPERSIST, peers.TORCH)
    add(peers.FASTPERSIST, peers.TORCH_COMMITTED)
    grouped = {member for group in groups for member in group.members}
    groups.extend(Group(name, (name,)) for name in names if name not in grouped)
    return groups


def run_rounds(
    state: State,
    ready: Sequence[Contender],
    rounds: int,
    directory: Path,
    *,
    seed: int,
    progress: Progress,
) -> StateResult:
    """Measures `rounds` rounds below `directory`, after one untimed save by each contender.

    Whoever raises is left out from then on, and the result says why. On return nothing that was
    saved is left.
    """
    by_name = {contender.name: contender for contender in ready}
    result = StateResult(
        name=state.name,
        title=state.title,
        bytes=state.bytes,
        tensors=state.tensors,
        titles={contender.name: contender.title for contender in ready},
    )
    shuffler = random.Random(seed)
    for contender in ready:
        _run_one(contender, directory, result, progress)
    started = time.monotonic()
    for number in range(1, rounds + 1):
        groups = plan_groups([name for name in by_name if name not in result.absent])
        shuffler.shuffle(groups)
        measured: list[Measurement] = []
        for group in groups:
            for name in shuffler.sample(group.members, len(group.members)):
                sample = _run_one(by_name[name], directory, result, progress)
                if sample is not None:
                    measured.append(Measurement(number, group.name, name, sample))
        result.measurements.extend(measured)
        result.rounds = number
        remaining = (time.monotonic() - started) / number * (rounds - number)
        if worth_a_line(number, rounds):
            progress(round_line(result, number, rounds, measured, remaining))
    return result


def worth_a_line(number: int, rounds: int) -> bool:
    """Whether to tell of this round: always when they are few, else of about twenty."""
    return number == rounds or number % max(1, rounds // 20) == 0


def _run_one(
    contender: Contender, directory: Path, result: StateResult, progress: Progress
) -> Sample | None:
    if contender.name in result.absent:
        return None
    make_equal_start(directory, thorough=result.takes_long)
    try:
        return contender.run(directory)
    except Exception as error:  # One failure must not cost all measurements.
        result.absent[contender.name] = f"failed: {one_line(error)}"
        progress(f"{result.name}: {contender.name} {result.absent[contender.name]}")
        return None
    finally:
        empty_directory(directory)


def make_equal_start(directory: Path, *, thorough: bool) -> None:
    """Leaves no file and no dirty page to the next contender.

    thorough: also no garbage and, as root, no cached page. It takes a tenth of a second, far more
    than saving a small state, which it does not concern.
    """
    empty_directory(directory)
    os.sync()
    if not thorough:
        return
    gc.collect()
    if os.geteuid() == 0:
        # Where /proc is read-only it must do without: only dirty pages matter much to writers.
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1", encoding="ascii")


def empty_directory(directory: Path) -> None:
    """Removes everything in `directory`."""
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def round_line(
    result: StateResult, number: int, rounds: int, measured: Sequence[Measurement], remaining: float
) -> str:
    """What one round found, and how long the others will take."""
    found: dict[str, list[Sample]] = {}
    for entry in measured:
        name = "limit" if entry.contender in LIMIT_NAMES else entry.contender
        found.setdefault(name, []).append(entry.sample)
    if result.is_large:
        unit = "GB/s"
        figures = {name: max(s.rate for s in samples) / 1e9 for name, samples in found.items()}
    else:
        unit = "ms"
        figures = {name: min(s.seconds for s in samples) * 1e3 for name, samples in found.items()}
    best = ", ".join(f"{name} {three_digits(figure)}" for name, figure in figures.items())
    return f"{result.name}: round {number}/{rounds}, {unit}: {best}; {remaining:.0f} s to go"


def one_line(error: Exception) -> str:
    """Type and message of an exception, without line breaks."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:200]}"
