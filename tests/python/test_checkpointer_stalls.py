# SPDX-License-Identifier: Apache-2.0
"""A device that stalls and comes back: training waits for it no longer than it was told to, goes on
without checkpoints, says so, and has checkpoints again as soon as the device answers. The order of
events is looked at, not a clock: what returns while the device is held did not wait for it."""

from __future__ import annotations

import threading
from typing import Any

import checkpoint_support as support
import faults_support as faults
import pytest
from checkpoint_support import SMALL, Hold, Training, held, large

import fastpersist as fp

# What does not answer: the call that is held ("" holds writes), in files whose path contains this.
STALLS: dict[str, dict[str, Any]] = {
    "write": {},
    "allocation": {"call": "fallocate"},
    "sync": {"call": "fdatasync"},
    "commit": {"call": "renameat", "path": "step-00000002/manifest"},
}
COMMITTING = ("commit",)
"""A save that is being committed cannot be given up any more: it counts when the device answers."""


class Progress:
    """What the progress callback was told, and an event for the next calls."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self._more = threading.Condition()

    def __call__(self, written: int, total: int) -> None:
        with self._more:
            self.told.append((written, total))
            self._more.notify_all()

    def wait_for_more(self, number: int) -> None:
        """Returns once it was called that often from now on."""
        with self._more:
            goal = len(self.told) + number
            assert self._more.wait_for(lambda: len(self.told) >= goal, 60), "progress is not told"


def train_through_a_stall(folder: str, where: str) -> None:
    training, progress = large(), Progress()
    arguments: dict[str, Any] = {"memory": SMALL, "wait_timeout": 0.2, "progress": progress}
    with support.open_run(folder, **arguments) as ckpt:
        ckpt.attach(training.optimizer)
        ckpt.save(1, training.state()).result(60)
        training.step()
        before = training.values()
        with held(folder, **STALLS[where]) as hold:
            ticket = ckpt.save(2, training.state())
            hold.reached()
            progress.wait_for_more(4)
            skipped = train_without_checkpoints(ckpt, training, hold)
            progress.wait_for_more(4)  # of the save that the device still holds
            hold.release()
            committed = outcome(ckpt, ticket, where in COMMITTING)
        assert all(0 <= written <= total for written, total in progress.told)
        assert ckpt.all_steps() == [1, *committed]
        if committed:
            assert support.difference(ckpt.load(2).state, before) == ""
        for step in (skipped + 1, skipped + 2):
            before = training.values()
            ckpt.save(step, training.state()).result(60)
            training.step()
            assert ckpt.latest_step() == step
            assert support.difference(ckpt.load().state, before) == ""
        assert ckpt.last_error is None


def train_without_checkpoints(ckpt: fp.Checkpointer, training: Training, hold: Hold) -> int:
    """Steps and a save while the device is held; the step that was not saved."""
    training.step()
    assert hold.is_held(), "the step returned although the device does not answer"
    ticket = ckpt.save(3, training.state())
    assert hold.is_held() and ticket.done()
    error = support.failure(ticket)
    assert isinstance(error, fp.SaveInFlightError)
    expected = (str(ckpt.directory), "step 3 is not saved", "the save of step 2", "look at")
    assert all(part in str(error) for part in expected), error
    assert ckpt.all_steps() == [1]
    training.step()
    return 3


def outcome(ckpt: fp.Checkpointer, ticket: fp.Ticket, committing: bool) -> list[int]:
    """Of the save that the device held."""
    error = ticket.exception(60)
    if committing:
        assert error is None
        return [2]
    assert isinstance(error, fp.SaveAbandonedError), error
    path = str(ckpt.directory / "step-00000002" / "state.pt")  # where the storage took too long
    assert path in str(error) or "that of step 2" in str(error), error
    assert "0.2 s" in str(error) and "look at the storage" in str(error), error
    return []


@pytest.mark.parametrize("where", STALLS)
def test_training_goes_on_without_checkpoints_while_the_device_stalls_and_with_them_after_it(
    where: str, tmp_path: Any
) -> None:
    faults.run(train_through_a_stall, str(tmp_path), where, shim=True)


# --- Half a minute ---

STALL = 30.0
"""Seconds."""


def train_through_half_a_minute(folder: str) -> dict[str, Any]:
    """Saves after every step; what became of them, in the order of the steps."""
    training, progress = large(), Progress()
    arguments: dict[str, Any] = {"memory": SMALL, "wait_timeout": 5, "progress": progress}
    failed: list[str] = []
    with support.open_run(folder, **arguments) as ckpt:
        ckpt.attach(training.optimizer)
        ckpt.save(1, training.state()).result(60)
        training.step()
        with held(folder) as hold:
            timer = threading.Timer(STALL, hold.release)
            first = ckpt.save(2, training.state())
            hold.reached()
            timer.start()
            step, calls = 2, len(progress.told)
            while hold.is_held():
                training.step()
                step += 1
                try:
                    ticket = ckpt.save(step, training.state())
                except fp.Error as error:  # what the third failure in a row was
                    ticket = error.ticket  # type: ignore[attr-defined]
                if ticket.done():
                    failed.append(type(ticket.exception()).__name__)
            timer.join()
        calls = len(progress.told) - calls
        gone = type(support.failure(first)).__name__
        ckpt.wait_until_finished(60)
        before = training.values()
        ckpt.save(step + 1, training.state()).result(60)
        assert support.difference(ckpt.load().state, before) == ""
        assert ckpt.latest_step() == step + 1 and ckpt.last_error is None
    return {"first": gone, "failed": failed, "calls": calls, "steps": step - 2}


@pytest.mark.slow
def test_a_stall_of_half_a_minute_costs_checkpoints_and_not_the_training(tmp_path: Any) -> None:
    found = faults.run(train_through_half_a_minute, str(tmp_path), shim=True, timeout=150)
    assert found["first"] == "SaveAbandonedError", found
    assert set(found["failed"]) == {"SaveInFlightError"}, found
    # In fact about 24 steps and 280 calls; fewer only where the machine has no time for us.
    assert found["steps"] >= 3 and found["calls"] >= 10, found
