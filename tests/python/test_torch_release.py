# SPDX-License-Identifier: Apache-2.0
"""Which releases of torch are trusted without a self-test, and that the self-tests pass."""

from __future__ import annotations

import copyreg
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fastpersist import _capture, _rebuild, _torch_release

ROOT = Path(__file__).parents[2]
was_compared = _torch_release.was_compared.__wrapped__  # not what an earlier call found


def test_our_files_are_those_of_the_installed_torch() -> None:
    assert _capture.compare_files() == ""


def test_the_compiled_pickler_agrees_with_the_installed_torch() -> None:
    assert _capture.compare_picklers()


def test_our_reader_serves_the_installed_torch() -> None:
    assert _rebuild.compare_readers() == ""


def test_the_compiled_unpickler_agrees_with_the_installed_torch() -> None:
    assert _rebuild.compare_unpicklers().result()


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="skipped: the documents are not here")
def test_the_releases_that_are_trusted_are_those_of_the_table() -> None:
    table = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d[\d.]*) \| .* (\d+) of (\d+) \| \d+ passed", table, re.MULTILINE)
    assert {release for release, _, _ in rows} == _torch_release.COMPARED
    assert all(identical == of for _, identical, of in rows)


@pytest.mark.parametrize(
    ("version", "trusted"),
    [
        ("2.13.0", True),
        ("2.13.0+cpu", True),
        ("2.13.0+cu128", True),
        ("2.13.0+rocm6.4", True),
        ("2.13.0+git12ab", False),
        ("2.13.0a0+ecf3bae", False),
        ("2.13.0.dev20260101", False),
        ("2.13.1", False),
        ("2.99.0", False),
    ],
)
def test_only_the_very_release_is_trusted(
    version: str, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert was_compared() is trusted


def test_a_torch_that_another_package_changed_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    original = torch.serialization._save

    @functools.wraps(original)
    def changed(*arguments: Any, **named: Any) -> Any:
        return original(*arguments, **named)

    assert was_compared()
    monkeypatch.setattr(torch.serialization, "_save", changed)
    assert not was_compared()


def test_a_torch_whose_parameters_are_pickled_otherwise_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setitem(copyreg.dispatch_table, torch.nn.Parameter, lambda p: (list, ()))
    assert not was_compared()


@pytest.mark.parametrize("works", [True, False])
def test_another_torch_is_compared_before_it_is_used(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch_release, "was_compared", lambda: False)
    monkeypatch.setattr(_capture, "compare_files", lambda: "" if works else "it differs")
    monkeypatch.setattr(_capture, "compare_picklers", lambda: works)
    monkeypatch.setattr(_rebuild, "compare_readers", lambda: "" if works else "it differs")
    assert (_capture.self_test.__wrapped__() == "") is works
    assert _capture._fast_path_works.__wrapped__() is works
    assert (_rebuild.self_test.__wrapped__() == "") is works
    assert _rebuild._plain_path_works.__wrapped__().result()
