# SPDX-License-Identifier: Apache-2.0
"""Measures what a checkpoint after every step costs training, and judges the goals.

Blocks of steps with and without checkpoints alternate, in shuffled order. Beside the overhead:
how long `save` holds its caller, memory, and other Python code beside a save.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import (
    command_line,
    document,
    machine,
    overlap_chart,
    overlap_figures,
    overlap_goals,
    overlap_report,
    overlap_rounds,
)
from bench import overlap_arms as arms
from bench.command_line import progress
from bench.overlap_process import TrainingError, TrainingProcess
from bench.results import StateResult

# Blocks of ten steps.
FULL_ROUNDS = 20
QUICK_STEPS = 3
STATE_BYTES = 330e6
ATTACHED_BYTES = 1.5e9
# A block's files of a writer that keeps all of them until its end, and those of the others.
SPACE_FACTOR = 18
MEMORY_BUDGET = 128 << 20
MEMORY_STEPS = 4
# How often; with --quick.
MANY_SAVES, QUICK_MANY_SAVES = 200, 45
RETURN_PROCESSES, RETURN_SAVES = 5, 20
PYTHON_SAVES = 15
CHECKS = ("returns", "peak_memory", "many_saves", "python_beside_saves")
ARMS = (arms.STAGING, arms.ZERO_COPY, arms.TORCH, arms.DCP)

EPILOG = """\
examples:
  python -m bench.overlap --quick              a few minutes, to see whether all works
  python -m bench.overlap --json build/overlap.json --chart build/cost.png \\
      --timeline build/timeline.png
  python -m bench.overlap --setting gpt --only staging zero-copy --rounds 40 --check none

arms for --only: """ + ", ".join(ARMS)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with what --quick stands for filled in. SystemExit(2) when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.overlap",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_arguments(parser, "save to", f" and setting: blocks; full runs {FULL_ROUNDS}")
    parser.add_argument("--timeline", type=Path, metavar="PNG", help="draw a few steps of each arm")
    parser.add_argument("--memory", type=int, metavar="BYTES", help="the Checkpointer's budget")
    parser.add_argument(
        "--setting",
        nargs="+",
        choices=overlap_rounds.SETTINGS,
        default=list(overlap_rounds.SETTINGS),
        metavar="NAME",
        help="which settings: " + ", ".join(overlap_rounds.SETTINGS) + " (default: all)",
    )
    parser.add_argument(
        "--check",
        nargs="+",
        choices=[*CHECKS, "none"],
        default=list(CHECKS),
        metavar="NAME",
        help="what else is looked at: " + ", ".join(CHECKS) + ", none (default: all)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=ARMS, metavar="ARM", help="only these arms (default: all)"
    )
    arguments = parser.parse_args(argv)
    if not arguments.quick:
        arguments.rounds = arguments.rounds or FULL_ROUNDS
    return command_line.fill_in(arguments)


def measure_settings(
    arguments: argparse.Namespace, directory: Path
) -> tuple[dict[str, StateResult], dict[str, dict[str, Any]]]:
    """Results of the settings that could run, and what is known of all of them."""
    run = overlap_rounds.Run(
        size=arguments.size,
        seed=arguments.seed,
        rounds=arguments.rounds,
        steps=QUICK_STEPS if arguments.quick else overlap_rounds.STEPS_PER_BLOCK,
        memory=arguments.memory,
        only=arguments.only,
    )
    results: dict[str, StateResult] = {}
    known: dict[str, dict[str, Any]] = {}
    for name in arguments.setting:
        progress(f"{name}: {overlap_rounds.SETTINGS[name].title}")
        result, known[name] = overlap_rounds.measure(name, run, directory, progress)
        if result is not None:
            results[name] = result
    return results, known


def run_checks(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The answers by name; under "skipped" the reasons of those that failed."""
    found: dict[str, Any] = {}
    measures = {
        "returns": _returns,
        "peak_memory": _peak_memory,
        "many_saves": _many_saves,
        "python_beside_saves": _python_beside_saves,
    }
    for name in arguments.check:
        if name == "none":
            continue
        progress(f"{name} ...")
        try:
            found[name] = measures[name](arguments, directory)
        except TrainingError as error:
            found.setdefault("skipped", {})[name] = {"skipped": f"failed: {error}"}
            progress(f"{name}: failed: {error}")
    return found


def _fresh(workload: str, arguments: argparse.Namespace, directory: Path) -> TrainingProcess:
    return TrainingProcess(workload, directory, size=arguments.size, seed=arguments.seed)


def _returns(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    count = 1 if arguments.quick else RETURN_PROCESSES
    found = []
    for _ in range(count):
        with _fresh("gpt2", arguments, directory) as process:
            found.append(process.ask("returns", arms.STAGING, RETURN_SAVES + 1))
    return {"processes": found}


def _peak_memory(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Each arm in a fresh process; a budget far below the state's size shows that it holds."""
    memory = arguments.memory or MEMORY_BUDGET
    growth = {}
    for arm in (arms.NONE, arms.STAGING, arms.TORCH, arms.DCP):
        with _fresh("gpt", arguments, directory) as process:
            answer = process.ask("peak_memory", arm, MEMORY_STEPS, memory)
        if answer["rss_growth"] is None:
            raise TrainingError("peak memory cannot be reset: /proc is read-only")
        growth[arm] = answer["rss_growth"]
    return {"memory": memory, "growth": growth}


def _many_saves(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    memory = arguments.memory or MEMORY_BUDGET
    saves = QUICK_MANY_SAVES if arguments.quick else MANY_SAVES
    with _fresh("sleep", arguments, directory) as process:
        return process.ask("many_saves", arms.STAGING, saves, memory)


def _python_beside_saves(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    with _fresh("gpt2", arguments, directory) as process:
        return process.ask("python_beside_saves", arms.STAGING, PYTHON_SAVES)


def run(arguments: argparse.Namespace) -> int:
    """Measures, reports, writes the files asked for; returns the exit status 0.

    Missed goals do not change it. Raises BenchError and RamDiskError.
    """
    command_line.ignore_overruling_variables()
    command_line.prepare_outputs(arguments)
    space = max(SPACE_FACTOR * STATE_BYTES, 3 * ATTACHED_BYTES) * arguments.size
    with command_line.work_directory(arguments, round(space)) as directory:
        facts = machine.describe(directory)
        if warning := machine.busy_warning(facts):
            progress(warning)
        results, known = measure_settings(arguments, directory)
        checks = run_checks(arguments, directory)
    seed = arguments.seed
    judged = overlap_goals.evaluate(results, known, checks, seed)
    print(overlap_report.text(facts, results, known, judged, checks, seed))
    summaries = {name: overlap_figures.summary(result, seed) for name, result in results.items()}
    written = document.document(
        facts,
        command_line.plain(arguments),
        results,
        judged,
        {"settings": known, "summaries": summaries, "checks": checks},
        program="bench.overlap",
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    draw(arguments, written, list(results))
    return 0


def draw(arguments: argparse.Namespace, written: dict[str, Any], measured: Sequence[str]) -> None:
    """The charts that were asked for, as far as there is something to draw."""
    try:
        if arguments.chart:
            overlap_chart.draw_costs(written, arguments.chart)
        if arguments.timeline:
            overlap_chart.draw_timeline(written, arguments.timeline, *measured[:1])
    except ValueError as error:
        progress(f"no chart: {error}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0, 2 if it cannot run, 130 if interrupted."""
    return command_line.guarded("bench.overlap", run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
