# SPDX-License-Identifier: Apache-2.0
"""Where training waits for a save: before whatever changes memory that is still being read, and
nowhere else. The device is held, so that waiting is seen without a clock."""

from __future__ import annotations

import threading
from typing import Any

import checkpoint_support as support
import faults_support as faults
import pytest
import torch
from checkpoint_support import SMALL, Hold, Training, check_that_it_waits, held, large
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fastpersist as fp

# --- Every kind of step ---

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adam, one by one": (torch.optim.Adam, {"foreach": False}),
    "Adam, foreach": (torch.optim.Adam, {"foreach": True}),
    "Adam, fused": (torch.optim.Adam, {"fused": True}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {}),
}


def step_attached(folder: str, kind: str) -> None:
    optimizer, arguments = KINDS[kind]
    training = large(optimizer, **arguments)
    check_that_it_waits(
        folder, training, lambda run, _: run.step(), lambda ckpt: ckpt.attach(training.optimizer)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_of_an_attached_optimizer_waits(kind: str, tmp_path: Any) -> None:
    faults.run(step_attached, str(tmp_path), kind, shim=True)


def step_compiled(folder: str) -> None:
    training = large(torch.optim.SGD)
    compiled: Any = torch.compile(training.optimizer.step, backend="eager")
    training.backward()
    compiled()
    check_that_it_waits(
        folder, training, lambda *_: compiled(), lambda ckpt: ckpt.attach(training.optimizer)
    )


def test_a_compiled_step_waits(tmp_path: Any) -> None:
    faults.run(step_compiled, str(tmp_path), shim=True)


def step_with_a_stranger(folder: str, how: str) -> None:
    """An optimizer that was not attached, over memory that was."""
    training = large()
    stranger: Any = torch.optim.SGD(training.model.parameters(), lr=0.1)
    if how == "views":
        for weight in training.weights():
            weight.grad = None
        views = [w.detach().view(-1)[100:200].requires_grad_() for w in training.weights()]
        for view in views:
            view.grad = torch.ones_like(view)
        stranger = torch.optim.SGD(views, lr=0.1)
    if how == "elsewhere":
        other = torch.ones(100, requires_grad=True)
        other.grad = torch.ones(100)
        stranger = torch.optim.SGD([other], lr=0.1)
    check_that_it_waits(
        folder,
        training,
        lambda *_: stranger.step(),
        lambda ckpt: ckpt.attach(training.optimizer),
        expected=how != "elsewhere",
    )


@pytest.mark.parametrize("how", ["the same", "views", "elsewhere"])
def test_an_optimizer_that_is_not_attached_waits_if_it_meets_the_same_memory(
    how: str, tmp_path: Any
) -> None:
    faults.run(step_with_a_stranger, str(tmp_path), how, shim=True)


def step_one_of_several(folder: str, which: int) -> None:
    training = large(torch.optim.SGD)
    weights = training.weights()
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (weights[:20], weights[20:])]

    def attach(ckpt: fp.Checkpointer) -> None:
        for optimizer in optimizers:
            ckpt.attach(optimizer)

    def step(*_: Any) -> None:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizers[which].step()

    check_that_it_waits(folder, training, step, attach)


@pytest.mark.parametrize("which", [0, 1])
def test_each_of_several_optimizers_waits(which: int, tmp_path: Any) -> None:
    faults.run(step_one_of_several, str(tmp_path), which, shim=True)


def step_after_changes(folder: str) -> None:
    """Parameter groups added and tensors replaced after attach."""
    training = large(torch.optim.SGD, momentum=0.9)
    added = torch.nn.Linear(200, 200)
    training.model.append(added)

    def attach(ckpt: fp.Checkpointer) -> None:
        ckpt.attach(training.optimizer)
        training.optimizer.add_param_group({"params": list(added.parameters())})
        for weight in training.weights():
            weight.data = torch.randn_like(weight)

    def step(run: Training, _: Hold) -> None:
        for parameter in run.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        run.optimizer.step()

    check_that_it_waits(folder, training, step, attach)


def test_groups_added_and_tensors_replaced_after_attach_are_read_in_place_and_waited_for(
    tmp_path: Any,
) -> None:
    faults.run(step_after_changes, str(tmp_path), shim=True)


def step_after_all_was_read(folder: str) -> None:
    """The verdict is still to come when the step does."""
    training = large()
    with support.open_run(folder, verify_source="full") as ckpt:
        ckpt.attach(training.optimizer)
        submit = type(ckpt._saver._writer).submit

        class Quick:
            """Everything is read before `submit` returns."""

            def submit(self, *arguments: Any) -> Any:
                ticket = submit(writer, *arguments)
                assert ticket.wait_released(60, False)
                return ticket

        def follow_later(ticket: fp.Ticket) -> None:
            assert stepped.wait(60)
            follow(ticket)

        saver: Any = ckpt._saver
        writer, follow, stepped = saver._writer, saver._follower._follow, threading.Event()
        saver._writer, saver._follower._follow = Quick(), follow_later
        before = training.values()
        ticket = ckpt.save(1, training.state())
        training.step()
        stepped.set()
        ticket.result(60)
        saver._writer = writer
        assert support.difference(ckpt.load().state, before) == ""


def test_a_step_right_after_everything_was_read_is_no_false_alarm(tmp_path: Any) -> None:
    faults.run(step_after_all_was_read, str(tmp_path))


def step_after_an_exception(folder: str) -> None:
    """A batch that fails between a save and the step, as somebody may catch it."""
    training = large()

    def change(run: Training, _: Hold) -> None:
        with pytest.raises(RuntimeError):
            run.model(torch.randn(8, 97))
        run.step()

    check_that_it_waits(folder, training, change, lambda ckpt: ckpt.attach(training.optimizer))


def test_an_exception_between_save_and_step_that_is_caught_changes_nothing(tmp_path: Any) -> None:
    faults.run(step_after_an_exception, str(tmp_path), shim=True)


# --- Closures ---


class SharpnessAware(torch.optim.SGD):
    """Changes its weights before it calls the closure."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.add_(0.01)
        return super().step(closure)


class Renamed(torch.optim.SGD):
    """Another name for a step of torch."""


class Hooked(torch.optim.SGD):
    """A hook of the user's changes its weights before the closure is called."""

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, lr=lr)
        self.register_step_pre_hook(self.before)

    def before(self, *_: Any) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.clamp_(-0.01, 0.01)


class HookedPastTheCounters(Hooked):
    def before(self, *_: Any) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(0.01)


class HookedForAll(torch.optim.SGD):
    """The hook runs before the steps of every optimizer, and was there before any other."""

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, lr=lr)
        hook: Any = HookedPastTheCounters.before
        register_optimizer_step_pre_hook(hook)


CLOSURES: dict[str, tuple[Any, bool]] = {
    "SGD": (torch.optim.SGD, True),
    "Adam": (torch.optim.Adam, True),
    "LBFGS": (torch.optim.LBFGS, True),
    "a subclass": (Renamed, True),
    "changes first": (SharpnessAware, False),
    "hook": (Hooked, False),
    "hook, data": (HookedPastTheCounters, False),
    "hook of all": (HookedForAll, False),
}


def step_with_closure(folder: str, name: str, keyword: bool) -> None:
    kind, computes_first = CLOSURES[name]
    training = large(torch.optim.SGD)
    training.optimizer = kind(training.model.parameters(), lr=0.01)
    calls: list[bool] = []

    def step(run: Training, hold: Hold) -> None:
        def closure() -> Any:
            calls.append(hold.is_held())
            with torch.enable_grad():
                return run.backward()

        if keyword:
            run.optimizer.step(closure=closure)
        else:
            run.optimizer.step(closure)

    check_that_it_waits(folder, training, step, lambda ckpt: ckpt.attach(training.optimizer))
    assert calls[0] is computes_first, "forward and backward run before the wait, if they may"
    assert name != "LBFGS" or len(calls) > 2


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("name", CLOSURES)
def test_a_step_with_a_closure_computes_before_it_waits_if_it_evaluates_first(
    name: str, keyword: bool, tmp_path: Any
) -> None:
    faults.run(step_with_closure, str(tmp_path), name, keyword, shim=True)


def save_inside(folder: str, where: str) -> None:
    training = large()
    tickets: list[fp.Ticket] = []
    with support.open_run(folder) as ckpt:
        ckpt.attach(training.optimizer)
        before: list[Any] = []

        def save(*_: Any) -> Any:
            if not tickets:
                before.append(training.values())
                tickets.append(ckpt.save(1, training.state()))
            return training.backward() if where == "closure" else None

        with held(folder) as hold:
            if where == "closure":
                training.optimizer.step(lambda: save())
            else:
                training.optimizer.register_step_pre_hook(save)
                training.optimizer.step()
            hold.reached()  # the step is over, and the device has taken nothing
            hold.release()
            tickets[0].result(60)
        assert support.difference(ckpt.load().state, before[0]) == ""


@pytest.mark.parametrize("where", ["closure", "hook"])
def test_a_save_inside_a_step_copies_everything(where: str, tmp_path: Any) -> None:
    faults.run(save_inside, str(tmp_path), where, shim=True)


def save_in_another_thread(folder: str) -> None:
    training = large(torch.optim.Adam, fused=True)
    inside, saved = threading.Event(), threading.Event()

    def closure() -> Any:
        inside.set()
        assert saved.wait(60)
        return None

    training.backward()
    stepping = threading.Thread(target=lambda: training.optimizer.step(closure))
    with support.open_run(folder, verify_source="full") as ckpt, held(folder) as hold:
        ckpt.attach(training.optimizer)
        stepping.start()
        assert inside.wait(60)
        before = training.values()
        with faults.warnings_logged() as warnings:
            ticket = ckpt.save(1, training.state())
        assert [w for w in warnings if "in the thread that steps" in w], warnings
        hold.reached()
        saved.set()
        stepping.join()  # its step is over, and the device has taken nothing
        hold.release()
        ticket.result(60)
        assert support.difference(ckpt.load().state, before) == ""


def test_a_save_beside_the_step_of_another_thread_copies_everything(tmp_path: Any) -> None:
    faults.run(save_in_another_thread, str(tmp_path), shim=True)


def step_in_another_thread(folder: str, which: str) -> None:
    """A step that begins and ends while `save` looks at the state."""
    training, other = large(torch.optim.Adam, fused=True), large(torch.optim.Adam, fused=True)
    stepped = (training if which == "attached" else other).optimizer

    class Steps:
        def __reduce__(self) -> Any:
            thread = threading.Thread(target=stepped.step)
            thread.start()
            thread.join()
            return (int, (3,))

    with support.open_run(folder, verify_source="full") as ckpt:
        ckpt.attach(training.optimizer)
        ticket = ckpt.save(1, {"begin": training.state(), "x": Steps()})
        error = ticket.exception(60)
        assert (type(error) is fp.StateChangedError) is (which == "attached"), error
        assert ckpt.all_steps() == ([] if which == "attached" else [1])
        ckpt.save(2, training.state()).result(60)


@pytest.mark.parametrize("which", ["attached", "elsewhere"])
def test_a_step_of_another_thread_that_begins_during_save_is_an_error_if_it_meets_the_memory(
    which: str, tmp_path: Any
) -> None:
    faults.run(step_in_another_thread, str(tmp_path), which, shim=True)


def save_after_a_step_that_raised(folder: str) -> None:
    training = large()

    def closure() -> Any:
        raise KeyError("a batch that is not there")

    with support.open_run(folder, memory=SMALL) as ckpt, held(folder) as hold:
        ckpt.attach(training.optimizer)
        with pytest.raises(KeyError):
            training.optimizer.step(closure)
        ckpt.save(1, training.state())  # copying all of it would wait for the device
        assert hold.is_held()


def test_a_step_that_raised_is_over(tmp_path: Any) -> None:
    faults.run(save_after_a_step_that_raised, str(tmp_path), shim=True)
