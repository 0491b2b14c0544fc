#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT on the CPU with a checkpoint after every iteration, kills it, and resumes it.

The text is the source of Python's standard library. The run that was killed must end with the
losses of an uninterrupted one, bit for bit; what a checkpoint costs is shown beside torch.save and
torch.distributed.checkpoint. Then one state is saved several times with torch.save and with
fastpersist; the files are compared, loaded and checked, training goes on from what was loaded, and
a damaged copy is loaded. Nothing is left behind unless --keep is given.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
SUCCESS, FAILED_PROOF, NOT_BUILT, STORAGE_ERROR, INTERRUPTED = 0, 1, 2, 3, 130


def stop(status: int, sentence: str) -> NoReturn:
    """Ends the program with one sentence on stderr."""
    print(f"demo: {sentence}", file=sys.stderr)
    sys.exit(status)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line; wrong usage ends the program with status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Examples:\n"
        "  python examples/demo/demo.py\n"
        "  python examples/demo/demo.py --size small --steps 10 --dir /mnt/nvme --keep\n\n"
        "Exit status: 0 all proofs held; 1 one did not; 2 wrong usage, or fastpersist is not\n"
        "built; 3 an error of the storage; 130 interrupted.",
    )
    parser.add_argument(
        "--size",
        choices=("tiny", "small", "medium"),
        default="medium",
        help="tiny: for a try; small: 12.6 M parameters, 151 MB saved; medium: 25.4 M, 305 MB "
        "(default)",
    )
    parser.add_argument(
        "--iterations",
        type=positive,
        default=16,
        help="of the run that is killed in the middle (default 16)",
    )
    parser.add_argument(
        "--steps", type=positive, default=20, help="before one state is saved (default 20)"
    )
    parser.add_argument(
        "--rounds", type=positive, default=5, help="saves of it with each writer (default 5)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="where to save: a folder for the demo is made in it "
        "(default: the repository's build folder)",
    )
    parser.add_argument("--keep", action="store_true", help="leave the saved files there")
    return parser.parse_args()


def positive(text: str) -> int:
    """Reads a number of steps or rounds."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def file_system(folder: Path) -> str:
    """The type of the file system that holds `folder`, from /proc/self/mountinfo; see proc(5)."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == number:
                return source.split()[0]
    return "unknown"


@contextlib.contextmanager
def demo_folder(parent: Path | None, keep: bool) -> Iterator[Path]:
    """A new folder, removed at the end however that comes, unless it is to be kept."""
    if parent is None:  # /tmp may lie in memory; the repository hardly does
        parent = REPOSITORY / "build"
        parent = parent if parent.is_dir() else REPOSITORY
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="fastpersist-demo-", dir=parent))
    try:
        yield folder
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the removal
        if keep:
            print(f"\nKept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def check_space(folder: Path, state_bytes: int) -> None:
    """What one writer leaves between two turns, and the others' files."""
    needed, free = 10 * state_bytes, shutil.disk_usage(folder).free
    if free < needed:
        lack = f"{folder} has {free / 1e9:.1f} GB free and needs {needed / 1e9:.1f} GB"
        stop(STORAGE_ERROR, f"{lack}: choose another folder with --dir, or --size small")


def train(run: Any, steps: int) -> None:
    """Trains and prints a few of the losses."""
    parameters, text = run.model.parameter_count() / 1e6, len(run.text) / 1e6
    print(f"\nTraining a GPT of {parameters:.1f} M parameters on {text:.1f} MB of Python's sources")
    for step, (loss, seconds) in enumerate(run.run(steps), 1):
        if step in (1, steps) or step % 5 == 0:
            print(f"  step {step:3} of {steps}   loss {loss:.3f}   {seconds:.2f} s", flush=True)


def save_in_turns(state: Any, folder: Path, rounds: int) -> tuple[list[Any], Any]:
    """Returns all measurements and what fastpersist said of its last save."""
    import saving

    print(f"\nSaving to {folder} ({file_system(folder)})")
    if file_system(folder) in ("tmpfs", "ramfs"):
        print("  this lies in memory: the figures say nothing about a disk; try --dir")
    measurements, info = [], None
    for measurement, said in saving.alternate(state, folder, rounds):
        measurements.append(measurement)
        info = said or info
        label = f"round {(len(measurements) + 1) // 2} of {rounds}"
        print(f"  {label}   {measurement.writer:18}   {measurement.seconds:.3f} s", flush=True)
    return measurements, info


def prove(run: Any, state: Any, folder: Path) -> list[Any]:
    """The proofs for one file."""
    import loading
    import proofs
    import saving

    files = saving.paths(folder)
    ours = files[saving.FASTPERSIST]
    results = [
        proofs.files_are_equal(folder, files[saving.TORCH], ours),
        proofs.torch_loads_it(ours, state),
        proofs.archive_is_sound(folder, ours),
    ]
    if len(run.losses) > 1:
        seen = f"from {run.losses[0]:.3f} to {run.losses[-1]:.3f}"
        results.append(proofs.Proof("loss went down", run.loss_went_down(), seen))
    results.append(loading.loads_equal(ours, state))
    results += loading.damage_is_named(folder, ours, state)
    # Last, for it goes on training: the state changes.
    results.append(loading.resumed_run_is_the_same(run, ours))
    return results


def all_hold(proofs: list[Any]) -> bool:
    """Prints each proof; returns whether all hold."""
    print("\nProofs")
    for proof in proofs:
        print(f"  {'ok    ' if proof.holds else 'FAILED'}  {proof.claim}: {proof.seen}")
    return all(proof.holds for proof in proofs)


def demonstrate(arguments: argparse.Namespace, fp: Any) -> int:
    """Runs the whole demo; returns the exit status."""
    import costs
    import report
    import resuming
    import sizes
    import torch

    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{versions}, fastpersist {fp.__version__}, {torch.get_num_threads()} threads")
    with demo_folder(arguments.dir, arguments.keep) as folder:
        run = sizes.new_training(arguments.size)
        check_space(folder, 12 * run.model.parameter_count())  # weights and Adam's two moments
        proofs = resuming.kill_and_resume(folder, arguments.size, arguments.iterations)
        train(run, arguments.steps)
        cost = costs.Costs(sizes.new_training(arguments.size), folder)
        cost.measure()
        print(f"\n{cost.table()}")
        state = run.state()
        measurements, info = save_in_turns(state, folder, arguments.rounds)
        print(f"\n{report.table(measurements)}")
        kind = "direct" if info.direct else "buffered"
        print(f"\nEngine: {info.engine}, {kind} I/O. Why: {info.engine_reason}")
        print(f"Last save: {info}")
        proofs += prove(run, state, folder)
        return SUCCESS if all_hold(proofs) else FAILED_PROOF


def main() -> int:
    """Handles what can go wrong around the demo; returns the exit status."""
    arguments = parse_arguments()
    try:
        import fastpersist as fp
    except ImportError as error:
        stop(NOT_BUILT, f"fastpersist is not built ({error}); run `make build` in {REPOSITORY}")
    # Leaves as Ctrl-C does, so that the folder is removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return demonstrate(arguments, fp)
    except KeyboardInterrupt:
        stop(INTERRUPTED, "interrupted" + ("" if arguments.keep else "; its files are removed"))
    except (OSError, fp.Error) as error:
        stop(STORAGE_ERROR, str(error))


if __name__ == "__main__":
    sys.exit(main())
