# SPDX-License-Identifier: Apache-2.0
"""The demo: a small run from end to end, and that a proof that does not hold is told.

No test looks at how long anything took.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "demo"))

import demo
import resuming
from proofs import Proof


def test_the_demo_proves_its_claims_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(demo.__file__), "--dir", str(tmp_path), "--size", "tiny"]
    finished = subprocess.run(
        [*command, "--iterations", "6", "--steps", "1", "--rounds", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "killed with SIGKILL when it began to save iteration 3" in finished.stdout
    assert "DCP async_save" in finished.stdout
    assert "FAILED" not in finished.stdout
    assert "resumed after SIGKILL, losses against the uninterrupted run: equal" in finished.stdout
    assert list(tmp_path.iterdir()) == []


def resume_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: int, after: dict[int, str]
) -> Proof:
    """The proof when the programs tell what is given here."""
    whole = {number: float(number).hex() for number in range(1, 7)}
    before = {number: whole[number] for number in range(1, 4)}
    plain = Proof("", True, "")
    monkeypatch.setattr(resuming, "uninterrupted_losses", lambda *_: whole)
    monkeypatch.setattr(resuming, "killed_run", lambda *_: before)
    monkeypatch.setattr(resuming, "resumed_run", lambda *_: (start, after))
    monkeypatch.setattr(resuming, "newest_is_plain", lambda *_: plain)
    found: list[Any] = resuming.kill_and_resume(tmp_path, "tiny", 6)
    first: Proof = found[0]
    return first


def test_losses_that_differ_in_the_last_bit_fail_the_proof(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    after = {number: float(number).hex() for number in range(3, 7)}
    assert resume_with(monkeypatch, tmp_path, 2, after).holds
    wrong = {**after, 5: (5.0 + 2**-50).hex()}
    proof = resume_with(monkeypatch, tmp_path, 2, wrong)
    assert not proof.holds
    assert proof.seen == "differ at [5]"


def test_a_run_that_lost_more_than_one_iteration_fails_the_proof(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    after = {number: float(number).hex() for number in range(2, 7)}
    assert not resume_with(monkeypatch, tmp_path, 1, after).holds
    assert not resume_with(monkeypatch, tmp_path, 0, {1: (1.0).hex(), **after}).holds


def test_a_proof_that_fails_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert not demo.all_hold([Proof("one", True, "seen"), Proof("two", False, "unseen")])
    assert "FAILED  two: unseen" in capsys.readouterr().out
    assert demo.all_hold([Proof("one", True, "seen")])
