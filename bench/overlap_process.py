# SPDX-License-Identifier: Apache-2.0
"""A process that trains and saves as it is told, and the other end that starts it and asks.

A process of its own, because an allocator is preloaded, because memory must start from nothing, and
because it may stand under a limit of the storage. It answers each line of JSON with one.
`python -m bench.overlap_process` is that process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parent.parent
# Both give memory of 32 KiB and more at a page; jemalloc as it is built by default does not.
ALLOCATORS = ("libtcmalloc_minimal.so.4", "libmimalloc.so.2")
MAPPED = "mapped memory"


class TrainingError(RuntimeError):
    """The process ended, or an arm failed; the message is the last line it wrote, or the error."""


def page_allocator() -> str | None:
    """The library to preload for a page-aligned state; None where there is none."""
    for name in ALLOCATORS:
        probe = subprocess.run(
            ["true"], env={**os.environ, "LD_PRELOAD": name}, capture_output=True, check=False
        )
        if probe.returncode == 0 and not probe.stderr:
            return name
    return None


class TrainingProcess:
    """A workload in a process of its own. Leaving the `with` block ends the process.

    alignment: None for the default allocator, MAPPED, or the name of a library to preload.
    """

    def __init__(
        self,
        workload: str,
        directory: Path,
        *,
        size: float,
        seed: int,
        sleep: float = 0.0,
        alignment: str | None = None,
    ) -> None:
        command = [sys.executable, "-m", "bench.overlap_process", "--workload", workload]
        command += ["--dir", str(directory), "--size", str(size), "--seed", str(seed)]
        command += ["--sleep", str(sleep), *(["--mapped"] if alignment == MAPPED else [])]
        environment = dict(os.environ)
        if alignment not in (None, MAPPED):
            environment["LD_PRELOAD"] = str(alignment)
        self._errors: IO[str] = tempfile.TemporaryFile(  # noqa: SIM115, closed by __exit__
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._errors.close()

    def ask(self, check: str, arm: str, count: int, memory: int | None = None) -> dict[str, Any]:
        """The answer to one of overlap_checks.CHECKS. Raises TrainingError."""
        return self._exchange({"check": check, "arm": arm, "count": count, "memory": memory})

    def facts(self) -> dict[str, Any]:
        """Waits until it is ready. "bytes", "tensors", "aligned_share" of the state, "threads"."""
        return self._exchange({"check": "facts"})

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines()
            raise TrainingError(lines[-1][:300] if lines else "the process ended")
        answer: dict[str, Any] = json.loads(line)
        if error := answer.get("error"):
            raise TrainingError(error)
        return answer


class _Answers:
    """What the process does for each request. Arms of blocks are kept; checks make their own."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from bench import overlap_training as training

        self._directory: Path = arguments.dir
        self._workload = training.make(
            arguments.workload, size=arguments.size, seed=arguments.seed, sleep=arguments.sleep
        )
        if arguments.mapped:
            training.move_to_pages(self._workload)
        self._arms: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        import torch

        from bench import overlap_arms, overlap_checks, overlap_training

        if request["check"] == "facts":
            size, count = overlap_training.state_size(self._workload)
            share = overlap_training.aligned_share(self._workload)
            threads = torch.get_num_threads()
            return {"bytes": size, "tensors": count, "aligned_share": share, "threads": threads}
        name, memory = request["arm"], request["memory"]
        if name not in self._arms:
            path = self._directory / f"{os.getpid()}-{name}"
            self._arms[name] = overlap_arms.make(name, self._workload, path, memory)
        return overlap_checks.CHECKS[request["check"]](self._arms[name], request["count"])

    def close(self) -> None:
        for arm in self._arms.values():
            arm.close()


def main() -> int:
    """Answers until stdin ends; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.overlap_process", description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--dir", type=Path, required=True, help="where to save")
    parser.add_argument("--size", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds of a step that sleeps")
    parser.add_argument("--mapped", action="store_true", help="put the state into mapped memory")
    arguments = parser.parse_args()
    # Others write to stdout as they like; their lines must not come between ours.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answers = _Answers(arguments)
    for line in sys.stdin:
        try:
            answer = answers.answer(json.loads(line))
        except Exception as error:  # The other end decides what becomes of an arm that fails.
            text = " ".join(str(error).split())[:200]
            answer = {"error": f"{type(error).__name__}: {text}"}
        print(json.dumps(answer), file=out, flush=True)
    answers.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
