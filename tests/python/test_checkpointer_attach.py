# SPDX-License-Identifier: Apache-2.0
"""Loading, giving up and copying while a save is in flight; and what can be attached at all."""

from __future__ import annotations

import copy
import gc
import json
import pathlib
import weakref
from typing import Any

import checkpoint_support as support
import faults_support as faults
import pytest
import torch
from checkpoint_support import SMALL, Hold, Training, check_that_it_waits, held, large, waits

import fastpersist as fp


def load_attached(folder: str, what: str) -> None:
    training, other = large(), large()

    def load(run: Training, _: Hold) -> None:
        if what == "model":
            run.model.load_state_dict(other.model.state_dict())
        else:
            run.optimizer.load_state_dict(other.optimizer.state_dict())

    def attach(ckpt: fp.Checkpointer) -> None:
        ckpt.attach(training.optimizer)
        ckpt.attach(training.optimizer)  # again: nothing more happens
        ckpt.attach(model=training.model)

    check_that_it_waits(folder, training, load, attach)


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_load_state_dict_waits(what: str, tmp_path: Any) -> None:
    faults.run(load_attached, str(tmp_path), what, shim=True)


def restore_meanwhile(folder: str) -> None:
    training = large()
    with support.open_run(folder, memory=SMALL) as ckpt:
        ckpt.attach(training.optimizer)
        ckpt.save(1, training.state()).result(60)
        training.step()
        before = training.values()
        with held(folder) as hold:
            ckpt.save(2, training.state())
            hold.reached()
            targets = {"model": training.model, "optim": training.optimizer}
            steps: list[Any] = []
            assert waits(hold, lambda: steps.append(ckpt.restore(targets)))
        assert steps == [2], "the newest is the one that was in flight"
        assert support.difference(training.values(), before) == ""


def test_restore_waits_for_the_save_in_flight_and_takes_it(tmp_path: Any) -> None:
    faults.run(restore_meanwhile, str(tmp_path), shim=True)


def skip_a_step(folder: str) -> None:
    """GradScaler leaves out steps whose gradients are not finite; nothing needs to wait then."""
    training = large()
    scaler = torch.amp.GradScaler("cpu")

    def skip(run: Training, hold: Hold) -> None:
        scaler.scale(run.backward().requires_grad_())
        for weight in run.weights():
            weight.grad = torch.full_like(weight, float("inf"))
        scaler.step(run.optimizer)
        scaler.update()
        assert hold.is_held()

    def attach(ckpt: fp.Checkpointer) -> None:
        ckpt.attach(training.optimizer)

    training.model.eval()  # so that forward changes nothing
    check_that_it_waits(folder, training, skip, attach, expected=False)


def test_a_step_that_the_scaler_skips_does_not_wait(tmp_path: Any) -> None:
    faults.run(skip_a_step, str(tmp_path), shim=True)


def step_through_a_scaler(folder: str) -> None:
    training = large()
    scaler = torch.amp.GradScaler("cpu")

    def step(run: Training, _: Hold) -> None:
        scaler.scale(run.backward().requires_grad_())
        scaler.step(run.optimizer)
        scaler.update()

    check_that_it_waits(folder, training, step, lambda ckpt: ckpt.attach(training.optimizer))


def test_a_step_that_the_scaler_does_not_skip_waits(tmp_path: Any) -> None:
    faults.run(step_through_a_scaler, str(tmp_path), shim=True)


def give_up_waiting(folder: str) -> None:
    training = large()
    with support.open_run(folder, memory=SMALL, wait_timeout=0.2) as ckpt:
        ckpt.attach(training.optimizer)
        with held(folder) as hold:
            ticket = ckpt.save(1, training.state())
            hold.reached()
            training.step()  # returns, although the device is held
            training.step()
            with faults.warnings_logged() as warnings:
                skipped = ckpt.save(2, training.state())
            assert skipped.done() and skipped.step == 2 and skipped.progress() == (0, 0)
            assert [w for w in warnings if "step 2 was not saved" in w], warnings
            assert isinstance(ckpt.last_error, fp.SaveInFlightError)
            with pytest.raises(fp.SaveInFlightError, match="has not answered"):
                skipped.result()
            hold.release()
            error = support.failure(ticket)
        assert isinstance(error, fp.SaveAbandonedError) and isinstance(error, TimeoutError)
        assert "wait_timeout" in str(error)
        before = training.values()
        ckpt.save(3, training.state()).result(60)
        assert ckpt.all_steps() == [3]
        assert support.difference(ckpt.load().state, before) == ""


def test_after_wait_timeout_the_save_is_given_up_and_training_goes_on(tmp_path: Any) -> None:
    faults.run(give_up_waiting, str(tmp_path), shim=True)


def save_often_meanwhile(folder: str) -> list[Any]:
    """Of each save of a storage that does not answer: the ticket's step, or what was raised."""
    training = large()
    log = pathlib.Path(folder, "log")
    outcomes: list[Any] = []
    with support.open_run(folder, memory=SMALL, wait_timeout=0.2, log=log) as ckpt:
        ckpt.attach(training.optimizer)
        with held(folder) as hold:
            ticket = ckpt.save(1, training.state())
            hold.reached()
            for step in range(2, 7):
                training.step()
                try:
                    outcomes.append(ckpt.save(step, training.state()).step)
                except fp.SaveInFlightError as error:
                    outcomes.append(f"raised {error.ticket.step}")  # type: ignore[attr-defined]
            hold.release()
            support.failure(ticket)
        with pytest.raises(fp.SaveInFlightError) as raised:  # 5, 6 and at last 1 have failed
            ckpt.save(7, training.state())
        assert raised.value.ticket.result(60).step == 7  # type: ignore[attr-defined]
        assert ckpt.all_steps() == [7]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["step"], line["ok"]) for line in lines] == [
        *((step, False) for step in range(1, 7)), (7, True)
    ]  # fmt: skip
    assert lines[-1]["totals"]["saves"] == 7 and lines[-1]["totals"]["failed"] == 6
    return outcomes


def test_while_the_storage_does_not_answer_saves_fail_as_others_do(tmp_path: Any) -> None:
    outcomes = faults.run(save_often_meanwhile, str(tmp_path), shim=True)
    assert outcomes == [2, 3, "raised 4", 5, 6]


def save_meanwhile_and_raise(folder: str) -> None:
    training = large()
    arguments: dict[str, Any] = {"memory": SMALL, "wait_timeout": 0.2, "on_error": "raise"}
    with support.open_run(folder, **arguments) as ckpt, held(folder) as hold:
        ckpt.attach(training.optimizer)
        ticket = ckpt.save(1, training.state())
        hold.reached()
        with pytest.raises(fp.SaveInFlightError, match="has not answered"):
            ckpt.save(2, training.state())
        hold.release()
        support.failure(ticket)


def test_with_on_error_raise_a_save_is_refused_while_the_storage_does_not_answer(
    tmp_path: Any,
) -> None:
    faults.run(save_meanwhile_and_raise, str(tmp_path), shim=True)


def copy_the_rest(folder: str) -> None:
    """With memory to spare a step copies what the device has not taken."""
    training = large()
    with support.open_run(folder, verify_source="full") as ckpt:
        ckpt.attach(training.optimizer)
        before = training.values()
        # A write from staging memory: the record's beginning shares its block with the pickle.
        with held(folder) as hold:
            ticket = ckpt.save(1, training.state())
            hold.reached()
            training.step()  # returns, although the device is held
            assert hold.is_held()
            hold.release()
            ticket.result(60)
        assert ticket.captured_bytes > 1 << 20
        assert support.difference(ckpt.load().state, before) == ""


def test_with_memory_to_spare_a_step_copies_the_rest_and_does_not_wait_for_the_device(
    tmp_path: Any,
) -> None:
    faults.run(copy_the_rest, str(tmp_path), shim=True)


# --- What can be attached ---


class AcceleratedLike(torch.optim.Optimizer):
    """Never runs Optimizer.__init__, as accelerate's wrapper."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class ZeroLike:
    """Looks like an optimizer, has one inside, and does more than step it."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def step_through_a_wrapper(folder: str) -> None:
    training = large()
    wrapper = AcceleratedLike(training.optimizer)

    def step(run: Training, _: Hold) -> None:
        run.backward()
        wrapper.step()

    check_that_it_waits(folder, training, step, lambda ckpt: ckpt.attach(wrapper))


def test_wrappers_are_looked_through(tmp_path: Any) -> None:
    faults.run(step_through_a_wrapper, str(tmp_path), shim=True)


def test_what_does_not_step_through_torch_is_refused(tmp_path: Any) -> None:
    optimizer = torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=1.0)
    unhooked = type("Unhooked", (torch.optim.SGD,), {"step": lambda self, closure=None: None})
    with support.open_run(tmp_path) as ckpt:
        for thing in (ZeroLike(optimizer), AcceleratedLike(None), object()):
            with pytest.raises(fp.ArgumentError, match="nothing could make it wait"):
                ckpt.attach(thing)  # type: ignore[arg-type]
        refused: Any = unhooked([torch.ones(3, requires_grad=True)], lr=1.0)
        unhooked.step = torch.optim.SGD.step.__wrapped__  # type: ignore[attr-defined]
        with pytest.raises(fp.ArgumentError, match="nothing could make it wait"):
            ckpt.attach(refused)


def test_attach_keeps_nothing_alive(tmp_path: Any) -> None:
    training = Training()
    ckpt = support.open_run(tmp_path)
    ckpt.attach(training.optimizer, model=training.model, frozen=torch.nn.Linear(3, 3))
    ckpt.save(1, training.state()).result(60)
    references = [weakref.ref(thing) for thing in (training.optimizer, training.model)]
    del training
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    ckpt.close()
    reference = weakref.ref(ckpt)
    del ckpt
    gc.collect()
    assert reference() is None


def save_frozen(folder: str, change: bool) -> None:
    """Weights that nobody changes are read in place; if somebody does, nothing is committed."""
    base: Any = Training(layers=40).model.requires_grad_(False).eval()
    head = torch.nn.Linear(96, 1)
    with support.open_run(folder, memory=SMALL) as ckpt, held(folder) as hold:
        ckpt.attach(torch.optim.SGD(head.parameters(), lr=0.1), frozen=base)
        state = {"base": base.state_dict(), "head": head.state_dict()}
        before = copy.deepcopy(state)
        ticket = ckpt.save(1, state)  # copying would have to wait for the device
        hold.reached()
        if change:
            base[4].weight.add_(1)
        hold.release()
        if change:
            error = support.failure(ticket)
            assert isinstance(error, fp.StateChangedError)
            assert error.tensor == "['base']['4.weight']"
        else:
            ticket.result(60)
            assert support.difference(ckpt.load().state, before) == ""


@pytest.mark.parametrize("change", [False, True], ids=["unchanged", "changed"])
def test_frozen_weights_are_read_in_place_and_watched(change: bool, tmp_path: Any) -> None:
    faults.run(save_frozen, str(tmp_path), change, shim=True)


def save_what_was_replaced(folder: str) -> None:
    """NVIDIA-NeMo/RL#3312: nothing of an earlier save decides what a later one writes."""
    training = Training()
    with support.open_run(folder) as ckpt:
        ckpt.attach(training.optimizer)
        ckpt.save(1, training.state()).result(60)
        for weight in training.weights():
            weight.data = torch.randn_like(weight)
        training.weights()[1].data = torch.randn(200, 90, dtype=torch.float64)
        before = training.values()
        ckpt.save(2, training.state()).result(60)
        assert support.difference(ckpt.load(2).state, before) == ""
        with torch.no_grad():
            training.weights()[0].add_(1)
        before = training.values()
        ckpt.save(3, training.state()).result(60)
        assert support.difference(ckpt.load(3).state, before) == ""


def test_tensors_replaced_between_saves_are_saved_with_their_new_values(tmp_path: Any) -> None:
    faults.run(save_what_was_replaced, str(tmp_path))
