# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""A run that was restored into other objects goes on bit for bit, or nothing of it was touched.

Every kind of optimizer and scheduler is restored into a fresh one and into one that has run.
"""

from __future__ import annotations

import copy
import io
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import load_support
import numpy as np
import pytest
import torch
import zoo
from conftest import read
from torch import nn
from torch.optim import lr_scheduler

import fastpersist as fp
from fastpersist import _restore

restore_into = _restore.restore_into
Parameters = Any

OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "lbfgs wolfe": lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
}


def sequential(optimizer: Any) -> Any:
    parts: list[Any] = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
        lr_scheduler.CosineAnnealingLR(optimizer, 40),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[6])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=50),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, threshold=0.2),
    "sequential": sequential,
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
}


class Net(nn.Module):
    """Dropout, batch norm, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3, self.training)
        out: torch.Tensor = self.last(x)
        return out


def data() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(
        torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    )


class Run:
    """All that a training run consists of; an epoch has eight steps."""

    def __init__(self, optimizer: str = "adam", scheduler: str = "step", seed: int = 1) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer: Any = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        amp: Any = torch.amp
        self.scaler = amp.GradScaler("cpu", init_scale=2.0**seed, growth_interval=3)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.shuffling = torch.Generator().manual_seed(seed)
        self.loader = torch.utils.data.DataLoader(
            data(), batch_size=8, shuffle=True, generator=self.shuffling
        )

    def state(self) -> dict[str, Any]:
        objects = ("model", "optimizer", "scheduler", "scaler", "average")
        state = {name: getattr(self, name).state_dict() for name in objects}
        return {**state, "shuffling": self.shuffling.get_state(), "rng": fp.rng_state()}

    def targets(self) -> dict[str, Any]:
        objects = ("model", "optimizer", "scheduler", "scaler", "average")
        targets = {name: getattr(self, name) for name in objects}
        handed = {"shuffling": self.shuffling.set_state, "rng": fp.set_rng_state}
        return {**handed, **targets}

    def epoch(self) -> list[float]:
        return [self._step(batch) for (batch,) in self.loader]

    def _step(self, batch: torch.Tensor) -> float:
        batch = batch * random.uniform(0.9, 1.1) + float(np.random.randn()) / 50

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss: torch.Tensor = (self.model(batch) - batch).pow(2).mean()
            plain = isinstance(self.optimizer, torch.optim.LBFGS)
            (loss if plain else self.scaler.scale(loss)).backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):  # whose step calls the closure
            loss = self.optimizer.step(closure)
        else:
            loss = closure()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
        self.scheduler.step(*([loss.item()] if plateau else []))
        self.average.update_parameters(self.model)
        return float(loss.item())


def saved(tmp_path: Path, state: Any, name: str = "state.pt") -> Path:
    fp.save(state, tmp_path / name)
    return tmp_path / name


def tensor_names(state: Any, name: str = "") -> list[str]:
    if isinstance(state, torch.Tensor):
        return [name]
    items = enumerate(state) if isinstance(state, list | tuple) else ()
    if isinstance(state, dict):
        items = state.items()  # type: ignore[assignment]
    return [
        leaf for key, value in items for leaf in tensor_names(value, f"{name}.{key}".strip("."))
    ]


def resumes(tmp_path: Path, optimizer: str, scheduler: str, ran: bool) -> None:
    """Eight steps, a checkpoint, eight more; and the latter again in objects of another run."""
    run = Run(optimizer, scheduler, seed=1)
    run.epoch()
    path = saved(tmp_path, run.state())
    expected = run.epoch()
    after = copy.deepcopy(run.state())

    other = Run(optimizer, scheduler, seed=2)
    for group in other.optimizer.param_groups:
        group["lr"] = 9e-3
    if ran:
        other.epoch()
    report = restore_into(other.targets(), path)
    assert sorted(report.filled) == sorted(tensor_names(torch.load(path)))  # nothing is dropped
    assert other.epoch() == expected
    assert len(expected) == 8 and len(set(expected)) == 8
    assert zoo.same(other.state(), after)


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran before"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_any_optimizer_goes_on_bit_for_bit(name: str, ran: bool, tmp_path: Path) -> None:
    resumes(tmp_path, name, "step", ran)


@pytest.mark.parametrize("ran", [False, True], ids=["fresh", "ran before"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_run_with_any_scheduler_goes_on_bit_for_bit(name: str, ran: bool, tmp_path: Path) -> None:
    resumes(tmp_path, "sgd nesterov", name, ran)


@pytest.mark.parametrize("left_out", ["optimizer", "shuffling", "rng", "scheduler"])
def test_a_run_that_lacks_a_part_goes_on_otherwise(left_out: str, tmp_path: Path) -> None:
    # So that the tests above could fail.
    run = Run()
    run.epoch()
    path = saved(tmp_path, run.state())
    expected = run.epoch()
    other = Run(seed=2)
    targets = other.targets()
    del targets[left_out]
    report = restore_into(targets, path, strict=False)
    assert {name.split(".")[0] for name in report.unexpected} == {left_out}
    assert other.epoch() != expected


def test_what_has_run_before_is_filled_where_it_is(tmp_path: Path) -> None:
    run = Run()
    run.epoch()
    path = saved(tmp_path, run.state())
    other = Run(seed=2)
    other.epoch()

    def tensors() -> list[torch.Tensor]:
        moments = other.optimizer.state_dict()["state"]
        tensors = [*other.model.state_dict().values(), *other.average.state_dict().values()]
        return tensors + [t for each in moments.values() for t in each.values()]

    before = [tensor.data_ptr() for tensor in tensors()]
    restore_into(other.targets(), path)
    assert [tensor.data_ptr() for tensor in tensors()] == before
    assert zoo.same(other.optimizer.state_dict()["state"], run.optimizer.state_dict()["state"])


# --- Parameter groups ---


def grouped(seed: int, added: bool) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 1))
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.1 * seed},
        {"params": list(model[1].parameters()), "weight_decay": 0.1 * seed},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    if added:
        optimizer.add_param_group({"params": list(model[2].parameters()), "betas": (0.5, 0.6)})
    return model, optimizer


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for step in range(count):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_several_groups_and_one_added_later_go_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = grouped(1, added=False)
    steps(model, optimizer, 4)
    optimizer.add_param_group({"params": list(model[2].parameters()), "betas": (0.5, 0.6)})
    steps(model, optimizer, 4)
    path = saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = steps(model, optimizer, 8)
    other, fresh = grouped(2, added=True)
    restore_into({"model": other, "optimizer": fresh}, path)
    assert steps(other, fresh, 8) == expected
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.01, 0.01]
    assert fresh.param_groups[1]["weight_decay"] == 0.1


@pytest.mark.parametrize("added", [False, True], ids=["later here", "later in the file"])
def test_a_group_that_only_one_side_has_is_refused(added: bool, tmp_path: Path) -> None:
    model, optimizer = grouped(1, added=added)
    steps(model, optimizer, 3)
    path = saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, fresh = grouped(2, added=not added)
    steps(other, fresh, 3)
    targets = {"model": other, "optimizer": fresh}
    unchanged = Unchanged(targets)
    with pytest.raises(fp.MismatchError, match=r"groups of \[2, 2(, 2)?\] parameters") as caught:
        restore_into(targets, path)
    assert [name for name, _ in caught.value.different] == ["optimizer.param_groups"]
    unchanged.check()


# --- What does not fit ---


class Unchanged:
    """That targets are as they were: objects, tensors and plain values."""

    def __init__(self, targets: Any) -> None:
        self.targets = targets
        self.before = copy.deepcopy(self._look(targets))

    def check(self) -> None:
        assert zoo.same(self._look(self.targets), self.before)

    def _look(self, target: Any) -> Any:
        if hasattr(target, "state_dict"):
            return self._plain(target.state_dict())
        if isinstance(target, dict):
            return {key: self._look(value) for key, value in target.items()}
        return None if callable(target) else target

    def _plain(self, state: Any) -> Any:
        return dict(state) if isinstance(state, OrderedDict) else state


class Heard:
    """A callable that remembers what it was handed, and what was so in that moment."""

    def __init__(self, look: Callable[[], Any] = lambda: None) -> None:
        self.values: list[Any] = []
        self.seen: list[Any] = []
        self._look = look

    def __call__(self, value: Any) -> None:
        self.values.append(value)
        self.seen.append(copy.deepcopy(self._look()))


def trained() -> Run:
    run = Run()
    run.epoch()
    return run


def test_every_name_on_one_side_only_is_listed_and_nothing_is_touched(tmp_path: Path) -> None:
    state = trained().state()
    state["more"] = {"deep": [torch.ones(2)], "n": 3}
    del state["scaler"], state["rng"]
    other = trained()
    heard = Heard()
    targets = {**other.targets(), "rng": heard, "shuffling": heard, "epoch": 5}
    unchanged = Unchanged(targets)
    rng = fp.rng_state()
    with pytest.raises(
        fp.MismatchError, match=r"restore failed on .*nothing was touched"
    ) as caught:
        restore_into(targets, saved(tmp_path, state))
    assert sorted(caught.value.missing) == ["epoch", "rng", "scaler"]
    assert sorted(caught.value.unexpected) == ["more.deep.0", "more.n"]
    assert caught.value.different == []
    unchanged.check()
    assert heard.values == []
    assert zoo.same(fp.rng_state(), rng)


def test_without_strict_the_rest_is_restored_and_reported(tmp_path: Path) -> None:
    run = trained()
    state = {**run.state(), "more": 3}
    del state["scaler"], state["rng"]
    other, heard = Run(seed=2), Heard()
    before = copy.deepcopy(other.scaler.state_dict())
    targets = {**other.targets(), "rng": heard}
    report = restore_into(targets, saved(tmp_path, state), strict=False)
    assert sorted(report.missing) == ["rng", "scaler"]
    assert report.unexpected == ("more",)
    assert heard.values == []
    assert other.scaler.state_dict() == before
    assert zoo.same(dict(other.model.state_dict()), dict(run.model.state_dict()))
    assert torch.equal(other.shuffling.get_state(), run.shuffling.get_state())


def widened(state: dict[str, Any]) -> None:
    state["model"]["first.bias"] = torch.zeros(9)


def double(state: dict[str, Any]) -> None:
    state["model"]["norm.running_mean"] = state["model"]["norm.running_mean"].double()


def untied(state: dict[str, Any]) -> None:
    state["model"]["last.weight"] = state["model"]["first.weight"] + 1


def moment_shape(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][1]["exp_avg"] = torch.zeros(3)


def moment_type(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][1]["exp_avg"] = torch.zeros(8, dtype=torch.bfloat16)


def no_module(state: dict[str, Any]) -> None:
    state["model"] = [torch.zeros(3)]


def average_type(state: dict[str, Any]) -> None:
    state["average"]["n_averaged"] = state["average"]["n_averaged"].float()


DIFFERENCES = [
    (widened, "model.first.bias", r"shape \(8,\) here, \(9,\) in the file"),
    (double, "model.norm.running_mean", "torch.float32 here, torch.float64 in the file"),
    (untied, "model.last.weight", "the memory of 'model.first.weight' here"),
    (moment_shape, "optimizer.state.1.exp_avg", r"shape \(8,\) here, \(3,\) in the file"),
    (moment_type, "optimizer.state.1.exp_avg", "torch.float32 here, torch.bfloat16"),
    (no_module, "model", "state of a Net here, list in the file"),
    (average_type, "average.n_averaged", "torch.int64 here, torch.float32 in the file"),
]


@pytest.mark.parametrize(("change", "name", "why"), DIFFERENCES)
def test_another_shape_or_type_is_refused_and_nothing_is_touched(
    change: Callable[[dict[str, Any]], None], name: str, why: str, tmp_path: Path
) -> None:
    state = trained().state()
    change(state)
    heard = Heard()
    targets = {**trained().targets(), "rng": heard, "shuffling": heard}
    unchanged = Unchanged(targets)
    with pytest.raises(fp.MismatchError, match=why) as caught:
        restore_into(targets, saved(tmp_path, state))
    assert [where for where, _ in caught.value.different] == [name]
    unchanged.check()
    assert heard.values == []


@pytest.mark.parametrize("part", ["scheduler", "scaler"])
def test_an_empty_state_for_an_object_that_has_one_is_missing(part: str, tmp_path: Path) -> None:
    # A disabled GradScaler saves {}; a scheduler would take it and stay as it is, without a word.
    state = {**trained().state(), part: {}}
    targets = trained().targets()
    unchanged = Unchanged(targets)
    with pytest.raises(fp.MismatchError) as caught:
        restore_into(targets, saved(tmp_path, state))
    assert caught.value.missing and {n.split(".")[0] for n in caught.value.missing} == {part}
    unchanged.check()
    report = restore_into(targets, tmp_path / "state.pt", strict=False)
    assert {name.split(".")[0] for name in report.missing} == {part}
    assert zoo.same(targets[part].state_dict(), unchanged.before[part])


@pytest.mark.parametrize("strict", [True, False])
def test_a_file_that_holds_no_dict_is_refused(strict: bool, tmp_path: Path) -> None:
    weight = torch.zeros(2)
    with pytest.raises(fp.MismatchError, match="it holds a list") as caught:
        restore_into({"w": weight}, saved(tmp_path, [torch.ones(2)]), strict=strict)
    assert caught.value.different == [("the whole state", "dict here, list in the file")]
    assert weight.tolist() == [0, 0]


@pytest.mark.parametrize("targets", [[], nn.Linear(1, 1), None, print, MappingProxyType({})])
def test_targets_that_are_no_dict_are_refused(targets: Any, tmp_path: Path) -> None:
    with pytest.raises(fp.ArgumentError, match="restore failed: targets is"):
        restore_into(targets, saved(tmp_path, {}))


@pytest.mark.parametrize("target", [nn.Linear, object(), "rng"])
def test_a_target_that_cannot_take_a_state_is_refused(target: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, {"model": {"w": torch.ones(2)}, "w": torch.ones(2)})
    weight = torch.zeros(2)
    with pytest.raises(fp.MismatchError, match=r"model: .* here, dict in the file"):
        restore_into({"model": target, "w": weight}, path)
    assert weight.tolist() == [0, 0]


def test_targets_that_contain_themselves_are_refused(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"f": print}
    inner["again"] = inner
    state: dict[str, Any] = {"f": 1}
    state["again"] = state
    with pytest.raises(fp.ArgumentError, match="contains itself"):
        restore_into({"inner": inner}, saved(tmp_path, {"inner": state}))


# --- Damage ---


def damage(path: Path, tensor: torch.Tensor) -> None:
    content = bytearray(read(path))
    content[content.index(bytes(tensor.flatten()[100:140].tolist()))] ^= 0xFF
    path.write_bytes(content)


def noise(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (50_000,), dtype=torch.uint8, generator=generator)


def test_damage_after_filling_began_says_so_and_calls_nobody(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": noise(0), "epoch": 3, "fn": noise(1), "object": {"n": 1}})
    damage(path, noise(1))
    heard, taken = Heard(), Heard()

    class Object:
        load_state_dict = staticmethod(taken)

        def state_dict(self) -> dict[str, int]:
            return {"n": 0}

    targets = {"fn": heard, "w": torch.zeros_like(noise(0)), "epoch": 0, "object": Object()}
    with pytest.raises(fp.CorruptCheckpointError, match="overwritten in part") as caught:
        restore_into(targets, path)
    assert caught.value.partially_restored
    assert heard.values == taken.values == []
    assert targets["epoch"] == 0


def test_damage_where_only_callables_wait_leaves_all_as_it_was(tmp_path: Path) -> None:
    path = saved(tmp_path, {"fn": noise(1)})
    damage(path, noise(1))
    heard = Heard()
    with pytest.raises(fp.CorruptCheckpointError) as caught:
        restore_into({"fn": heard}, path)
    assert not caught.value.partially_restored
    assert heard.values == []


def test_a_missing_file_touches_nothing(tmp_path: Path) -> None:
    with pytest.raises(fp.NotFoundError):
        restore_into({"fn": pytest.fail}, tmp_path / "none.pt")


# --- Callables ---


def test_callables_come_last_and_in_order(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "first": 1, "w": torch.ones(2), "model": nn.Linear(2, 2).state_dict(), "epoch": 7,
        "second": "two", "third": None,
    }  # fmt: skip
    model = nn.Linear(2, 2)
    targets: dict[str, Any] = {}

    def look() -> Any:
        return (targets["w"].tolist(), targets["epoch"], model.weight.detach(), called())

    def called() -> int:
        return sum(len(one.values) for one in heard)

    heard = [Heard(look) for _ in range(3)]
    targets |= {"third": heard[2], "first": heard[0], "w": torch.zeros(2), "model": model}
    targets |= {"second": heard[1], "epoch": 0}
    report = restore_into(targets, saved(tmp_path, state))
    expected = {"third": (heard[2], None), "first": (heard[0], 1), "second": (heard[1], "two")}
    for count, (one, value) in enumerate(expected.values(), 1):
        assert one.values == [value]
        assert zoo.same(one.seen, [([1.0, 1.0], 7, state["model"]["weight"], count)])
    assert sorted(report.filled) == ["model.bias", "model.weight", "w"]
    assert report.values_set == 4


def test_a_callable_is_handed_what_load_makes(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(6, 10)
    value: dict[str, Any] = {
        "base": base, "rows": base[2:4], "t": base.t(), "conj": torch.ones(2) * 1j,
        "parameter": nn.Parameter(torch.ones(3)), "empty": torch.zeros(0, 3),
        "list": [1, (2.5, "x"), None], "ordered": OrderedDict(a=1),
    }  # fmt: skip
    value["conj"] = value["conj"].conj()
    path = saved(tmp_path, {"value": value, "shared": base})
    heard, shared = Heard(), torch.zeros(6, 10)
    restore_into({"value": heard, "shared": shared}, path)
    expected = fp.load(path)["value"]
    path.unlink()
    assert load_support.difference(expected, heard.values[0]) is None
    assert torch.equal(shared, base)
    heard.values[0]["base"].fill_(3)
    assert heard.values[0]["rows"].eq(3).all()
    assert torch.equal(shared, base)


def test_callables_in_dicts_are_handed_their_part_beside_what_is_filled(tmp_path: Path) -> None:
    state = {"data": {"generator": noise(3), "epoch": 4, "w": torch.ones(3), "deep": {"f": 5}}}
    generator, deep = Heard(), Heard()
    data: dict[str, Any] = {
        "generator": generator, "epoch": 0, "w": torch.zeros(3), "deep": {"f": deep},
    }  # fmt: skip
    report = restore_into({"data": data}, saved(tmp_path, state))
    assert torch.equal(generator.values[0], noise(3))
    assert deep.values == [5]
    assert (data["epoch"], data["w"].tolist()) == (4, [1, 1, 1])
    assert data["generator"] is generator
    assert sorted(report.filled) == ["data.generator", "data.w"]
    with pytest.raises(fp.MismatchError, match=r"data\.w: shape") as caught:
        restore_into({"data": {**data, "w": torch.zeros(4)}}, tmp_path / "state.pt")
    assert len(caught.value.different) == 1
    assert len(generator.values) == 1


def test_what_a_callable_raises_passes_through_and_tensors_are_restored(tmp_path: Path) -> None:
    value = {**fp.rng_state(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * 999}
    weight = torch.zeros(2)
    path = saved(tmp_path, {"rng": value, "w": torch.ones(2)})
    with pytest.raises(fp.MismatchError, match="'cuda': of 999 CUDA devices"):
        restore_into({"rng": fp.set_rng_state, "w": weight}, path)
    assert weight.tolist() == [1, 1]


def test_an_object_that_can_be_called_and_has_a_state_is_given_its_state(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    restore_into({"model": model}, saved(tmp_path, {"model": nn.Linear(2, 2).state_dict()}))
    assert torch.equal(model.weight, fp.load(tmp_path / "state.pt")["model"]["weight"])


# --- map_location ---


SavedFrom = Callable[[Any], Path]


@pytest.fixture
def saved_from_cuda(tmp_path: Path) -> SavedFrom:
    """Writes a file that says that its tensors were on a device."""

    def save(state: Any) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
            torch.save(state, tmp_path / "cuda.pt")
        return tmp_path / "cuda.pt"

    return save


def test_what_exists_stays_on_its_device_and_what_is_handed_is_on_the_cpu(
    saved_from_cuda: SavedFrom,
) -> None:
    path = saved_from_cuda({"w": torch.ones(2), "fn": torch.ones(3)})
    heard, weight = Heard(), torch.zeros(2)
    restore_into({"w": weight, "fn": heard}, path)
    assert weight.tolist() == [1, 1]
    assert heard.values[0].tolist() == [1, 1, 1]
    assert heard.values[0].device.type == "cpu"


@pytest.mark.parametrize("place", ["cpu", b"cpu", torch.device("cpu"), {"cuda:0": "cpu"}])
def test_every_form_of_map_location_is_taken(place: Any, saved_from_cuda: SavedFrom) -> None:
    heard = Heard()
    path = saved_from_cuda({"fn": torch.ones(3)})
    restore_into({"fn": heard}, path, map_location=place)
    assert heard.values[0].tolist() == [1, 1, 1]


def test_a_callable_map_location_is_asked_once_for_each_storage(
    saved_from_cuda: SavedFrom,
) -> None:
    base = torch.arange(12.0)
    negative: torch.Tensor = torch._neg_view(torch.tensor([1.0, 2.0]))
    value: dict[str, Any] = {
        "base": base, "even": base[::2], "again": base, "neg": negative,
        "parameter": nn.Parameter(torch.ones(3), requires_grad=False),
    }  # fmt: skip
    path = saved_from_cuda({"fn": value, "w": torch.ones(2)})
    asked: list[tuple[int, str]] = []
    made: list[Any] = []

    def place(storage: Any, location: str) -> Any:
        asked.append((storage.nbytes(), location))
        made.append(storage.clone())
        return made[-1]

    heard = Heard()
    restore_into({"fn": heard, "w": torch.zeros(2)}, path, map_location=place)
    assert sorted(asked) == [(8, "cuda:0"), (12, "cuda:0"), (48, "cuda:0")]
    got = heard.values[0]
    assert load_support.difference(torch.load(path, map_location="cpu")["fn"], got) is None
    addresses = {storage.data_ptr() for storage in made}
    assert {t.untyped_storage().data_ptr() for t in got.values()} == addresses
    got["base"].zero_()
    assert not got["even"].any()


def test_a_callable_map_location_may_leave_it_to_torch(tmp_path: Path) -> None:
    heard = Heard()
    path = saved(tmp_path, {"fn": torch.ones(3)})
    restore_into({"fn": heard}, path, map_location=lambda storage, location: None)
    assert heard.values[0].tolist() == [1, 1, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="skipped: there is a CUDA device")
@pytest.mark.parametrize("place", ["cuda:0", torch.device("cuda"), {"cpu": "cuda:1"}])
def test_a_device_that_is_not_there_is_found_before_anything_is_touched(
    place: Any, tmp_path: Path
) -> None:
    heard, weight = Heard(), torch.zeros(2)
    path = saved(tmp_path, {"w": torch.ones(2), "fn": torch.ones(3)})
    with pytest.raises(RuntimeError, match="CUDA"):
        restore_into({"w": weight, "fn": heard}, path, map_location=place)
    assert weight.tolist() == [0, 0]
    assert heard.values == []


@pytest.mark.parametrize(
    ("place", "why"),
    [(3, "is a int"), ("meta", "no data"), ({"cpu": torch.device("meta")}, "no data")],
)
def test_what_is_no_place_for_data_is_refused(place: Any, why: str, tmp_path: Path) -> None:
    path = saved(tmp_path, {"fn": torch.ones(1), "w": torch.ones(2)})
    heard, weight = Heard(), torch.zeros(2)
    with pytest.raises(fp.ArgumentError, match=f"restore failed: map_location .*{why}"):
        restore_into({"w": weight, "fn": heard}, path, map_location=place)
    assert weight.tolist() == [0, 0]
    assert heard.values == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: no CUDA device")
def test_cuda_targets_are_filled_there_and_map_location_moves_the_rest(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(2), "fn": torch.ones(3)})
    heard, weight = Heard(), torch.zeros(2, device="cuda")
    restore_into({"w": weight, "fn": heard}, path, map_location="cuda:0")
    assert weight.tolist() == [1, 1]
    assert heard.values[0].is_cuda and heard.values[0].tolist() == [1, 1, 1]


# --- Files ---


def test_safetensors_files_and_file_objects_are_read(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0), "fn": noise(5)}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    for source in (saved(tmp_path, state, "state.safetensors"), buffer):
        heard, weight = Heard(), torch.zeros(3)
        restore_into({"w": weight, "fn": heard}, source, map_location="cpu")
        assert weight.tolist() == [0, 1, 2]
        assert torch.equal(heard.values[0], noise(5))


@pytest.mark.filterwarnings("ignore")
def test_files_that_are_loaded_as_a_whole_are_restored_from(tmp_path: Path) -> None:
    other = {"phase": next(iter(zoo.Phase)), "sparse": torch.eye(3).to_sparse()}
    state = {"w": torch.arange(3.0), "fn": other}
    path = tmp_path / "state.pt"
    torch.save(state, path)
    heard, weight = Heard(), torch.zeros(3)
    with pytest.raises(fp.WeightsOnlyError):
        restore_into({"w": weight, "fn": heard}, path)
    assert weight.tolist() == [0, 0, 0]
    for place in (None, "cpu", lambda storage, location: storage):
        targets = {"w": weight, "fn": heard}
        restore_into(targets, path, weights_only=False, map_location=place)
        assert weight.tolist() == [0, 1, 2]
        assert torch.equal(heard.values[-1]["sparse"].to_dense(), torch.eye(3))
    assert heard.values[0]["phase"] is other["phase"]


def test_it_works_in_inference_mode(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.arange(3.0), "fn": torch.ones(2)})
    with torch.inference_mode():
        heard, weight = Heard(), torch.zeros(3)
        restore_into({"w": weight, "fn": heard}, path, map_location="cpu")
        assert weight.tolist() == [0, 1, 2]
        assert heard.values[0].tolist() == [1, 1]
