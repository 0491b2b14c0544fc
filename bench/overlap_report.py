# SPDX-License-Identifier: Apache-2.0
"""Turns what bench.overlap measured into the tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench import machine
from bench import overlap_figures as figures
from bench import overlap_goals as goals
from bench.goals import Goal
from bench.report import NOTHING, goal_table, stages_line, table
from bench.results import StateResult
from bench.statistics import three_digits

COLUMNS = (
    "saves after each step",
    "ms a step",
    "extra time",
    "95 % interval",
    "stall ms",
    "longest",
    "save() ms",
    "written after ms",
    "without a copy",
    "CPU s a step",
)


def text(
    facts: dict[str, Any],
    results: Mapping[str, StateResult],
    known: Mapping[str, Mapping[str, Any]],
    judged: Sequence[Goal],
    checks: Mapping[str, Any],
    seed: int,
) -> str:
    """The whole report. known: what is known of each setting, the reason why it was skipped too."""
    parts = ["\n".join(filter(None, (machine.summary(facts), machine.busy_warning(facts))))]
    parts += [setting(result, known[name], seed) for name, result in results.items()]
    parts += [f"{name}: {found['skipped']}" for name, found in known.items() if "skipped" in found]
    if lines := check_lines(checks):
        parts.append("\n".join(lines))
    parts.append(goal_table(judged))
    return "\n\n".join(parts)


def setting(result: StateResult, known: Mapping[str, Any], seed: int) -> str:
    """The table of one setting, and what belongs to it."""
    lines = [
        f"{result.title}: {result.bytes / 1e6:.3g} MB in {result.tensors} tensors, "
        f"{known['threads']} threads, {result.rounds} blocks each"
    ]
    if "alignment" in known:
        lines.append(
            f"page-aligned by {known['alignment']}: {known['aligned_share']:.1%} of the state"
        )
    rows = [_row(entry) for entry in figures.summary(result, seed)]
    if rows:
        lines.append(table(COLUMNS, rows))
    lines += [line for name in result.measured() if (line := stages_line(result, name))]
    lines += _limit_lines(result, known)
    lines += [f"without {name}: {reason}" for name, reason in result.absent.items()]
    return "\n".join(lines)


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    def ms(seconds: float | None) -> str:
        return NOTHING if seconds is None else three_digits(seconds * 1e3)

    def share(value: float | None) -> str:
        return NOTHING if value is None else f"{value:.0%}"

    extra, interval = entry["cost"], entry["cost_interval"]
    return (
        entry["title"],
        ms(entry["step_seconds"]),
        NOTHING if extra is None else f"{extra:+.1%}",
        NOTHING if interval is None else f"{interval[0]:+.1%} to {interval[1]:+.1%}",
        ms(entry["stall_seconds"]),
        ms(entry["longest_stall_seconds"]),
        ms(entry["save_call_seconds"]),
        ms(entry["write_seconds"]),
        share(entry["in_place_share"]),
        three_digits(entry["cpu_seconds_per_step"]),
    )


def _limit_lines(result: StateResult, known: Mapping[str, Any]) -> list[str]:
    bound = goals.slow_bound(result, known)
    if bound is None:
        return []
    computing, writing, updating = (seconds * 1e3 for seconds in bound)
    lines = [
        f"device held to {known['direct_rate'] / 1e6:.0f} MB/s, as fio finds (buffered and synced: "
        f"{known['buffered_rate'] / 1e6:.0f} MB/s)",
        f"compute {computing:.0f} ms, write at the limit {writing:.0f} ms, optimizer's update "
        f"{updating:.1f} ms",
    ]
    lines += [
        f"VOID: {result.titles[name]} wrote more than the limit allows"
        for name in result.measured()
        if goals.is_void(result, known, name)
    ]
    return lines


def check_lines(checks: Mapping[str, Any]) -> list[str]:
    """What has no table."""
    lines = []
    if peak := checks.get("peak_memory"):
        grown = peak["growth"]
        beyond = ", ".join(
            f"{name} {(grown[name] - grown['none']) / 1e6:.0f} MB"
            for name in grown
            if name != "none"
        )
        lines.append(f"peak memory beyond the same steps without a save: {beyond}")
    lines += [f"{name}: {found['skipped']}" for name, found in checks.get("skipped", {}).items()]
    return lines
