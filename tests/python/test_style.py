# SPDX-License-Identifier: Apache-2.0
"""The repository keeps its own rules of style, and the checks of them can fail."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import REPOSITORY


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(autouse=True)
def _repository() -> None:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("skipped: not a git repository, so it cannot be told which files are its own")


def test_the_repository_breaks_no_rule_of_style() -> None:
    done = run_script("scripts/style_rules.py")
    assert done.returncode == 0, done.stdout


def test_every_rule_of_style_finds_its_canary() -> None:
    done = run_script("scripts/style_rules.py", "--canary")
    assert done.returncode == 0, done.stdout


def test_links_in_the_documents_lead_somewhere() -> None:
    done = run_script("scripts/check_links.py")
    assert done.returncode == 0, done.stdout
