# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the Python tests: saving with both writers, and what every test must leave behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist as fp
from fastpersist import _log

REPOSITORY = Path(__file__).resolve().parents[2]

# Started in the background of a shell, pytest ignores SIGINT, and so would every child.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def leftovers(folder: Path) -> list[Path]:
    """Temporary files of saves that have ended."""
    return list(folder.rglob(".fp-*"))


@pytest.fixture(autouse=True)
def _no_temporary_file_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    used = "tmp_path" in request.fixturenames
    folder = request.getfixturevalue("tmp_path") if used else None  # now: it goes before we do
    yield
    assert folder is None or leftovers(folder) == []


@pytest.fixture
def warned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """The warnings since the test began; what was said in other tests is forgotten."""
    monkeypatch.setattr(_log, "_said", set())
    caplog.set_level(logging.DEBUG, logger="fastpersist")

    def messages() -> list[str]:
        found = [r for r in caplog.records if r.name == "fastpersist"]
        return [r.getMessage() for r in found if r.levelno >= logging.WARNING]

    return messages


class Pair:
    """One state, saved under one name by both writers."""

    def __init__(self, ours: str, theirs: str, info: fp.SaveInfo) -> None:
        self.ours, self.theirs, self.info = ours, theirs, info

    def difference(self) -> str | None:
        """Where the two files differ first; None when they are identical."""
        return first_difference(read(self.ours), read(self.theirs))


def read(path: str | bytes | os.PathLike[Any]) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def first_difference(ours: bytes, theirs: bytes) -> str | None:
    if ours == theirs:
        return None
    limit = min(len(ours), len(theirs))
    at = next((i for i in range(limit) if ours[i] != theirs[i]), limit)
    near = slice(max(0, at - 16), at + 32)
    return (
        f"{len(ours)} and {len(theirs)} bytes, different from byte {at}: "
        f"{ours[near]!r} and {theirs[near]!r}"
    )


@pytest.fixture
def save_with_both(tmp_path: Path) -> Callable[..., Pair]:
    """`save_with_both(state, name, **arguments of torch.save)`: two folders, one file in each."""

    def save(state: Any, name: str = "model.pt", **arguments: Any) -> Pair:
        paths = []
        for folder in ("ours", "theirs"):
            path = os.path.join(tmp_path, folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            paths.append(path)
        info = fp.save(state, paths[0], **arguments)
        torch.save(state, paths[1], **arguments)
        return Pair(paths[0], paths[1], info)

    return save


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in a fresh interpreter that finds this fastpersist; in tmp_path."""

    def run(
        program: str,
        *arguments: str,
        environment: dict[str, str] | None = None,
        check: bool = True,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        package = str(Path(fp.__file__).resolve().parents[1])
        path = os.pathsep.join([package, str(Path(__file__).parent)])
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FASTPERSIST_")}
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=tmp_path,
            env={**clean, "PYTHONPATH": path, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run
