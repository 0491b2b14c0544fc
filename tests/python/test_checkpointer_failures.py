# SPDX-License-Identifier: Apache-2.0
"""Saves that fail in the background: an older complete checkpoint stays, somebody is told exactly
once, and later saves work (google/orbax#605, pytorch/pytorch#156955)."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

import checkpoint_support as support
import faults_support as faults
import pytest
from checkpoint_support import END, Training

import fastpersist as fp


@contextlib.contextmanager
def failing(step: int, error: int = errno.EIO) -> Iterator[None]:
    """Every write of that step's file fails."""
    with faults.failing(f"pwrite-at 0 {END} errno {error} step-{step:08}/state.pt"):
        yield


def errors_of(*actions: Any) -> list[str]:
    """The names of the exceptions that the actions raise; "" for none."""
    found = []
    for action in actions:
        try:
            action()
            found.append("")
        except Exception as error:
            found.append(type(error).__name__)
    return found


# --- Who is told ---


def fail_one_of_four(folder: str, on_error: str) -> None:
    training = Training()
    ckpt = support.open_run(folder, on_error=on_error)
    ckpt.attach(training.optimizer)
    tickets: dict[int, fp.Ticket] = {}

    def save(step: int) -> None:
        tickets[step] = ckpt.save(step, training.state())

    with failing(2), faults.warnings_logged() as warnings:
        save(1)
        save(2)
        raised = None
        try:
            save(3)
        except fp.StorageError as error:
            raised = error
            tickets[3] = error.ticket  # type: ignore[attr-defined]
        save(4)
        tickets[4].result(60)
    assert any("step 2 was not saved" in message for message in warnings), warnings
    assert (raised is not None) is (on_error == "raise")
    assert tickets[3].step == 3 and tickets[3].result(60).step == 3
    assert ckpt.all_steps() == [1, 3, 4] and ckpt.latest_step() == 4
    assert ckpt.last_error is None, "the last one was good"
    told = errors_of(ckpt.wait_until_finished, ckpt.wait_until_finished, ckpt.close, ckpt.close)
    assert told == (["", "", "", ""] if raised is not None else ["StorageError", "", "", ""])


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_one_failure_is_told_once_and_the_list_is_right(on_error: str, tmp_path: Any) -> None:
    faults.run(fail_one_of_four, str(tmp_path), on_error, shim=True)


def fail_and_be_told(folder: str, how: str) -> None:
    training = Training()
    ckpt = support.open_run(folder, on_error="raise")
    with failing(1):
        ticket = ckpt.save(1, training.state())
        if how == "result":
            assert errors_of(ticket.result, ticket.result) == ["StorageError"] * 2
        elif how == "exception":
            assert isinstance(ticket.exception(60), fp.StorageError)
        elif how == "callback":
            seen: list[Any] = []
            ticket.add_done_callback(lambda done: seen.append(done.exception()))
            ticket._wait(60)
        elif how == "close":
            assert errors_of(ckpt.close, ckpt.close) == ["StorageError", ""]
            return
        elif how == "with":
            assert errors_of(lambda: leave(ckpt)) == ["StorageError"]
            return
    ckpt.save(2, training.state())
    ckpt.close()
    if how == "callback":
        assert [type(error) for error in seen] == [fp.StorageError]


def leave(ckpt: fp.Checkpointer) -> None:
    with ckpt:
        pass


@pytest.mark.parametrize("how", ["result", "exception", "callback", "close", "with"])
def test_a_failure_that_somebody_took_is_not_raised_again(how: str, tmp_path: Any) -> None:
    faults.run(fail_and_be_told, str(tmp_path), how, shim=True)


def fail_in_a_row(folder: str) -> list[str]:
    training = Training()
    ckpt = support.open_run(folder)
    raised = []
    with faults.failing(f"pwrite-at 0 {END} errno 28 state.pt"):
        for step in range(8):
            raised += errors_of(lambda: ckpt.save(step, training.state()))
            ckpt._saver._last._wait(60)  # type: ignore[union-attr]
            assert isinstance(ckpt.last_error, fp.StorageError)
    assert errors_of(ckpt.close) == ["StorageError"]
    return raised


def test_the_third_failure_in_a_row_is_raised_by_the_next_save(tmp_path: Any) -> None:
    raised = faults.run(fail_in_a_row, str(tmp_path), shim=True)
    assert raised == ["", "", "", "StorageError", "", "", "StorageError", ""]


# --- Every stage ---

STAGES = {
    "make the directory": "mkdirat 1 99 errno {} step-00000002",
    "name the owner": "openat 1 99 errno {} step-00000002/owner",
    "open the file": "openat 1 99 errno {} step-00000002/state.pt",
    "allocate": "fallocate 1 99 errno {} state.pt",
    "first write": "pwrite-at 0 0 errno {} state.pt",
    "a write in the middle": "pwrite-at 300000 300000 errno {} state.pt",
    "last write": "pwrite-at 460000 4611686018427387904 errno {} state.pt",
    "per rank": "pwrite-at 0 0 errno {} rank-00000.pt",
    "sync the file": "fdatasync 1 99 errno {} state.pt",
    "sync the directory": "fsync 1 99 errno {} step-00000002",
    "write the manifest": "openat 1 99 errno {} step-00000002/manifest",
    "name the manifest": "renameat 1 99 errno {} step-00000002/manifest",
}


def fail_in_a_stage(folder: str, stage: str, error: int) -> None:
    training = Training()
    with support.open_run(folder, keep_last=1, verify_source="full") as ckpt:
        ckpt.attach(training.optimizer)
        before = training.values()
        ckpt.save(1, training.state(), per_rank={"x": 1}).result(60)
        with faults.failing(STAGES[stage].format(error)):
            ticket = ckpt.save(2, training.state(), per_rank={"x": 2})
            training.step()
            found = support.failure(ticket)
        assert isinstance(found, fp.StorageError), found
        assert found.errno == error and "step-00000002" in str(found.filename), found
        assert ckpt.all_steps() == [1]
        assert support.difference(ckpt.load().state, before) == ""
        before = training.values()
        ckpt.save(2, training.state(), per_rank={"x": 2}).result(60)
        assert ckpt.all_steps() == [2]
        assert support.difference(ckpt.load().state, before) == ""
    with support.open_run(folder) as ckpt:
        left = [name for name in os.listdir(os.path.join(folder, "run")) if "step" in name]
        assert len(left) == 1, "what was begun is removed by then at the latest"
        assert ckpt.all_steps() == [2]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_in_any_stage_leaves_the_older_checkpoint_and_the_next_save_works(
    stage: str, error: int, tmp_path: Any
) -> None:
    faults.run(fail_in_a_stage, str(tmp_path), stage, error, shim=True)


def fail_once(folder: str, at: int) -> None:
    training = Training()
    options = fp.Options(engine="buffered", block_bytes=support.BLOCK)
    with support.open_run(folder, options=options, verify_source="full") as ckpt:
        ckpt.attach(training.optimizer)
        before = training.values()
        with faults.failing(f"pwrite-at {at} {END} once 5 state.pt"):
            ckpt.save(1, training.state()).result(60)
        assert support.difference(ckpt.load().state, before) == ""


@pytest.mark.parametrize("at", [0, 100_000, 300_000])
def test_a_write_that_fails_once_is_tried_again(at: int, tmp_path: Any) -> None:
    faults.run(fail_once, str(tmp_path), at, shim=True)


# --- What the caller gets wrong ---


class Stubborn:
    def __reduce__(self) -> Any:
        raise ValueError("not me")


WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no pickle": (3, {"deep": {"fn": lambda: 1}}, fp.UnsupportedStateError, r"\['deep'\]\['fn'\]"),
    "its own error": (3, {"deep": [Stubborn()]}, fp.UnsupportedStateError, r"\['deep'\]\[0\]"),
    "negative step": (-1, {}, fp.ArgumentError, "step -1"),
    "no number": ("3", {}, fp.ArgumentError, "step '3'"),
    "a truth": (True, {}, fp.ArgumentError, "step True"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_saved_is_refused_at_once_and_the_next_save_works(
    wrong: str, tmp_path: Any
) -> None:
    step, state, kind, text = WRONG[wrong]
    with support.open_run(tmp_path) as ckpt:
        with pytest.raises(kind, match=text):
            ckpt.save(step, state)
        with pytest.raises(fp.UnsupportedStateError, match="metadata"):
            ckpt.save(5, {}, metadata={"loss": object()})
        assert ckpt.all_steps() == []
        ckpt.save(4, {"model": 1}, metadata={"loss": 0.5}).result(60)
        assert ckpt.load().metadata == {"loss": 0.5}


@pytest.mark.parametrize(
    "arguments",
    [
        {"keep_last": 0}, {"keep_every": -1}, {"memory": 1000}, {"in_flight": "drop"},
        {"verify_source": "all"}, {"on_error": "ignore"}, {"wait_timeout": -1},
        {"drain_timeout": float("nan")}, {"commit_timeout": "1"}, {"options": {"sync": True}},
        {"memory": 1 << 20, "options": fp.Options(staging_bytes=1 << 21)},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_cannot_work_are_refused_and_nothing_is_made(
    arguments: dict[str, Any], tmp_path: Any
) -> None:
    with pytest.raises(fp.ArgumentError, match=next(iter(arguments))):
        fp.Checkpointer(tmp_path / "run", **arguments)
    assert os.listdir(tmp_path) == []
