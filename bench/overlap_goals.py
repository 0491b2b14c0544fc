# SPDX-License-Identifier: Apache-2.0
"""The goals that saving beside training must reach, and what a run says about each.

Overheads are ratios of neighbouring blocks; a median from fewer than 200 steps, or with an interval
wider than a quarter of its goal to each side, is not a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from bench import overlap_arms as arms
from bench import overlap_figures as figures
from bench.goals import MET, MISSED, RSS_BEYOND_POOL_BYTES, Goal, not_measured
from bench.results import StateResult

SLEEPING_COST = 0.01
ZERO_COPY_COST, ZERO_COPY_AIM = 0.09, 0.06
STAGING_COST, STAGING_AIM = 0.11, 0.08
SLOW_FACTOR = 1.05
FIRST_RETURN_SECONDS = 0.030
RETURN_SECONDS = 0.005
PYTHON_SHARE = 0.95
HOLD_SECONDS = 0.005
# Growth of resident memory from the 20th save on that is no growth: the heap breathes.
FLAT_BYTES = 5_000_000
SETTLED_SAVES = 20
MIN_IN_PLACE = 0.8
VOID_ABOVE_LIMIT = 1.05

Facts = Mapping[str, Any]


def evaluate(
    results: Mapping[str, StateResult], facts: Mapping[str, Facts], checks: Facts, seed: int
) -> list[Goal]:
    """Every goal in order, also those that this run could not measure.

    facts: of each setting; checks: answers of overlap_checks by name, those that ran.
    """
    gpt = results.get("gpt")
    return [
        _cost("host idle during the step", results.get("sleep"), arms.STAGING, SLEEPING_COST, seed),
        _zero_copy(gpt, seed),
        _cost(
            "all cores computing, staging", gpt, arms.STAGING, STAGING_COST, seed, aim=STAGING_AIM
        ),
        _slow(results.get("slow"), facts.get("slow", {}), seed),
        _first_return(checks.get("returns")),
        _later_return(checks.get("returns")),
        _peak(checks.get("peak_memory")),
        _flat(checks.get("many_saves")),
        _python_rate(checks.get("python_beside_saves")),
        _hold(checks.get("python_beside_saves")),
    ]


def _zero_copy(result: StateResult | None, seed: int) -> Goal:
    name = "all cores computing, zero-copy"
    share = figures.in_place_share(result, arms.ZERO_COPY) if result else None
    if share is not None and share < MIN_IN_PLACE:
        must = f"<= {ZERO_COPY_COST:.0%}, aim {ZERO_COPY_AIM:.0%}"
        return not_measured(name, must, f"only {share:.0%} of the bytes went without a copy")
    return _cost(name, result, arms.ZERO_COPY, ZERO_COPY_COST, seed, aim=ZERO_COPY_AIM)


def _cost(
    name: str,
    result: StateResult | None,
    arm: str,
    goal: float,
    seed: int,
    aim: float | None = None,
) -> Goal:
    name = f"extra time of a step, {name}"
    must = f"<= {goal:.0%}" + (f", aim {aim:.0%}" if aim else "")
    if result is None:
        return not_measured(name, must, "this setting was not in the run")
    found = figures.cost(result, arm, seed)
    if found is None:
        return not_measured(name, must, result.absent.get(arm, "not in this run"))
    outcome = MET if found.median <= goal else MISSED
    if doubt := found.doubt(goal):
        outcome = f"not measured, repeat: {doubt} (so far {outcome})"
    interval = f"{found.low:.1%} to {found.high:.1%}, {found.steps} steps"
    return Goal(name, must, f"{found.median:.1%}", interval, outcome)


def is_void(result: StateResult, facts: Facts, arm: str) -> bool:
    """On a device with a limit: it wrote more than the limit allows, so the limit did not hold."""
    rate = figures.written_rate(result, arm)
    limit = facts.get("direct_rate")
    if arm not in arms.BASELINE or rate is None or limit is None:
        return False
    return bool(rate > VOID_ABOVE_LIMIT * limit)


def slow_bound(result: StateResult, facts: Facts) -> tuple[float, float, float] | None:
    """Seconds of a step: computing, writing at the device's limit, the optimizer's update."""
    if not result.samples(arms.NONE) or "direct_rate" not in facts:
        return None
    computing = median(figures.over_steps(result, arms.NONE, figures.compute))
    updating = median(figures.over_steps(result, arms.NONE, figures.update))
    return computing, result.bytes / facts["direct_rate"], updating


def _slow(result: StateResult | None, facts: Facts, seed: int) -> Goal:
    name = "write slower than the step: time of a step"
    must = f"<= {SLOW_FACTOR} max(compute, write) + update"
    bound = slow_bound(result, facts) if result else None
    if result is None or bound is None:
        return not_measured(name, must, facts.get("skipped", "this setting was not in the run"))
    found = figures.step_seconds(result, arms.STAGING, seed)
    if found is None:
        return not_measured(name, must, result.absent.get(arms.STAGING, "not in this run"))
    if is_void(result, facts, arms.STAGING):
        return not_measured(name, must, "void: more was written than the limit allows")
    computing, writing, updating = bound
    most = SLOW_FACTOR * max(computing, writing) + updating
    outcome = MET if found.median <= most else MISSED
    if found.doubt:
        outcome = f"not measured, repeat: {found.doubt} (so far {outcome})"
    value = f"{found.median * 1e3:.0f} ms, at most {most * 1e3:.0f}"
    interval = f"{found.low * 1e3:.0f} to {found.high * 1e3:.0f} ms, {found.count} blocks"
    return Goal(name, must, value, interval, outcome)


def _judged(good: bool) -> str:
    return MET if good else MISSED


def _first_return(found: Facts | None) -> Goal:
    name = "save() returns, the first time"
    must = f"<= {FIRST_RETURN_SECONDS * 1e3:.0f} ms"
    if found is None:
        return not_measured(name, must, "not in this run")
    value = median(run["seconds"][0] for run in found["processes"])
    count = len(found["processes"])
    name += f", {found['processes'][0]['tensors']} tensors"
    return Goal(
        name,
        must,
        f"{value * 1e3:.1f} ms",
        f"{count} processes",
        _judged(value <= FIRST_RETURN_SECONDS),
    )


def _later_return(found: Facts | None) -> Goal:
    name = "save() returns, from the second on"
    must = f"<= {RETURN_SECONDS * 1e3:.0f} ms"
    if found is None:
        return not_measured(name, must, "not in this run")
    later = [seconds for run in found["processes"] for seconds in run["seconds"][1:]]
    value = median(later)
    name += f", {found['processes'][0]['tensors']} tensors"
    return Goal(
        name, must, f"{value * 1e3:.1f} ms", f"{len(later)} saves", _judged(value <= RETURN_SECONDS)
    )


def _peak(found: Facts | None) -> Goal:
    name = "peak memory beyond that of the same steps without a save"
    if found is None:
        return not_measured(name, "<= budget + 64 MB", "not in this run")
    most = found["memory"] + RSS_BEYOND_POOL_BYTES
    value = found["growth"][arms.STAGING] - found["growth"][arms.NONE]
    return Goal(
        name,
        f"<= {most / 1e6:.0f} MB",
        f"{value / 1e6:.0f} MB",
        f"budget {found['memory'] / 1e6:.0f} MB",
        _judged(value <= most),
    )


def _flat(found: Facts | None) -> Goal:
    name = "memory flat over many saves: growth from the 20th on"
    must = f"<= {FLAT_BYTES / 1e6:.0f} MB"
    if found is None:
        return not_measured(name, must, "not in this run")
    rss = found["rss"]
    if len(rss) <= 2 * SETTLED_SAVES:
        return not_measured(name, must, f"only {len(rss)} saves")
    before = median(rss[SETTLED_SAVES : SETTLED_SAVES + 10])
    growth = median(rss[-10:]) - before
    return Goal(
        name, must, f"{growth / 1e6:+.1f} MB", f"{len(rss)} saves", _judged(growth <= FLAT_BYTES)
    )


def _python_rate(found: Facts | None) -> Goal:
    """The other threads' share of the CPUs may cost the loop as much, and no more."""
    name = "pure Python beside a save, against 1 - the writer's CPU share"
    must = f">= {PYTHON_SHARE:g}"
    if found is None:
        return not_measured(name, must, "not in this run")
    saves = found["saves"]
    value = median(save["ratio"] / max(1e-9, 1 - min(save["others_cpu"], 0.99)) for save in saves)
    return Goal(name, must, f"{value:.2f}", f"{len(saves)} saves", _judged(value >= PYTHON_SHARE))


def _hold(found: Facts | None) -> Goal:
    name = "longest standstill of pure Python after save() returned, median of the saves"
    must = f"<= {HOLD_SECONDS * 1e3:.0f} ms"
    if found is None:
        return not_measured(name, must, "not in this run")
    holds = [save["hold"] for save in found["saves"]]
    value, alone = median(holds), found["alone_hold"]
    outcome = _judged(value <= HOLD_SECONDS)
    if value > HOLD_SECONDS and alone > HOLD_SECONDS:
        outcome = "not measured, repeat: it stands still without a save as well"
    note = f"highest {max(holds) * 1e3:.1f} ms, without a save {alone * 1e3:.1f} ms"
    return Goal(name, must, f"{value * 1e3:.1f} ms", note, outcome)
