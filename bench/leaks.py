# SPDX-License-Identifier: Apache-2.0
"""Does saving leak? Saves many times, every other save made to fail, and counts what is held.

Failures alternate between a target in a directory that does not exist and a file-size limit below
the state's size. Counted are descriptors, threads, resident memory and files that nobody asked for,
before (after a warm-up save of each kind, which may create pools that are kept) and after.
`python -m bench.leaks` prints the counts; exit status 1 if something grew.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.measure import rss_bytes

SAVES = 50
STATE_BYTES = 8 << 20
FILE_SIZE_LIMIT = 1 << 20
# Pages that the allocator keeps or returns as it likes.
RSS_TOLERANCE = 1_000_000


@dataclass(frozen=True)
class Holdings:
    """What the process holds; `files` are names in the target's directory besides the target."""

    descriptors: int
    threads: int
    rss: int
    files: int


@dataclass(frozen=True)
class LeakResult:
    """Counts before and after `saves` saves, of which `failed` failed as intended."""

    saves: int
    failed: int
    before: Holdings
    after: Holdings

    @property
    def unchanged(self) -> bool:
        """Whether nothing grew, the resident memory by no more than RSS_TOLERANCE."""
        before, after = self.before, self.after
        return (
            after.descriptors <= before.descriptors
            and after.threads <= before.threads
            and after.rss <= before.rss + RSS_TOLERANCE
            and after.files <= before.files
        )

    def as_json(self) -> dict[str, Any]:
        """The fields and the verdict, ready for json.dump."""
        return asdict(self) | {"unchanged": self.unchanged}

    @staticmethod
    def from_json(found: dict[str, Any]) -> LeakResult:
        """The reverse of as_json. Raises KeyError or TypeError for anything else."""
        return LeakResult(
            found["saves"],
            found["failed"],
            Holdings(**found["before"]),
            Holdings(**found["after"]),
        )


@contextlib.contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Lets writes beyond `limit` bytes fail with EFBIG; Python ignores the signal with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def holdings(directory: Path, target: Path) -> Holdings:
    """Counts what this process holds now."""
    gc.collect()
    return Holdings(
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        rss=rss_bytes(),
        files=sum(1 for entry in directory.iterdir() if entry != target),
    )


def run(directory: Path, saves: int = SAVES) -> LeakResult:
    """Saves `saves` times below `directory`. RuntimeError if a save does not end as intended."""
    fastpersist = importlib.import_module("fastpersist")
    elements = STATE_BYTES // 4 // 8
    state = {f"layer.{index}": torch.rand(elements) for index in range(8)}
    target = directory / "model.pt"

    def save_well() -> None:
        fastpersist.save(state, target)

    def fail_without_directory() -> None:
        _expect_failure(lambda: fastpersist.save(state, directory / "missing" / "model.pt"))

    def fail_at_limit() -> None:
        with file_size_limit(FILE_SIZE_LIMIT):
            _expect_failure(lambda: fastpersist.save(state, target))

    def _expect_failure(save: Any) -> None:
        try:
            save()
        except fastpersist.StorageError:
            return
        raise RuntimeError("a save that had to fail succeeded")

    turns = (save_well, fail_without_directory, save_well, fail_at_limit)
    for turn in turns:
        turn()
    before = holdings(directory, target)
    failed = 0
    for number in range(saves):
        turn = turns[number % len(turns)]
        turn()
        failed += turn is not save_well
    return LeakResult(saves, failed, before, holdings(directory, target))


def describe(result: LeakResult) -> str:
    """The counts in a few lines."""
    rows = [
        f"{result.saves} saves, {result.failed} of them failing",
        f"{'':12}{'before':>12}{'after':>12}",
    ]
    before, after = asdict(result.before), asdict(result.after)
    rows += [f"{key:12}{before[key]:>12,}{after[key]:>12,}" for key in before]
    return "\n".join([*rows, "unchanged" if result.unchanged else "GREW"])


def main() -> int:
    """Counts and prints; returns 1 if something grew."""
    parser = argparse.ArgumentParser(prog="python -m bench.leaks", description=__doc__)
    parser.add_argument(
        "--dir", type=Path, default=Path.cwd(), help="where to save (default: here)"
    )
    parser.add_argument("--saves", type=int, default=SAVES, help="how often (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fastpersist-bench-", dir=arguments.dir) as folder:
        result = run(Path(folder), arguments.saves)
    print(json.dumps(result.as_json()) if arguments.json else describe(result))
    return 0 if result.unchanged else 1


if __name__ == "__main__":
    sys.exit(main())
