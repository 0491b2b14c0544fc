# SPDX-License-Identifier: Apache-2.0
"""Compares fp.load, cold, with other loaders and the limit of the storage, and judges its goals."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import (
    chart,
    cold,
    command_line,
    document,
    limit,
    load_goals,
    load_peers,
    load_rounds,
    machine,
    report,
    states,
)
from bench.command_line import progress
from bench.equality import checksums
from bench.results import StateResult
from bench.rounds import LIMIT_NAMES, empty_directory, one_line

# The torch file, the safetensors file, the distributed checkpoint, the limit's file.
SPACE_FACTOR = 5
INSPECT_RUNS = 20

EPILOG = """\
examples:
  python -m bench.load --quick                 a few minutes, to see whether all works
  python -m bench.load --json build/load-disk.json --chart build/load-disk.png
  python -m bench.load --ram --state gpt2      on a loop device over memory, as root
  python -m bench.load --state gpt2 --only fp.load limit torch --rounds 30

loaders for --only: """ + ", ".join([*load_peers.LOADERS, "limit"])

PROGRAMMES: dict[str, tuple[str, ...]] = {
    "gpt2": (*load_peers.LOADERS, *LIMIT_NAMES),
    "tensor": (
        load_peers.FP_LOAD,
        load_peers.FP_LOAD_INTO,
        load_peers.TORCH,
        load_peers.SAFETENSORS,
        *LIMIT_NAMES,
    ),
    "tiny": (load_peers.FP_LOAD, load_peers.TORCH),
}
DEFAULT_STATES = ("gpt2", "tiny")
STATE_OF_INSPECT = "gpt2"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with what --quick stands for filled in. SystemExit(2) when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.load",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_arguments(parser, "load from")
    parser.add_argument(
        "--state",
        nargs="+",
        choices=PROGRAMMES,
        default=list(DEFAULT_STATES),
        metavar="NAME",
        help=f"which states: {', '.join(PROGRAMMES)} (default: {' '.join(DEFAULT_STATES)})",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*load_peers.LOADERS, "limit"],
        metavar="LOADER",
        help="only these loaders (default: all that are installed)",
    )
    return command_line.fill_in(parser.parse_args(argv))


def wanted(state: str, only: Sequence[str] | None) -> list[str]:
    """The loaders for a state, in order; "limit" in `only` stands for all its settings."""
    names = PROGRAMMES[state]
    if only is None:
        return list(names)
    return [name for name in names if name in only or (name in LIMIT_NAMES and "limit" in only)]


def measure_state(
    name: str, arguments: argparse.Namespace, directory: Path
) -> tuple[StateResult, list[float]] | None:
    """Builds and saves one state and measures all its loaders; None if none was asked for.

    Also returns the times of `inspect`, if this is its state. On return `directory` is empty.
    """
    names = wanted(name, arguments.only)
    if not names:
        return None
    state = states.build(name, size=arguments.size, seed=arguments.seed)
    progress(f"{name}: {state.bytes / 1e9:.3g} GB in {state.tensors:,} tensors")
    absent = {entry: reason for entry in names if (reason := load_rounds.missing(entry))}
    for entry, reason in absent.items():
        progress(f"{name}: without {entry}: {reason}")
    ready = [entry for entry in names if entry not in absent]
    result = StateResult(
        name=name,
        title=state.title,
        bytes=state.bytes,
        tensors=state.tensors,
        titles={entry: load_rounds.title(entry) for entry in ready},
        absent=absent,
        fresh_processes=True,
    )
    _save_all(state, ready, result, directory, seed=arguments.seed)
    expected = checksums(state.value)
    del state  # Others need the memory.
    load_rounds.check_loads(result, expected, directory, progress)
    load_rounds.run_rounds(
        result, arguments.rounds, directory, seed=arguments.seed, progress=progress
    )
    inspected: list[float] = []
    if name == STATE_OF_INSPECT and arguments.only is None:
        inspected = measure_inspect(directory / load_peers.TORCH_FILE)
    empty_directory(directory)
    return result, inspected


def _save_all(
    state: states.State, ready: Sequence[str], result: StateResult, directory: Path, *, seed: int
) -> None:
    """Writes what all who are ready will read. Raises BenchError if that cannot be done."""
    loaders = [load_peers.LOADERS[entry] for entry in ready if entry in load_peers.LOADERS]
    try:
        load_peers.save_sources(state, directory, {loader.source for loader in loaders})
        if any(entry in LIMIT_NAMES for entry in ready):
            limit.lay_out(directory / load_rounds.LIMIT_FILE, result.bytes, seed=seed)
    except Exception as error:  # Whatever another's package raises.
        raise command_line.BenchError(f"cannot save the state: {one_line(error)}") from error


def measure_inspect(path: Path) -> list[float]:
    """Wall seconds of `fastpersist inspect`, cold each time; empty if it cannot run."""
    if not load_peers.PROGRAM.is_file():
        progress(f"no inspect: {load_peers.LOADERS[load_peers.VERIFY].missing()}")
        return []
    command = load_peers.inspect_command(path)
    found: list[float] = []
    for number in range(INSPECT_RUNS + 1):
        cold.drop(path)
        start = time.perf_counter()
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        if finished.returncode != 0:
            progress(f"inspect failed: {load_peers.program_reason(finished)}")
            return []
        if number:  # The first brings the program into memory.
            found.append(seconds)
    return found


def run(arguments: argparse.Namespace) -> int:
    """Measures, reports, writes the files asked for; returns the exit status.

    The status is 1 if somebody loaded something else than was saved; missed goals do not change it.
    Raises BenchError and RamDiskError.
    """
    command_line.ignore_overruling_variables()
    command_line.prepare_outputs(arguments)
    if os.geteuid() != 0:
        progress("not root: only the files that are read are put out of the page cache")
    results: dict[str, StateResult] = {}
    inspected: list[float] = []
    largest = max(states.approximate_bytes(name, arguments.size) for name in arguments.state)
    with command_line.work_directory(arguments, SPACE_FACTOR * largest) as directory:
        facts = machine.describe(directory)
        if warning := machine.busy_warning(facts):
            progress(warning)
        for name in arguments.state:
            measured = measure_state(name, arguments, directory)
            if measured is not None:
                results[name] = measured[0]
                inspected = inspected or measured[1]
    judged = load_goals.evaluate(results, inspected, seed=arguments.seed)
    print(report.text(facts, results, judged, arguments.seed, who="loader"))
    written = document.document(
        facts,
        command_line.plain(arguments),
        results,
        judged,
        {"inspect_seconds": inspected},
        program="bench.load",
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if arguments.chart:
        drawable = next((name for name, result in results.items() if result.measured()), "")
        chart.draw([written], arguments.chart, state=drawable)
    wrong = any(not all(result.equals_original.values()) for result in results.values())
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0, 1 for wrong data, 2 if it cannot run, 130 if interrupted."""
    return command_line.guarded("bench.load", run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
