# SPDX-License-Identifier: Apache-2.0
"""Compares fp.save with other writers and with the limit of the storage, and judges its goals."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from bench import chart, document, goals, leaks, machine, memory, peers, ramdisk, report, states
from bench.equality import equals_torch_save
from bench.results import StateResult
from bench.rounds import LIMIT_NAMES, contenders, run_rounds

REPOSITORY = Path(__file__).resolve().parent.parent
# They would overrule the engine that a contender asks for.
OVERRULING_VARIABLES = ("FASTPERSIST_ENGINE", "FASTPERSIST_DIRECT")
DEFAULT_ROUNDS = 15
QUICK_ROUNDS = 3
QUICK_SIZE = 0.1
# Two files to compare, or a writer's temporary beside its target, and what a file system needs.
SPACE_FACTOR = 3
SPACE_EXTRA_BYTES = 512 << 20

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


class BenchError(RuntimeError):
    """The benchmark cannot run as asked; the message says why and what to do."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with what --quick stands for filled in. SystemExit(2) when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.save",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path.cwd(),
        help="save below this directory (default: here)",
    )
    parser.add_argument(
        "--ram",
        action="store_true",
        help="save to an ext4 on a loop device over memory; needs root",
    )
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
    parser.add_argument(
        "--rounds",
        type=_positive_integer,
        help=f"for each state; 20 times as many for the small one (default: {DEFAULT_ROUNDS})",
    )
    parser.add_argument(
        "--size", type=_positive_number, help="factor on the states' sizes (default: 1)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a look, no measurement: --rounds {QUICK_ROUNDS} --size {QUICK_SIZE}",
    )
    parser.add_argument("--seed", type=int, default=0, help="for values, order and intervals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    parser.add_argument("--chart", type=Path, metavar="PNG", help="draw the first state's rates")
    arguments = parser.parse_args(argv)
    arguments.rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else DEFAULT_ROUNDS)
    arguments.size = arguments.size or (QUICK_SIZE if arguments.quick else 1.0)
    return arguments


def _positive_integer(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _positive_number(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError("must be positive")
    return number


def progress(line: str) -> None:
    """Tells of progress on stderr, so that stdout holds the tables alone."""
    print(line, file=sys.stderr, flush=True)


def wanted(state: str, only: Sequence[str] | None) -> list[str]:
    """The contenders for a state, in order; "limit" in `only` stands for all its settings."""
    names = PROGRAMMES[state].contenders
    if only is None:
        return list(names)
    return [name for name in names if name in only or (name in LIMIT_NAMES and "limit" in only)]


@contextlib.contextmanager
def work_directory(arguments: argparse.Namespace, largest_bytes: int) -> Iterator[Path]:
    """A fresh directory on the storage to be measured, removed afterwards. Raises BenchError."""
    need = SPACE_FACTOR * largest_bytes + SPACE_EXTRA_BYTES
    with contextlib.ExitStack() as stack:
        if arguments.ram:
            progress(f"making an ext4 of {need / 1e9:.1f} GB on a loop device over memory")
            parent = stack.enter_context(ramdisk.ram_disk(need))
        else:
            parent = arguments.dir
            if not parent.is_dir():
                raise BenchError(f"--dir {parent} is not a directory")
            if shutil.disk_usage(parent).free < need:
                raise BenchError(f"{parent} has less than {need / 1e9:.1f} GB free: use --size")
        try:
            directory = tempfile.mkdtemp(prefix="fastpersist-bench-", dir=parent)
        except OSError as error:
            raise BenchError(f"cannot write to {parent}: {error.strerror}") from error
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        yield Path(directory)


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


def prepare_outputs(arguments: argparse.Namespace) -> None:
    """Finds out now, not after ten minutes, what would keep the results from being written."""
    for path in filter(None, (arguments.json, arguments.chart)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"cannot make the directory of {path}: {error.strerror}") from error
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise BenchError(f"cannot write to {path}")
    if arguments.chart and importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--chart needs matplotlib: pip install matplotlib")


def run(arguments: argparse.Namespace) -> int:
    """Measures, reports, writes the files asked for; returns the exit status.

    The status is 1 if fp.save wrote something else than torch.save; missed goals do not change it.
    Raises BenchError and RamDiskError.
    """
    for variable in OVERRULING_VARIABLES:
        if os.environ.pop(variable, None) is not None:
            progress(f"{variable} is ignored here")
    prepare_outputs(arguments)
    results: dict[str, StateResult] = {}
    largest = max(states.approximate_bytes(name, arguments.size) for name in arguments.state)
    with work_directory(arguments, largest) as directory:
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
    written = document.document(facts, _plain(arguments), results, counted, judged)
    if arguments.json:
        arguments.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if arguments.chart:
        drawable = next((name for name, result in results.items() if result.measured()), "")
        chart.draw([written], arguments.chart, state=drawable)
    return 1 if any(result.equals_torch_save is False for result in results.values()) else 0


def _plain(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
    }


def _exit_on_signal(number: int, _frame: types.FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0, 1 for wrong bytes, 2 if it cannot run, 130 if interrupted."""
    arguments = parse_arguments(argv)
    signal.signal(signal.SIGTERM, _exit_on_signal)  # Unwinds, and thereby cleans up.
    try:
        return run(arguments)
    except (BenchError, ramdisk.RamDiskError) as error:
        print(f"bench.save: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "bench.save: interrupted; everything it had made is removed",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
