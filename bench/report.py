# SPDX-License-Identifier: Apache-2.0
"""Turns measurements into the tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench import machine
from bench.goals import Goal, relative_to_limit
from bench.measure import Sample
from bench.results import StateResult
from bench.rounds import LIMIT_NAMES
from bench.statistics import quartiles, three_digits

LARGE_COLUMNS = (
    "GB/s",
    "middle half",
    "seconds",
    "of the limit",
    "95 % interval",
    "CPU s/GB",
    "machine CPU s/GB",
    "peak RSS",
)
SMALL_COLUMNS = ("ms", "middle half", "CPU ms", "machine CPU ms")
GOAL_COLUMNS = ("goal", "must", "found", "95 % interval", "verdict")
NOTHING = "-"


def text(
    facts: dict[str, Any],
    results: Mapping[str, StateResult],
    goals: Sequence[Goal],
    seed: int,
    *,
    who: str = "writer",
) -> str:
    """The whole report; `who` heads the contenders' column."""
    parts = ["\n".join(filter(None, (machine.summary(facts), machine.busy_warning(facts))))]
    parts += [state_report(result, seed, who) for result in results.values()]
    parts.append(goal_table(goals))
    return "\n\n".join(parts)


def state_report(result: StateResult, seed: int, who: str = "writer") -> str:
    """One state: the table, where writers that tell spend their time, and who is missing."""
    shown = f"{result.bytes / 1e9:.3g} GB" if result.is_large else f"{result.bytes / 1e6:.3g} MB"
    lines = [f"{result.title}: {shown} in {result.tensors:,} tensors, {result.rounds} rounds"]
    if result.measured():
        lines.append(table_of(result, seed, who))
    lines += [line for name in result.measured() if (line := stages_line(result, name))]
    if result.equals_torch_save is not None:
        lines.append(
            "fp.save and torch.save wrote the same bytes"
            if result.equals_torch_save
            else "WRONG: fp.save and torch.save wrote different files"
        )
    if result.equals_original and all(result.equals_original.values()):
        titles = "; ".join(result.titles[name] for name in result.equals_original)
        lines.append(f"every tensor equals the original's, bit for bit: {titles}")
    lines += [
        f"WRONG: {result.titles[name]} did not load what was saved"
        for name, equal in result.equals_original.items()
        if not equal
    ]
    if result.warm_share:
        lines.append(f"NOT COLD: {result.warm_share:.0%} of a file was in the page cache")
    lines += [f"without {name}: {reason}" for name, reason in result.absent.items()]
    return "\n".join(lines)


def table_of(result: StateResult, seed: int, who: str) -> str:
    """The table that suits the state's size."""
    return large_table(result, seed, who) if result.is_large else small_table(result, who)


def large_table(result: StateResult, seed: int, who: str) -> str:
    """Rates of all contenders, the limit's settings first, then the fastest."""
    shares = relative_to_limit(result, seed)
    limit = result.fastest(LIMIT_NAMES)
    names = sorted(
        result.measured(),
        key=lambda name: (name not in LIMIT_NAMES, -result.median_rate(name)),
    )
    rows = []
    for name in names:
        samples = result.samples(name)
        low, middle, high = quartiles([sample.rate / 1e9 for sample in samples])
        share = shares.get(name)
        peak = result.peak_rss(name)
        row = (
            result.titles[name] + (" (the limit)" if name == limit else ""),
            f"{middle:.2f}",
            f"{low:.2f} to {high:.2f}",
            three_digits(median(sample.seconds for sample in samples)),
            f"{share.median:.3f}" if share else NOTHING,
            f"{share.low:.3f} to {share.high:.3f}" if share else NOTHING,
            f"{median(sample.cpu_seconds_per_gb for sample in samples):.2f}",
            _machine_cpu(samples, per_gb=True),
            f"{peak / 1e6:.0f} MB" if peak is not None else NOTHING,
        )
        rows.append(row)
    return table((who, *LARGE_COLUMNS), rows)


def small_table(result: StateResult, who: str) -> str:
    """Times of all contenders, the fastest first."""
    rows = []
    for name in sorted(result.measured(), key=result.median_rate, reverse=True):
        samples = result.samples(name)
        low, middle, high = quartiles([sample.seconds * 1e3 for sample in samples])
        row = (
            result.titles[name],
            three_digits(middle),
            f"{three_digits(low)} to {three_digits(high)}",
            three_digits(median(sample.cpu_seconds for sample in samples) * 1e3),
            _machine_cpu(samples, per_gb=False),
        )
        rows.append(row)
    return table((who, *SMALL_COLUMNS), rows)


def _machine_cpu(samples: Sequence[Sample], *, per_gb: bool) -> str:
    """The mean, since the kernel counts in steps that are longer than a small save."""
    found = [
        sample.machine_cpu_seconds * (1e9 / sample.bytes if per_gb else 1e3)
        for sample in samples
        if sample.machine_cpu_seconds is not None
    ]
    if not found:
        return NOTHING
    mean = sum(found) / len(found)
    return f"{mean:.2f}" if per_gb else three_digits(mean)


def stages_line(result: StateResult, contender: str) -> str | None:
    """Where a writer that reports its stages spends its time; None for one that does not."""
    stages = result.stages(contender)
    if not stages:
        return None
    times = ", ".join(f"{stage} {three_digits(seconds * 1e3)}" for stage, seconds in stages.items())
    detail = result.last_detail(contender)
    engine = f"; engine {detail['engine']}: {detail['engine_reason']}" if "engine" in detail else ""
    return f"{result.titles[contender]}, median ms: {times}{engine}"


def goal_table(goals: Sequence[Goal]) -> str:
    """One line for each goal."""
    rows = [(goal.name, goal.goal, goal.value, goal.interval, goal.verdict) for goal in goals]
    return table(GOAL_COLUMNS, rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text in aligned columns, words to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    numeric = [
        index > 0 and all(row[index][:1].isdigit() or row[index] == NOTHING for row in rows)
        for index in range(len(columns))
    ]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, rows)])
