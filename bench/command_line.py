# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks have in common on the command line and around a run."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from bench import ramdisk

# They would overrule the engine that a contender asks for.
OVERRULING_VARIABLES = ("FASTPERSIST_ENGINE", "FASTPERSIST_DIRECT")
DEFAULT_ROUNDS = 15
QUICK_ROUNDS = 3
QUICK_SIZE = 0.1
SPACE_EXTRA_BYTES = 512 << 20  # What a file system needs for itself.


class BenchError(RuntimeError):
    """The benchmark cannot run as asked; the message says why and what to do."""


def progress(line: str) -> None:
    """Tells of progress on stderr, so that stdout holds the tables alone."""
    print(line, file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser, verb: str, rounds_note: str = "") -> None:
    """The options of every benchmark; `verb` is what it does in a directory ("save to")."""
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path.cwd(),
        help="work below this directory (default: here)",
    )
    parser.add_argument(
        "--ram",
        action="store_true",
        help=f"{verb} an ext4 on a loop device over memory; needs root",
    )
    parser.add_argument(
        "--rounds",
        type=_positive_integer,
        help=f"for each state{rounds_note} (default: {DEFAULT_ROUNDS})",
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


def fill_in(arguments: argparse.Namespace) -> argparse.Namespace:
    """Replaces what was left open by what --quick stands for, or by the defaults."""
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


@contextlib.contextmanager
def work_directory(arguments: argparse.Namespace, files_bytes: int) -> Iterator[Path]:
    """A fresh directory on the storage to be measured, removed afterwards. Raises BenchError.

    files_bytes: of all files that will lie in it at once.
    """
    need = files_bytes + SPACE_EXTRA_BYTES
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


def prepare_outputs(arguments: argparse.Namespace) -> None:
    """Finds out now, not after ten minutes, what would keep the results from being written."""
    for path in filter(
        None, (arguments.json, arguments.chart, getattr(arguments, "timeline", None))
    ):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"cannot make the directory of {path}: {error.strerror}") from error
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise BenchError(f"cannot write to {path}")
    if arguments.chart and importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--chart needs matplotlib: pip install matplotlib")


def ignore_overruling_variables() -> None:
    """Takes them out of the environment, and says so."""
    for variable in OVERRULING_VARIABLES:
        if os.environ.pop(variable, None) is not None:
            progress(f"{variable} is ignored here")


def plain(arguments: argparse.Namespace) -> dict[str, object]:
    """The arguments, ready for json.dump."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
    }


def guarded(
    program: str, run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace
) -> int:
    """Runs `run`; returns its status, 2 if it cannot run as asked, 130 if interrupted."""
    signal.signal(signal.SIGTERM, _exit_on_signal)  # Unwinds, and thereby cleans up.
    try:
        return run(arguments)
    except (BenchError, ramdisk.RamDiskError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted; everything it had made is removed", file=sys.stderr)
        return 130


def _exit_on_signal(number: int, _frame: types.FrameType | None) -> NoReturn:
    sys.exit(128 + number)
