# SPDX-License-Identifier: Apache-2.0
"""The progress line of `fastpersist`, on a terminal and for work that is long enough to show it."""

from __future__ import annotations

import json
import os
import pty
import signal
import struct
import subprocess
from pathlib import Path

import pytest
from test_cli import PROGRAM

INTERRUPTED = 128 + signal.SIGINT
HUGE = 1 << 40  # bytes of a hole: no device reads them before the line is seen

pytestmark = pytest.mark.skipif(
    not PROGRAM.is_file(), reason=f"skipped: {PROGRAM} is not built (make build)"
)


def _seen_until_interrupted(arguments: list[str], folder: Path, sign: bytes) -> tuple[int, bytes]:
    """Runs the program on a terminal, interrupts it once it shows `sign`; status and what came."""
    main, other = pty.openpty()
    process = subprocess.Popen(
        [PROGRAM, *arguments], cwd=folder, env={"TERM": "xterm"}, stdout=other, stderr=other
    )
    os.close(other)
    seen = b""
    try:
        while sign not in seen:
            try:
                piece = os.read(main, 65536)
            except OSError:  # the other side is closed
                break
            seen += piece
        process.send_signal(signal.SIGINT)
        return process.wait(timeout=60), seen
    finally:
        process.kill()
        process.wait()
        os.close(main)


def test_a_long_verification_shows_how_far_it_is_and_can_be_left(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [HUGE], "data_offsets": [0, HUGE]}})
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        try:
            file.truncate(8 + len(header) + HUGE)
        except OSError as error:
            pytest.skip(f"skipped: no sparse file of 1 TiB here: {error}")
    status, seen = _seen_until_interrupted(["verify", path.name], tmp_path, b" %")
    assert b"verifying [" in seen
    assert status in (INTERRUPTED, -signal.SIGINT)


def test_a_long_measurement_shows_a_line_before_its_first_step_is_done(tmp_path: Path) -> None:
    arguments = ["bench", "--size", "256M", "--rounds", "100", "."]
    status, seen = _seen_until_interrupted(arguments, tmp_path, b" %")
    assert b"measuring [" in seen and b"  0 %" in seen
    assert status in (INTERRUPTED, -signal.SIGINT)
    assert not list(tmp_path.iterdir())
