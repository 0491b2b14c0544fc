# SPDX-License-Identifier: Apache-2.0
"""The figures of a setting: what a step costs beyond the same step without a checkpoint, how long
training stood still, how long writing took. Pure functions of the samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.overlap_arms import BASELINE
from bench.results import StateResult
from bench.statistics import Estimate, estimate

MIN_STEPS = 200
# The interval of an overhead is at most this share of its goal to each side.
HALF_WIDTH_OF_GOAL = 0.25


@dataclass(frozen=True)
class Cost:
    """Extra time of a step as a share of a step without a checkpoint."""

    median: float
    low: float
    high: float
    steps: int

    def doubt(self, goal: float) -> str | None:
        """Why this is no measurement yet for such a goal, or None if it is one."""
        if self.steps < MIN_STEPS:
            return f"only {self.steps} of {MIN_STEPS} steps"
        half_width = (self.high - self.low) / 2
        if half_width > HALF_WIDTH_OF_GOAL * goal:
            return f"interval ±{half_width:.1%}"
        return None


def cost(result: StateResult, arm: str, seed: int) -> Cost | None:
    """Against the arm's baseline in the same rounds; None if they never met."""
    found = result.ratio(arm, BASELINE[arm], lambda sample: sample.seconds, seed=seed)
    if found is None:
        return None
    steps = sum(len(sample.detail["steps"]) for sample in result.samples(arm))
    return Cost(found.median - 1, found.low - 1, found.high - 1, steps)


def step_seconds(result: StateResult, arm: str, seed: int) -> Estimate | None:
    """Of one step, over the blocks."""
    found = [s.seconds / len(s.detail["steps"]) for s in result.samples(arm)]
    return estimate(found, seed=seed) if found else None


def over_steps(
    result: StateResult, arm: str, quantity: Callable[[list[float]], float]
) -> list[float]:
    """One value for each step; see overlap_training.StepTimes for what a step is."""
    return [quantity(step) for s in result.samples(arm) for step in s.detail["steps"]]


def stall(step: list[float]) -> float:
    """Seconds for which training stood still: before the update, and in the call of save."""
    _, computed, may_change, changed, saved = step
    return (may_change - computed) + (saved - changed)


def compute(step: list[float]) -> float:
    """Seconds of forward and backward."""
    return step[1] - step[0]


def update(step: list[float]) -> float:
    """Seconds of the optimizer's update, the wait before it left out."""
    return step[3] - step[2]


def save_call(step: list[float]) -> float:
    """Seconds in the call of save."""
    return step[4] - step[3]


def write_seconds(result: StateResult, arm: str) -> float | None:
    """Median seconds from the call of save to the end of the save."""
    found = [end - begin for s in result.samples(arm) for begin, end in s.detail["writes"]]
    return median(found) if found else None


def in_place_share(result: StateResult, arm: str) -> float | None:
    """Of the bytes that were written: without a copy."""
    found = [s.detail["in_place"] for s in result.samples(arm) if "in_place" in s.detail]
    return median(found) if found else None


def written_rate(result: StateResult, arm: str) -> float | None:
    """Bytes of saved states for each second of all blocks."""
    samples = result.samples(arm)
    return sum(s.bytes for s in samples) / sum(s.seconds for s in samples) if samples else None


def summary(result: StateResult, seed: int) -> list[dict[str, Any]]:
    """What the tables and charts show of each arm, ready for json.dump; seconds and bytes."""
    found = []
    for arm in result.measured():
        extra = cost(result, arm, seed) if arm in BASELINE else None
        seconds = step_seconds(result, arm, seed)
        assert seconds is not None
        found.append(
            {
                "name": arm,
                "title": result.titles[arm],
                "step_seconds": seconds.median,
                "cost": extra.median if extra else None,
                "cost_interval": [extra.low, extra.high] if extra else None,
                "stall_seconds": median(over_steps(result, arm, stall)),
                "longest_stall_seconds": max(over_steps(result, arm, stall)),
                "save_call_seconds": median(over_steps(result, arm, save_call)),
                "write_seconds": write_seconds(result, arm),
                "in_place_share": in_place_share(result, arm),
                "cpu_seconds_per_step": median(
                    s.cpu_seconds / len(s.detail["steps"]) for s in result.samples(arm)
                ),
            }
        )
    return found
