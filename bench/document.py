# SPDX-License-Identifier: Apache-2.0
"""The JSON document of a run: every sample, what follows from them, and where they were taken.

Bytes, seconds and bytes per second throughout. Readers check "schema" first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.goals import Goal, relative_to_limit
from bench.results import StateResult
from bench.rounds import LIMIT_NAMES
from bench.statistics import quartiles

SCHEMA_VERSION = 1


def document(
    facts: dict[str, Any],
    arguments: dict[str, Any],
    results: Mapping[str, StateResult],
    goals: Sequence[Goal],
    extra: Mapping[str, Any],
    *,
    program: str = "bench.save",
) -> dict[str, Any]:
    """Everything that was measured, ready for json.dump.

    facts: of machine.describe; arguments: of the command line, its seed among them; extra: what
    only this program measures.
    """
    return {
        "schema": SCHEMA_VERSION,
        "program": program,
        "arguments": arguments,
        "machine": facts,
        "states": [_state(result, arguments["seed"]) for result in results.values()],
        **extra,
        "goals": [goal.as_json() for goal in goals],
    }


def _state(result: StateResult, seed: int) -> dict[str, Any]:
    shares = relative_to_limit(result, seed)
    return {
        "name": result.name,
        "title": result.title,
        "bytes": result.bytes,
        "tensors": result.tensors,
        "rounds": result.rounds,
        "limit": result.fastest(LIMIT_NAMES),
        "absent": result.absent,
        "equals_torch_save": result.equals_torch_save,
        "warm_share": result.warm_share,
        "equals_original": result.equals_original,
        "contenders": [
            {
                "name": name,
                "title": result.titles[name],
                "rate_quartiles": quartiles([sample.rate for sample in result.samples(name)]),
                "of_the_limit": asdict(shares[name]) if name in shares else None,
                "first_save": (
                    asdict(result.first_saves[name]) if name in result.first_saves else None
                ),
                "peak_rss": result.peak_rss(name),
                "stage_seconds": result.stages(name),
                "samples": [
                    {"round": entry.round, "group": entry.group, **entry.sample.as_json()}
                    for entry in result.measurements
                    if entry.contender == name
                ],
            }
            for name in result.measured()
        ],
    }
