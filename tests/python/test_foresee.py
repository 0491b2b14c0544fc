# SPDX-License-Identifier: Apache-2.0
"""Saving says what weights_only=True will refuse (huggingface/transformers#40500)."""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import load_support
import numpy as np
import pytest
import torch

import fastpersist as fp
from fastpersist import _foresee


@pytest.fixture(autouse=True)
def _nothing_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_foresee, "_seen", set())


def random_state() -> dict[str, Any]:
    return {
        "rng": {"python": random.getstate(), "numpy": np.random.get_state()},
        "loss": np.float64(0.5),
        "counts": defaultdict(int, a=1),
        "weight": torch.ones(3),
    }


def test_a_checkpoint_names_once_what_a_resumed_run_could_not_load(
    tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    with fp.Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, random_state()).result()
    messages = [message for message in warned() if "weights_only=True" in message]
    assert len(messages) == 1
    assert "['rng']['numpy'][1] (ndarray)" in messages[0]
    assert "['loss'] (float64), ['counts'] (defaultdict)" in messages[0]
    assert "['python']" not in messages[0] and "['weight']" not in messages[0]


def test_what_is_foreseen_is_what_loading_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="fastpersist")
    for number, value in enumerate(random_state().values()):
        monitored = {"x": value}
        caplog.clear()
        _foresee._seen.clear()
        fp.save(monitored, tmp_path / f"{number}.pt")
        foreseen = any("weights_only=True" in record.getMessage() for record in caplog.records)
        try:
            fp.load(tmp_path / f"{number}.pt")
            refused = False
        except fp.WeightsOnlyError:
            refused = True
        assert foreseen is refused


def test_states_that_load_are_saved_without_a_word(
    tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    state = {"rng": fp.rng_state(), "size": torch.Size([1])}
    with fp.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state).result()
        assert ckpt.load().state["size"] == torch.Size([1])
    assert not warned()


def test_what_the_user_allowed_is_no_cause_for_a_warning(
    tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    with (
        load_support.safe_globals([Fraction]),
        fp.Checkpointer(tmp_path / "run") as ckpt,
    ):
        ckpt.save(1, {"part": Fraction(1, 3)}).result()
        assert ckpt.load().state["part"] == Fraction(1, 3)
    assert not warned()


def test_lists_that_share_lists_take_no_time(tmp_path: Path) -> None:
    shared: list[Any] = [np.float64(1)]
    for _ in range(60):
        shared = [shared, shared]
    fp.save({"x": shared}, tmp_path / "x.pt")
