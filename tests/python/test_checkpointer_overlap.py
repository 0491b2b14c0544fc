# SPDX-License-Identifier: Apache-2.0
"""Saving beside training, in loops as people write them: gradient accumulation, and steps with a
closure as Lightning makes them. The device takes no byte until it is told to, so that whatever ends
before has run beside the write; no clock is looked at."""

from __future__ import annotations

import copy
from typing import Any

import checkpoint_support as support
import faults_support as faults
import pytest
import torch
from checkpoint_support import SMALL, Hold, Training, held, large, waits

import fastpersist as fp

STEPS, ACCUMULATE = 3, 4
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
}


class Events:
    """What happened, in the order in which it ended, and whether before the write."""

    def __init__(self, hold: Hold, ticket: fp.Ticket) -> None:
        self.seen: list[str] = []
        self._hold, self._ticket = hold, ticket

    def add(self, name: str) -> None:
        pending = self._hold.is_held() and self._ticket.progress()[0] == 0
        self.seen.append(f"{name}, not written yet" if pending else name)

    def call(self, name: str, function: Any) -> Any:
        result = function()
        self.add(name)
        return result


def watch_steps(folder: str, training: Training, memory: int | None, loop: Any) -> None:
    """Each save is held while the loop, of (training, its events), makes the next step. With little
    memory the step must wait for the device in the end, and with enough it need not."""
    with support.open_run(folder, memory=memory, verify_source="full") as ckpt:
        ckpt.attach(training.optimizer)
        for step in range(1, STEPS + 1):
            before = training.values()
            with held(folder) as hold:
                ticket = ckpt.save(step, training.state())
                hold.reached()
                events = Events(hold, ticket)
                if memory == SMALL:
                    assert waits(hold, lambda: loop(training, events)), "it changes what is read"
                else:
                    loop(training, events)
                    assert hold.is_held() and not ticket.done()
                hold.release()
                ticket.result(60)
            computed = [name for name in events.seen if not name.startswith("step")]
            assert computed == EXPECTED[loop], events.seen
            ends = "step" if memory == SMALL else "step, not written yet"
            assert events.seen == [*computed, ends]
            assert support.difference(ckpt.load(step).state, before) == ""
            changed = support.difference(training.state()["model"], before["model"])
            assert changed != "", "the step was made"


def accumulate(training: Training, events: Events) -> None:
    """Micro-batches, then the step."""
    training.optimizer.zero_grad()
    for _ in range(ACCUMULATE):
        batch = torch.randn(8, 96)
        loss = events.call("forward", lambda: training.model(batch).square().mean() / ACCUMULATE)
        events.call("backward", loss.backward)
    events.call("step", training.optimizer.step)


def step_with_closure(training: Training, events: Events) -> None:
    """As Lightning's automatic optimization: forward, zero_grad and backward are the closure."""

    def closure() -> Any:
        batch = torch.randn(8, 96)
        loss = events.call("forward", lambda: training.model(batch).square().mean())
        events.call("zero_grad", training.optimizer.zero_grad)
        events.call("backward", loss.backward)
        return loss

    events.call("step", lambda: training.optimizer.step(closure=closure))


def accumulate_with_closure(training: Training, events: Events) -> None:
    """As Lightning with accumulate_grad_batches: closures by themselves, the last one in a step."""
    training.optimizer.zero_grad()

    def closure() -> Any:
        batch = torch.randn(8, 96)
        loss = events.call("forward", lambda: training.model(batch).square().mean() / ACCUMULATE)
        events.call("backward", loss.backward)
        return loss

    for _ in range(ACCUMULATE - 1):
        closure()
    events.call("step", lambda: training.optimizer.step(closure=closure))


LOOPS = {
    "accumulation": accumulate,
    "closure": step_with_closure,
    "accumulation with closures": accumulate_with_closure,
}
EXPECTED: dict[Any, list[str]] = {
    accumulate: ["forward, not written yet", "backward, not written yet"] * ACCUMULATE,
    step_with_closure: [
        "forward, not written yet", "zero_grad, not written yet", "backward, not written yet"
    ],
    accumulate_with_closure: ["forward, not written yet", "backward, not written yet"] * ACCUMULATE,
}  # fmt: skip


def train(folder: str, kind: str, loop: str, memory: int | None) -> None:
    optimizer, arguments = KINDS[kind]
    watch_steps(folder, large(optimizer, **arguments), memory, LOOPS[loop])


@pytest.mark.parametrize("memory", [SMALL, None], ids=["little memory", "enough memory"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_run_before_the_device_took_a_byte(
    kind: str, loop: str, memory: int | None, tmp_path: Any
) -> None:
    faults.run(train, str(tmp_path), kind, loop, memory, shim=True)


def save_between_micro_batches(folder: str) -> None:
    """The gradients are in the state, are copied, and are added to while nothing is written."""
    training = large(torch.optim.SGD, momentum=0.9)
    with support.open_run(folder, verify_source="full") as ckpt:
        ckpt.attach(training.optimizer)
        training.backward()
        gradients = {str(i): p.grad for i, p in enumerate(training.model.parameters())}
        state = {**training.state(), "gradients": gradients}
        before = copy.deepcopy(state)
        with held(folder) as hold:
            ticket = ckpt.save(1, state)
            hold.reached()
            for _ in range(ACCUMULATE):
                training.model(torch.randn(8, 96)).square().mean().backward()
            assert hold.is_held() and not ticket.done()
            hold.release()
            ticket.result(60)
        found = ckpt.load().state
        assert support.difference(found, before) == ""
        assert support.difference(found["gradients"], gradients) != "", "they were added to"


def test_gradients_saved_between_micro_batches_have_the_values_of_then(tmp_path: Any) -> None:
    faults.run(save_between_micro_batches, str(tmp_path), shim=True)
