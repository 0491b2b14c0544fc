# SPDX-License-Identifier: Apache-2.0
"""A fresh process that loads once, and the other end that starts it, lets it go and listens.

In a process that has loaded before, kept buffers would hide in the starting point, and code would
be in memory already. The process imports and prepares, prints "ready", waits for a line on stdin,
measures, and prints one JSON object. `python -m bench.load_process` is that process.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from bench import load_peers
from bench.measure import Sample, machine_cpu_seconds, measure

READY = "ready"
GO = "go\n"
KILO = 1024  # The unit of ru_maxrss.


class LoadError(RuntimeError):
    """A loader failed; the message is the last line that it wrote on stderr."""


def _with_bytecode() -> dict[str, str]:
    """The environment, in which Python keeps what it compiled, as it does of installed packages.

    Otherwise modules of a source tree would be compiled again in the measured time.
    """
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


class WaitingLoad:
    """A loader in a process of its own. Leaving the `with` block ends the process."""

    def __init__(self, loader: str, directory: Path, data_bytes: int, *, check: bool) -> None:
        command = [sys.executable, "-m", "bench.load_process", "--loader", loader]
        command += ["--dir", str(directory), "--bytes", str(data_bytes)]
        self._errors: IO[str] = tempfile.TemporaryFile(  # noqa: SIM115, closed by __exit__
            "w+", encoding="utf-8", errors="replace"
        )
        self._process = subprocess.Popen(
            [*command, *(["--checksums"] if check else [])],
            cwd=load_peers.REPOSITORY,
            env=_with_bytecode(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> WaitingLoad:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._errors.close()

    def wait_until_ready(self) -> None:
        """Returns when nothing but the load is left to do. Raises LoadError."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == READY:
                return
        self._fail()

    def go(self) -> dict[str, Any]:
        """Lets it load; returns what it printed. Raises LoadError."""
        try:
            output, _ = self._process.communicate(GO)
        except BrokenPipeError:
            self._fail()
        if self._process.returncode != 0:
            self._fail()
        found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
        return found

    def _fail(self) -> None:
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        raise LoadError(lines[-1][:300] if lines else f"exit status {status}")


def sample_from_json(found: dict[str, Any]) -> Sample:
    """The sample that Sample.as_json described."""
    return Sample(**found)


def main() -> int:
    """Loads once in this process and prints what was found; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.load_process", description=__doc__)
    parser.add_argument("--loader", required=True, choices=load_peers.LOADERS)
    parser.add_argument("--dir", type=Path, required=True, help="where the saved files lie")
    parser.add_argument("--bytes", type=int, required=True, help="of the tensors in it")
    parser.add_argument("--checksums", action="store_true", help="print them, measure nothing")
    arguments = parser.parse_args()
    loader = load_peers.LOADERS[arguments.loader]
    path = arguments.dir / loader.source
    # Others write to stdout as they like; their lines must not come between ours.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if loader.command is not None:
        return _run_program(loader.command(path), arguments, answers)
    assert loader.prepare is not None
    load = loader.prepare(path)
    last_read = load_peers.LastRead()
    logging.getLogger("fastpersist").addHandler(last_read)
    logging.getLogger("fastpersist").setLevel(logging.DEBUG)
    gc.collect()
    if not _wait_for_go(answers):
        return 1
    kept: list[Any] = []  # Freeing it takes time that is no part of loading.
    sample = measure(lambda: kept.append(load()), arguments.bytes)
    if arguments.checksums:
        from bench.equality import checksums

        print(json.dumps(checksums(kept[0])), file=answers, flush=True)
        return 0
    found = sample.as_json() | {"detail": last_read.detail}
    if stages := found["detail"].get("stages"):
        stages["total"] = sample.seconds
    print(json.dumps(found), file=answers, flush=True)
    return 0


def _wait_for_go(answers: IO[str]) -> bool:
    """False if the other end is gone."""
    print(READY, file=answers, flush=True)
    return sys.stdin.readline() == GO


def _run_program(command: list[str], arguments: argparse.Namespace, answers: IO[str]) -> int:
    """Measures a program from its start to its end, its own start-up included."""
    # Brings the program and its libraries into memory, as imports do for the others.
    subprocess.run([command[0], "--version"], capture_output=True, check=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not _wait_for_go(answers):
        return 1
    machine_before = machine_cpu_seconds()
    start = time.perf_counter()
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    machine_after = machine_cpu_seconds()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if finished.returncode != 0:
        print(load_peers.program_reason(finished), file=sys.stderr)
        return 1
    if arguments.checksums:
        print(json.dumps({}), file=answers, flush=True)
        return 0
    sample = Sample(
        seconds=seconds,
        bytes=arguments.bytes,
        cpu_seconds=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        machine_cpu_seconds=machine_after - machine_before,
        rss_growth=after.ru_maxrss * KILO,  # The whole process: it started from nothing.
        detail=_read_detail(finished.stdout),
    )
    print(json.dumps(sample.as_json()), file=answers, flush=True)
    return 0


def _read_detail(output: str) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(output)["read"]
    except (ValueError, KeyError):
        return {}
    return read


if __name__ == "__main__":
    sys.exit(main())
