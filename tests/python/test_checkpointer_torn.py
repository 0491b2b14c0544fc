# SPDX-License-Identifier: Apache-2.0
"""Memory that changes while it is being saved: old values in the file, or nothing committed.

The device is held in the middle of the file, so that what comes first was read already and what
comes last was not, and nothing can be committed before it is let go.
"""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import checkpoint_support as support
import faults_support as faults
import numpy as np
import pytest
import torch
from checkpoint_support import Training, held

import fastpersist as fp

untyped: Any = torch
"""With what its stubs leave out."""

# --- What is not attached has its old values, whatever happens ---


class Zoo:
    """Tensors of every kind, and what changes them in place."""

    def __init__(self) -> None:
        self.training = Training()
        self.array = np.arange(40_000, dtype=np.float32)
        with torch.inference_mode():
            self.inference = torch.ones(30_000)
        base = torch.arange(20_000.0)
        self.state: dict[str, Any] = {
            **self.training.state(),
            "ema": [w.detach().clone() for w in self.training.weights()],
            "numpy": torch.from_numpy(self.array),
            "array": np.arange(100),
            "shared": untyped.zeros(50_000).share_memory_(),
            "step": torch.tensor(3.0),
            "inference": self.inference,
            "view": base[5:500],
            "base": base,
            "transposed": torch.ones(200, 300).t(),
            "large": torch.zeros(1 << 20),
            "list": [1, 2, 3],
        }

    def change(self) -> None:
        for value in list(torch.utils._pytree.tree_leaves(self.state)):
            if isinstance(value, torch.Tensor) and not value.is_inference():
                value.detach().add_(1)
        with torch.inference_mode():
            self.inference.add_(1)
        self.state["array"] += 1
        self.state["list"].append(4)


def change_all_after_save(folder: str, hold_at: int) -> None:
    zoo = Zoo()
    before = copy.deepcopy(zoo.state)
    with support.open_run(folder) as ckpt, held(folder, hold_at) as hold:
        ticket = ckpt.save(1, zoo.state)
        hold.reached()
        zoo.change()
        hold.release()
        ticket.result(60)
        assert support.difference(ckpt.load(weights_only=False).state, before) == ""


@pytest.mark.parametrize("hold_at", [0, 1_000_000])
def test_what_is_not_attached_has_its_old_values(hold_at: int, tmp_path: Any) -> None:
    faults.run(change_all_after_save, str(tmp_path), hold_at, shim=True)


def change_without_room(folder: str) -> None:
    zoo = Zoo()
    before = copy.deepcopy(zoo.state)
    with support.open_run(folder, memory=1 << 20) as ckpt, faults.warnings_logged() as warnings:
        ticket = ckpt.save(1, zoo.state)
        zoo.change()
        ticket.result(60)
        assert support.difference(ckpt.load(weights_only=False).state, before) == ""
    assert [w for w in warnings if "attach the optimizer" in w and "bytes" in w], warnings


def test_what_fits_into_no_memory_is_written_before_save_returns(tmp_path: Any) -> None:
    faults.run(change_without_room, str(tmp_path))


def change_what_the_optimizer_does_not_own(folder: str) -> None:
    training = Training()
    ema = [w.detach().clone() for w in training.weights()]
    state = {**training.state(), "ema": ema}
    before = copy.deepcopy(state)
    with support.open_run(folder, verify_source="full") as ckpt, held(folder) as hold:
        ckpt.attach(training.optimizer)
        ticket = ckpt.save(1, state)
        hold.reached()
        training.model(torch.randn(8, 96))  # running statistics of BatchNorm
        for average, weight in zip(ema, training.weights(), strict=True):
            average.lerp_(weight.detach(), 0.5)
        for moments in training.optimizer.state.values():
            moments["step"].add_(1)  # 0-dimensional
        hold.release()
        ticket.result(60)
        assert support.difference(ckpt.load().state, before) == ""


def test_buffers_averages_and_counters_beside_an_attached_optimizer_have_old_values(
    tmp_path: Any,
) -> None:
    faults.run(change_what_the_optimizer_does_not_own, str(tmp_path), shim=True)


def change_shared_weights(folder: str) -> None:
    training = Training()
    training.model.share_memory()
    before = training.values()
    with support.open_run(folder) as ckpt, held(folder) as hold:
        ckpt.attach(training.optimizer)
        ticket = ckpt.save(1, {"model": training.model.state_dict()})
        hold.reached()
        for weight in training.weights():  # as another process would
            weight.data.add_(1)
        hold.release()
        ticket.result(60)
        assert support.difference(ckpt.load().state, {"model": before["model"]}) == ""


def test_attached_weights_that_other_processes_share_are_copied(tmp_path: Any) -> None:
    faults.run(change_shared_weights, str(tmp_path), shim=True)


# --- What is attached has its old values, or the save fails ---


def change_attached(folder: str, which: str, hold_at: int) -> None:
    training = Training()
    with support.open_run(folder, verify_source="off") as ckpt:
        ckpt.attach(training.optimizer)
        with held(folder, hold_at) as hold:
            ticket = ckpt.save(1, training.state())
            hold.reached()
            weight = training.weights()[1]
            moments = training.optimizer.state[weight]
            with torch.no_grad():
                (weight if which == "weight" else moments["exp_avg"]).add_(1)
            hold.release()
            error = support.failure(ticket)
        assert type(error) is fp.StateChangedError
        place = "['model']['2.weight']" if which == "weight" else "['optim']['state'][4]['exp_avg']"
        assert place in str(error) and place == error.tensor
        assert ckpt.all_steps() == [] and ckpt.last_error is error
        before = training.values()
        ckpt.save(2, training.state()).result(60)
        assert ckpt.all_steps() == [2]
        assert support.difference(ckpt.load().state, before) == ""


@pytest.mark.parametrize("hold_at", [0, 200_000])
@pytest.mark.parametrize("which", ["weight", "moment"])
def test_a_change_that_a_version_counter_saw_is_an_error_and_the_next_save_is_good(
    which: str, hold_at: int, tmp_path: Any
) -> None:
    faults.run(change_attached, str(tmp_path), which, hold_at, shim=True)


def _fused(name: str) -> Any:
    def change(weight: Any) -> None:
        one = [torch.ones_like(weight)]
        zeros = [[torch.zeros_like(weight)] for _ in range(2)]
        if name == "sgd":
            untyped._fused_sgd_(
                [weight], one, [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0,
                nesterov=False, maximize=False, is_first_step=True,
            )  # fmt: skip
        else:
            function = untyped._fused_adam_ if name == "adam" else untyped._fused_adamw_
            function(
                [weight], one, *zeros, [], [torch.tensor(1.0)], lr=0.1, beta1=0.9, beta2=0.99,
                weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip

    return change


def _numpy(weight: Any) -> None:
    weight.detach().numpy()[...] += 1


def _dlpack(weight: Any) -> None:
    untyped.from_dlpack(untyped.utils.dlpack.to_dlpack(weight.detach())).add_(1)


WAYS: dict[str, Any] = {
    "fused Adam": _fused("adam"),
    "fused AdamW": _fused("adamw"),
    "fused SGD": _fused("sgd"),
    "data": lambda weight: weight.data.add_(1),
    "NumPy": _numpy,
    "DLPack": _dlpack,
    "pointer": lambda weight: ctypes.memset(weight.data_ptr(), 7, 400),
    "storage fill": lambda weight: weight.untyped_storage().fill_(7),
    "resize": lambda weight: weight.untyped_storage().resize_(0),
    "share_memory": lambda weight: weight.untyped_storage().share_memory_(),
}


def change_past_the_counters(folder: str, way: str, which: int) -> None:
    training = Training(torch.optim.SGD, layers=8)
    with support.open_run(folder, verify_source="full") as ckpt:
        ckpt.attach(training.optimizer)
        with held(folder, 150_000) as hold:  # in the fifth of the eight weights
            ticket = ckpt.save(1, training.state())
            hold.reached()
            with torch.no_grad():
                WAYS[way](training.weights()[which])
            hold.release()
            error = support.failure(ticket)
        assert type(error) is fp.StateChangedError, error
        assert f"['model']['{2 * which}.weight']" in str(error), error
        assert ckpt.all_steps() == []


@pytest.mark.parametrize("way", WAYS)
def test_a_write_past_the_counters_after_the_first_read_is_an_error(
    way: str, tmp_path: Any
) -> None:
    faults.run(change_past_the_counters, str(tmp_path), way, 1, shim=True)


def change_a_moment_past_the_counters(folder: str) -> None:
    training = Training()
    with support.open_run(folder, verify_source="full") as ckpt:
        ckpt.attach(training.optimizer)
        with held(folder, 300_000) as hold:  # behind the first weight's moments
            ticket = ckpt.save(1, training.state())
            hold.reached()
            training.optimizer.state[training.weights()[0]]["exp_avg"].data.add_(1)
            hold.release()
            error = support.failure(ticket)
        assert type(error) is fp.StateChangedError, error
        assert error.tensor == "['optim']['state'][0]['exp_avg']"
        assert ckpt.all_steps() == []


def test_a_moment_that_is_written_past_the_counters_is_an_error(tmp_path: Any) -> None:
    faults.run(change_a_moment_past_the_counters, str(tmp_path), shim=True)


def change_an_inference_tensor(folder: str) -> None:
    """It has no version counter at all."""
    with torch.inference_mode():
        base: Any = torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(8)))
    assert base[1].weight.is_inference()
    with support.open_run(folder, verify_source="full") as ckpt:
        ckpt.attach(frozen=base)
        with held(folder, 150_000) as hold:
            ticket = ckpt.save(1, {"base": base.state_dict()})
            hold.reached()
            with torch.inference_mode():
                base[1].weight.add_(1)
            hold.release()
            error = support.failure(ticket)
        assert type(error) is fp.StateChangedError, error
        assert error.tensor == "['base']['1.weight']"
        with held(folder, 150_000) as hold:  # unchanged, it is no false alarm
            ticket = ckpt.save(2, {"base": base.state_dict()})
            hold.reached()
            hold.release()
            ticket.result(60)
        assert ckpt.all_steps() == [2]


def test_a_write_to_an_attached_inference_tensor_is_an_error(tmp_path: Any) -> None:
    faults.run(change_an_inference_tensor, str(tmp_path), shim=True)


@pytest.mark.parametrize("way", ["resize", "share_memory"])
def test_memory_that_moves_before_the_first_read_is_an_error(way: str, tmp_path: Any) -> None:
    faults.run(change_past_the_counters, str(tmp_path), way, 6, shim=True)


def change_in_a_few_saves(folder: str) -> list[int]:
    training = Training(torch.optim.SGD, layers=8)
    found = []
    with support.open_run(folder) as ckpt:  # the default: a sample
        ckpt.attach(training.optimizer)
        for step in range(16):
            with held(folder, 150_000) as hold:
                ticket = ckpt.save(step, training.state())
                hold.reached()
                training.weights()[2].data.add_(1)
                hold.release()
                if isinstance(ticket.exception(60), fp.StateChangedError):
                    found.append(step)
        assert ckpt.all_steps() == [step for step in range(16) if step not in found]
    return found


def test_a_sample_finds_such_a_write_within_sixteen_saves(tmp_path: Any) -> None:
    assert faults.run(change_in_a_few_saves, str(tmp_path), shim=True) != []


# --- What is replaced, not changed, is no false alarm ---


def _replaced(weight: Any) -> None:
    weight.data = torch.zeros_like(weight)


def _replaced_and_changed(weight: Any) -> None:
    weight.data = torch.zeros_like(weight)
    with torch.no_grad():
        weight.add_(1)


def _from_a_vector(weight: Any) -> None:
    torch.nn.utils.vector_to_parameters(torch.zeros(weight.numel()), [weight])


REPLACEMENTS = {"data": _replaced, "data, then in place": _replaced_and_changed,
                "vector_to_parameters": _from_a_vector}  # fmt: skip


def replace(folder: str, way: str, which: int, flat: bool) -> None:
    training = Training(torch.optim.SGD, layers=8)
    state: Any = training.state()
    if flat:  # all weights in one storage, as flattened parameters are
        buffer = torch.randn(8 * 96 * 96)
        for at, weight in enumerate(training.weights()):
            weight.data = buffer[at * 9216 : (at + 1) * 9216].view(96, 96)
        state = training.state()
    before = copy.deepcopy(state)
    with support.open_run(folder, verify_source="full") as ckpt, held(folder, 150_000) as hold:
        ckpt.attach(training.optimizer)
        ticket = ckpt.save(1, state)
        hold.reached()
        REPLACEMENTS[way](training.weights()[which])
        hold.release()
        ticket.result(60)
        assert support.difference(ckpt.load().state, before) == ""


@pytest.mark.parametrize("flat", [False, True], ids=["", "flat"])
@pytest.mark.parametrize("which", [1, 6])
@pytest.mark.parametrize("way", REPLACEMENTS)
def test_new_memory_for_a_parameter_is_no_false_alarm(
    way: str, which: int, flat: bool, tmp_path: Any
) -> None:
    faults.run(replace, str(tmp_path), way, which, flat, shim=True)


def replace_then_change_the_old(folder: str) -> None:
    training = Training(torch.optim.SGD, layers=8)
    with support.open_run(folder, verify_source="off") as ckpt, held(folder, 150_000) as hold:
        ckpt.attach(training.optimizer)
        ticket = ckpt.save(1, training.state())
        hold.reached()
        weight = training.weights()[1]
        with torch.no_grad():
            weight.add_(1)
        _replaced(weight)
        hold.release()
        assert type(support.failure(ticket)) is fp.StateChangedError


def test_a_change_just_before_the_replacement_is_an_error(tmp_path: Any) -> None:
    faults.run(replace_then_change_the_old, str(tmp_path), shim=True)
