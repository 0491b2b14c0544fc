# SPDX-License-Identifier: Apache-2.0
"""The goals that saving must reach, and what a run says about each.

All are ratios or differences taken within one run. A goal is met when the median reaches it; a
median from fewer than 15 pairs, or with an interval wider than ±5 %, is not a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench import peers
from bench.leaks import LeakResult
from bench.measure import Sample
from bench.results import StateResult
from bench.rounds import LIMIT_NAMES
from bench.statistics import Estimate

LIMIT_ON_DISK = 0.95
LIMIT_ON_RAM = 0.90
ENGINE_AGAINST_BEST = 0.9
STAGING_POOL_BYTES = 64 << 20
RSS_BEYOND_POOL_BYTES = 64_000_000
TINY_AGAINST_TORCH = 0.75
SMALL_AGAINST_TORCH = 1.05
CPU_AGAINST_TORCH = 0.5

MET = "met"
MISSED = "missed"


@dataclass(frozen=True)
class Goal:
    """One line of the table: what is asked, what was found, with its interval, and the verdict."""

    name: str
    goal: str
    value: str
    interval: str
    verdict: str

    def as_json(self) -> dict[str, str]:
        """The fields, ready for json.dump."""
        return asdict(self)


def evaluate(
    results: Mapping[str, StateResult],
    leaks: LeakResult | None,
    *,
    on_ram: bool,
    seed: int,
) -> list[Goal]:
    """Every goal in order, also those that this run could not measure."""
    goals = [_limit(results.get("gpt2"), on_ram, seed)]
    goals += _engines(results.get("gpt2"), seed)
    goals += [
        _peak_rss(results.get("gpt2")),
        ratio_goal(
            "100,000 one-element tensors, time against torch.save",
            results.get("tiny"),
            peers.TORCH,
            seconds_of,
            f"<= {TINY_AGAINST_TORCH:g}",
            lambda ratio: ratio <= TINY_AGAINST_TORCH,
            seed,
        ),
        ratio_goal(
            "1 MB in all, time against torch.save, committed",
            results.get("small"),
            peers.TORCH_COMMITTED,
            seconds_of,
            f"<= {SMALL_AGAINST_TORCH:g}",
            lambda ratio: ratio <= SMALL_AGAINST_TORCH,
            seed,
        ),
        ratio_goal(
            "CPU seconds per GB against torch.save, GPT-2 state",
            results.get("gpt2"),
            peers.TORCH,
            _cpu,
            f"< {CPU_AGAINST_TORCH:g}",
            lambda ratio: ratio < CPU_AGAINST_TORCH,
            seed,
        ),
        _leaks(leaks),
    ]
    return goals


def seconds_of(sample: Sample) -> float:
    """The quantity time."""
    return sample.seconds


def rate_of(sample: Sample) -> float:
    """The quantity bytes per second."""
    return sample.rate


def _cpu(sample: Sample) -> float:
    return sample.cpu_seconds_per_gb


def verdict(found: Estimate, reached: Callable[[float], bool]) -> str:
    """Met or missed; or, for too few pairs or too wide an interval, that it must be repeated."""
    outcome = MET if reached(found.median) else MISSED
    return f"not measured, repeat: {found.doubt} (so far {outcome})" if found.doubt else outcome


def ratio_goal(
    name: str,
    result: StateResult | None,
    other: str,
    quantity: Callable[[Sample], float],
    goal: str,
    reached: Callable[[float], bool],
    seed: int,
    first: str = peers.FASTPERSIST,
) -> Goal:
    """A goal for the ratio first/other of `quantity`; not measured if they never met."""
    if result is None:
        return not_measured(name, goal, "this state was not in the run")
    found = result.ratio(first, other, quantity, seed=seed)
    if found is None:
        who = first if not result.samples(first) else other
        return not_measured(name, goal, f"{who} {result.absent.get(who, 'not in this run')}")
    interval = f"{found.low:.3f} to {found.high:.3f}, {found.count} pairs"
    return Goal(name, goal, f"{found.median:.3f}", interval, verdict(found, reached))


def not_measured(name: str, goal: str, reason: str) -> Goal:
    """The line of a goal that this run says nothing about."""
    return Goal(name, goal, "-", "-", f"not measured: {reason}")


def _limit(result: StateResult | None, on_ram: bool, seed: int) -> Goal:
    goal = LIMIT_ON_RAM if on_ram else LIMIT_ON_DISK
    device = "RAM-backed loop device" if on_ram else "disk"
    name = f"GPT-2 state, {device}, against the limit"
    limit = result.fastest(LIMIT_NAMES) if result else None
    if result and limit:
        name += f" ({result.titles[limit]})"
    return ratio_goal(
        name,
        result,
        limit or LIMIT_NAMES[0],
        rate_of,
        f">= {goal:.2f}",
        lambda ratio: ratio >= goal,
        seed,
    )


def _engines(result: StateResult | None, seed: int) -> list[Goal]:
    """Each engine against the best of them."""
    names = [peers.engine_peer_name(engine) for engine in peers.ENGINES]
    best = result.fastest(names) if result else None
    goals = []
    for engine, name in zip(peers.ENGINES, names, strict=True):
        title = f"engine {engine} against the best engine"
        goal = f">= {ENGINE_AGAINST_BEST:g}"
        if best == name:
            goals.append(Goal(title, goal, "1", "it is the best", MET))
            continue
        goals.append(
            ratio_goal(
                title,
                result,
                best or name,
                rate_of,
                goal,
                lambda ratio: ratio >= ENGINE_AGAINST_BEST,
                seed,
                first=name,
            )
        )
    return goals


def _peak_rss(result: StateResult | None) -> Goal:
    most = STAGING_POOL_BYTES + RSS_BEYOND_POOL_BYTES
    name = "peak RSS growth during a save, GPT-2 state, fresh process"
    goal = f"<= {most / 1e6:.1f} MB"
    first = result.first_saves.get(peers.FASTPERSIST) if result else None
    if first is None:
        return not_measured(name, goal, "not in this run")
    reached = MET if first.rss_growth <= most else MISSED
    return Goal(name, goal, f"{first.rss_growth / 1e6:.1f} MB", "-", reached)


def _leaks(leaks: LeakResult | None) -> Goal:
    name = "descriptors, threads, RSS after 50 saves, half of them failing"
    if leaks is None:
        return not_measured(name, "unchanged", "not in this run")
    before, after = leaks.before, leaks.after
    value = (
        f"{before.descriptors} -> {after.descriptors}, {before.threads} -> {after.threads}, "
        f"{(after.rss - before.rss) / 1e6:+.1f} MB"
    )
    return Goal(name, "unchanged", value, "-", MET if leaks.unchanged else MISSED)


def relative_to_limit(result: StateResult, seed: int) -> dict[str, Estimate]:
    """Rate of each contender as a share of the limit's."""
    limit = result.fastest(LIMIT_NAMES)
    if limit is None:
        return {}
    found: dict[str, Any] = {
        name: result.ratio(name, limit, rate_of, seed=seed)
        for name in result.measured()
        if name not in LIMIT_NAMES
    }
    return {name: ratio for name, ratio in found.items() if ratio is not None}
