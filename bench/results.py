# SPDX-License-Identifier: Apache-2.0
"""What was measured for one state, and the questions that the tables ask of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.measure import Sample
from bench.statistics import Estimate, paired_ratio

# Of smaller states only the time is of interest, for the rate tells nothing of the storage.
LARGE_BYTES = 32 << 20
MANY_TENSORS = 1000


@dataclass(frozen=True)
class FirstSave:
    """A writer's first save in a fresh process: growth of resident memory to its peak, and time."""

    rss_growth: int
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """One sample: of which contender, in which group of which round."""

    round: int
    group: str
    contender: str
    sample: Sample


@dataclass
class StateResult:
    """All measurements of one state. `absent` tells why a contender has none, or no more."""

    name: str
    title: str
    bytes: int
    tensors: int
    titles: dict[str, str]
    rounds: int = 0
    measurements: list[Measurement] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    first_saves: dict[str, FirstSave] = field(default_factory=dict)
    equals_torch_save: bool | None = None  # None: not compared.
    equals_original: dict[str, bool] = field(default_factory=dict)  # Of loaders.
    fresh_processes: bool = False  # Each sample was taken in a process of its own.
    warm_share: float = 0.0  # The largest share of a file that stayed in the page cache.

    @property
    def is_large(self) -> bool:
        """Whether its bytes, not its tensors or the syncs, decide how long a save takes."""
        return self.bytes >= LARGE_BYTES

    @property
    def takes_long(self) -> bool:
        """Whether a save takes much longer than the cleaning between two saves."""
        return self.is_large or self.tensors >= MANY_TENSORS

    def samples(self, contender: str) -> list[Sample]:
        """All samples of one contender, of every group and round."""
        return [entry.sample for entry in self.measurements if entry.contender == contender]

    def measured(self) -> list[str]:
        """Contenders with at least one sample, in the order of `titles`."""
        present = {entry.contender for entry in self.measurements}
        return [name for name in self.titles if name in present]

    def peak_rss(self, contender: str) -> int | None:
        """Growth of resident memory to its peak in a fresh process; of several the highest."""
        if first := self.first_saves.get(contender):
            return first.rss_growth
        if not self.fresh_processes:
            return None
        found = [sample.rss_growth for sample in self.samples(contender)]
        return max((growth for growth in found if growth is not None), default=None)

    def median_rate(self, contender: str) -> float:
        """Bytes per second."""
        return median(sample.rate for sample in self.samples(contender))

    def fastest(self, contenders: Iterable[str]) -> str | None:
        """The contender with the best median rate over all rounds; None if none was measured."""
        present = [name for name in contenders if self.samples(name)]
        return max(present, key=self.median_rate, default=None)

    def pairs(
        self, first: str, second: str, quantity: Callable[[Sample], float]
    ) -> list[tuple[float, float]]:
        """One pair for each round in which both ran.

        From a group that holds both, where they ran one right after the other, if there is such a
        group; else from their medians within the round.
        """
        values: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)
        for entry in self.measurements:
            values[entry.round, entry.group][entry.contender] = quantity(entry.sample)
        adjacent = [
            (found[first], found[second])
            for found in values.values()
            if {first, second} <= set(found)
        ]
        return adjacent or self._pairs_of_round_medians(first, second, quantity)

    def _pairs_of_round_medians(
        self, first: str, second: str, quantity: Callable[[Sample], float]
    ) -> list[tuple[float, float]]:
        values: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for entry in self.measurements:
            values[entry.round][entry.contender].append(quantity(entry.sample))
        return [
            (median(found[first]), median(found[second]))
            for found in values.values()
            if first in found and second in found
        ]

    def ratio(
        self,
        first: str,
        second: str,
        quantity: Callable[[Sample], float],
        *,
        seed: int = 0,
    ) -> Estimate | None:
        """Estimate of first/second; None if they never ran in one round."""
        pairs = self.pairs(first, second, quantity)
        return paired_ratio(pairs, seed=seed) if pairs else None

    def stages(self, contender: str) -> dict[str, float]:
        """Median seconds of each stage that the writer itself reported."""
        reported: dict[str, list[float]] = defaultdict(list)
        for sample in self.samples(contender):
            for stage, seconds in sample.detail.get("stages", {}).items():
                reported[stage].append(seconds)
        return {stage: median(seconds) for stage, seconds in reported.items()}

    def last_detail(self, contender: str) -> dict[str, Any]:
        """What the writer said of its last save, apart from the stages."""
        samples = self.samples(contender)
        detail = dict(samples[-1].detail) if samples else {}
        detail.pop("stages", None)
        return detail
