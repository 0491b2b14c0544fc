# SPDX-License-Identifier: Apache-2.0
"""Medians, paired ratios, and how far to trust them: a seeded bootstrap of the median.

A ratio is formed within each pair before the median is taken, so that slow drift of the storage,
which changes both sides of a pair alike, cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
MIN_PAIRS = 15
MAX_RELATIVE_HALF_WIDTH = 0.05


@dataclass(frozen=True)
class Estimate:
    """A median with its bootstrap interval."""

    median: float
    low: float
    high: float
    count: int

    @property
    def relative_half_width(self) -> float:
        """Half the interval's width as a share of the median."""
        if self.median == 0:
            return 0.0 if self.low == self.high else float("inf")
        return (self.high - self.low) / 2 / abs(self.median)

    @property
    def doubt(self) -> str | None:
        """Why this is no measurement yet, or None if it is one."""
        if self.count < MIN_PAIRS:
            return f"only {self.count} of {MIN_PAIRS} pairs"
        if self.relative_half_width > MAX_RELATIVE_HALF_WIDTH:
            return f"interval ±{self.relative_half_width:.0%}"
        return None


def estimate(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """Median of `values` with its percentile bootstrap interval. ValueError if there are none."""
    if len(values) == 0:
        raise ValueError("no values to estimate from")
    sample = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(sample), size=(RESAMPLES, len(sample)))
    medians = np.median(sample[picks], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return Estimate(float(np.median(sample)), float(low), float(high), len(sample))


def paired_ratio(pairs: Sequence[tuple[float, float]], *, seed: int = 0) -> Estimate:
    """Estimate of first/second over pairs measured side by side. ValueError if there are none."""
    return estimate([first / second for first, second in pairs], seed=seed)


def three_digits(number: float) -> str:
    """For people: three significant digits, and no exponent for large numbers."""
    return f"{number:,.0f}" if abs(number) >= 999.5 else f"{number:.3g}"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, median, high = np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75))
    return float(low), float(median), float(high)
