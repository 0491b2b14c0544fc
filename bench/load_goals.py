# SPDX-License-Identifier: Apache-2.0
"""The goals that loading must reach, and what a run says about each; bench.goals has the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from bench import load_peers
from bench.goals import (
    MET,
    MISSED,
    RSS_BEYOND_POOL_BYTES,
    STAGING_POOL_BYTES,
    Goal,
    not_measured,
    rate_of,
    ratio_goal,
    seconds_of,
)
from bench.load_rounds import title
from bench.results import StateResult
from bench.rounds import LIMIT_NAMES
from bench.statistics import quartiles

OF_THE_LIMIT = 0.90
AGAINST_PEERS = 1.0
DATA_FACTOR = 1.05  # Of the tensors' bytes: what the file has besides, alignment, the objects.
TINY_AGAINST_TORCH = 0.75
INSPECT_MS = 50.0

PEERS_OF_LOAD = (
    load_peers.TORCH,
    load_peers.TORCH_MMAP,
    load_peers.SAFETENSORS,
    load_peers.RUNAI,
    load_peers.FASTSAFETENSORS,
    load_peers.DCP,
)


def evaluate(
    results: Mapping[str, StateResult], inspect_seconds: Sequence[float], *, seed: int
) -> list[Goal]:
    """Every goal in order, also those that this run could not measure."""
    gpt2 = results.get("gpt2")
    goals = [
        _against_limit(gpt2, name, seed)
        for name in (load_peers.FP_LOAD, load_peers.FP_LOAD_INTO, load_peers.VERIFY)
    ]
    goals += [_against_peer(gpt2, load_peers.FP_LOAD, peer, seed) for peer in PEERS_OF_LOAD]
    goals.append(_against_peer(gpt2, load_peers.FP_LOAD_INTO, load_peers.DCP, seed))
    goals += [
        _peak_rss(gpt2, load_peers.FP_LOAD, DATA_FACTOR),
        _peak_rss(gpt2, load_peers.FP_LOAD_INTO, 0.0),
        ratio_goal(
            "100,000 one-element tensors, time against torch.load",
            results.get("tiny"),
            load_peers.TORCH,
            seconds_of,
            f"<= {TINY_AGAINST_TORCH:g}",
            lambda ratio: ratio <= TINY_AGAINST_TORCH,
            seed,
            first=load_peers.FP_LOAD,
        ),
        _inspect(inspect_seconds),
    ]
    return goals


def _against_limit(result: StateResult | None, name: str, seed: int) -> Goal:
    limit = result.fastest(LIMIT_NAMES) if result else None
    setting = f" ({title(limit)})" if limit else ""
    return ratio_goal(
        f"{title(name)}, GPT-2 state, cold, against the limit{setting}",
        result,
        limit or LIMIT_NAMES[0],
        rate_of,
        f">= {OF_THE_LIMIT:.2f}",
        lambda ratio: ratio >= OF_THE_LIMIT,
        seed,
        first=name,
    )


def _against_peer(result: StateResult | None, name: str, peer: str, seed: int) -> Goal:
    return ratio_goal(
        f"{title(name)}, GPT-2 state, cold, rate against {title(peer)}",
        result,
        peer,
        rate_of,
        f">= {AGAINST_PEERS:.2f}",
        lambda ratio: ratio >= AGAINST_PEERS,
        seed,
        first=name,
    )


def _peak_rss(result: StateResult | None, name: str, data_factor: float) -> Goal:
    line = f"peak RSS growth of {title(name)}, GPT-2 state, fresh process"
    data = result.bytes if result else 0
    most = data_factor * data + STAGING_POOL_BYTES + RSS_BEYOND_POOL_BYTES
    goal = f"<= {most / 1e6:.1f} MB"
    found = result.peak_rss(name) if result else None
    if result is None:
        return not_measured(line, goal, "this state was not in the run")
    if found is None:
        return not_measured(line, goal, f"{name} {result.absent.get(name, 'not in this run')}")
    return Goal(line, goal, f"{found / 1e6:.1f} MB", "-", MET if found <= most else MISSED)


def _inspect(seconds: Sequence[float]) -> Goal:
    line = "fastpersist inspect, GPT-2 state, wall time"
    goal = f"< {INSPECT_MS:g} ms"
    if not seconds:
        return not_measured(line, goal, "not in this run")
    milliseconds = [value * 1e3 for value in seconds]
    low, _, high = quartiles(milliseconds)
    found = median(milliseconds)
    spread = f"middle half {low:.1f} to {high:.1f}, {len(seconds)} runs"
    return Goal(line, goal, f"{found:.1f} ms", spread, MET if found < INSPECT_MS else MISSED)
