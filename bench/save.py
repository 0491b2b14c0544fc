# SPDX-License-Identifier: Apache-2.0
"""Compares fp.save with other writers and with the limit of the storage, and judges its goals."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import (
    chart,
    command_line,
    document,
    goals,
    leaks,
    machine,
    memory,
    peers,
    report,
    states,
)
from bench.command_line import progress
from bench.equality import equals_torch_save
from bench.results import StateResult
from bench.rounds import LIMIT_NAMES, contenders, run_rounds

REPOSITORY = Path(__file__).resolve().parent.parent
# Two files to compare, or a writer's temporary beside its target.
SPACE_FACTOR = 3

EPILOG = """\
examples:
  python -m bench.save --quick                 about a minute, to see whether all works
  python -m bench.save --json build/disk.json --chart build/disk.png
  python -m bench.save --ram --state gpt2      on a loop device over memory, as root
  python -m bench.save --state gpt2 --only fastpersist limit torch --rounds 30

writers for --only: """ + ", ".join([*peers.PEERS, "limit"])


@dataclass(frozen=True)
class Programme:
    """Who saves a state, and how many rounds for each round asked for."""

    contenders: tuple[str, ...]
    rounds_factor: int = 1


_ENGINES = tuple(peers.engine_peer_name(engine) for engine in peers.ENGINES)
PROGRAMMES: dict[str, Programme] = {
    "gpt2": Programme(
        (
            peers.FASTPERSIST,
            *_ENGINES,
            *LIMIT_NAMES,
            peers.TORCH,
            "safetensors",
            "dcp",
            "torchsnapshot",
            "deepspeed",
        )
    ),
    "tensor": Programme((peers.FASTPERSIST, *LIMIT_NAMES, peers.TORCH, "safetensors")),
    # The others take a file or many seconds for each hundred tensors.
    "tiny": Programme((peers.FASTPERSIST, peers.TORCH, "safetensors")),
    # Milliseconds each, most of them waiting for the device: it takes many to see a difference.
    "small": Programme(
        (peers.FASTPERSIST, peers.TORCH_COMMITTED, peers.TORCH, "safetensors"),
        rounds_factor=20,
    ),
}
STATES_WITH_FIRST_SAVE = ("gpt2",)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with what --quick stands for filled in. SystemExit(2) when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.save",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_arguments(parser, "save to", "; 20 times as many for the small one")
    parser.add_argument(
        "--state",
        nargs="+",
        choices=states.STATES,
        default=list(states.STATES),
        metavar="NAME",
        help="which states: " + ", ".join(states.STATES) + " (default: all)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*peers.PEERS, "limit"],
        metavar="WRITER",
        help="only these writers (default: all that are installed)",
    )
    return command_line.fill_in(parser.parse_args(argv))


def wanted(state: str, only: Sequence[str] | None) -> list[str]:
    """The contenders for a state, in order; "limit" in `only` stands for all its settings."""
    names = PROGRAMMES[state].contenders
    if only is None:
        return list(names)
    return [name for name in names if name in only or (name in LIMIT_NAMES and "limit" in only)]


def measure_state(name: str, arguments: argparse.Namespace, directory: Path) -> StateResult | None:
    """Builds one state and measures all its contenders; None if none was asked for."""
    names = wanted(name, arguments.only)
    if not names:
        return None
    state = states.build(name, size=arguments.size, seed=arguments.seed)
    progress(f"{name}: {state.bytes / 1e9:.3g} GB in {state.tensors:,} tensors")
    ready, absent = contenders(state, names, progress)
    equal: bool | None = None
    if any(contender.name == peers.FASTPERSIST for contender in ready):
        equal = equals_torch_save(state, directory)
        progress(f"{name}: fp.save {'wrote' if equal else 'DID NOT WRITE'} torch.save's bytes")
    result = run_rounds(
        state,
        ready,
        arguments.rounds * PROGRAMMES[name].rounds_factor,
        directory,
        seed=arguments.seed,
        progress=progress,
    )
    result.absent = {**absent, **result.absent}
    result.equals_torch_save = equal
    return result


def measure_first_saves(
    result: StateResult, arguments: argparse.Namespace, directory: Path
) -> None:
    """Adds every writer's first save, each in a fresh process, for its peak memory."""
    for name in result.measured():
        if name not in peers.PEERS or name in _ENGINES:
            continue
        try:
            found = memory.first_save(
                name,
                result.name,
                size=arguments.size,
                seed=arguments.seed,
                directory=directory,
            )
        except RuntimeError as error:
            progress(f"{result.name}: no peak memory of {name}: {error}")
            continue
        result.first_saves[name] = found
        progress(f"{result.name}: first save by {name} grew by {found.rss_growth / 1e6:.0f} MB")


def measure_leaks(arguments: argparse.Namespace, directory: Path) -> leaks.LeakResult | None:
    """Counts what 50 saves leave behind, in a fresh process; None if it cannot run."""
    if arguments.only is not None and peers.FASTPERSIST not in arguments.only:
        return None
    if reason := peers.PEERS[peers.FASTPERSIST].missing():
        progress(f"no leaks counted: {reason}")
        return None
    command = [sys.executable, "-m", "bench.leaks", "--json", "--dir", str(directory)]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    try:
        return leaks.LeakResult.from_json(json.loads(finished.stdout))
    except (ValueError, KeyError):
        lines = finished.stderr.strip().splitlines()
        progress(f"leaks: failed: {lines[-1] if lines else finished.returncode}")
        return None


def run(arguments: argparse.Namespace) -> int:
    """Measures, reports, writes the files asked for; returns the exit status.

    The status is 1 if fp.save wrote something else than torch.save; missed goals do not change it.
    Raises BenchError and RamDiskError.
    """
    command_line.ignore_overruling_variables()
    command_line.prepare_outputs(arguments)
    results: dict[str, StateResult] = {}
    largest = max(states.approximate_bytes(name, arguments.size) for name in arguments.state)
    with command_line.work_directory(arguments, SPACE_FACTOR * largest) as directory:
        facts = machine.describe(directory)
        if warning := machine.busy_warning(facts):
            progress(warning)
        for name in arguments.state:
            result = measure_state(name, arguments, directory)
            if result is None:
                continue
            results[name] = result
            if name in STATES_WITH_FIRST_SAVE:
                measure_first_saves(result, arguments, directory)
        counted = measure_leaks(arguments, directory)
    judged = goals.evaluate(results, counted, on_ram=arguments.ram, seed=arguments.seed)
    print(report.text(facts, results, judged, arguments.seed))
    written = document.document(
        facts,
        command_line.plain(arguments),
        results,
        judged,
        {"leaks": counted.as_json() if counted else None},
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if arguments.chart:
        drawable = next((name for name, result in results.items() if result.measured()), "")
        chart.draw([written], arguments.chart, state=drawable)
    return 1 if any(result.equals_torch_save is False for result in results.values()) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0, 1 for wrong bytes, 2 if it cannot run, 130 if interrupted."""
    return command_line.guarded("bench.save", run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
