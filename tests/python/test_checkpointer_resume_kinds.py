# SPDX-License-Identifier: Apache-2.0
"""Runs of kinds that hold state in unusual places (workers of a data loader, the history of LBFGS,
an average of the weights) are killed in the middle of a save and go on, in a new process, as if
nothing had been: the same losses, bit for bit."""

from __future__ import annotations

import pathlib
import random
import signal
from typing import Any

import checkpoint_support as support
import faults_support as faults
import pytest
import torch
from checkpoint_support import held

import fastpersist as fp

STEPS, BATCHES, SIZE = 19, 7, 8
KINDS = ("workers", "LBFGS", "EMA")


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples that whoever fetches them changes at random, as augmentations do."""

    def __len__(self) -> int:
        return BATCHES * SIZE

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(130, generator=generator) + 0.1 * torch.randn(130)


class Run:
    """One training run, with all that decides what comes next."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(11)
        random.seed(11)
        torch.set_num_threads(1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(130, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.2),
            torch.nn.Linear(64, 1),
        )  # fmt: skip
        weights = self.model.parameters()
        self.optimizer: Any = torch.optim.AdamW(weights, lr=0.01)
        if kind == "LBFGS":
            self.optimizer = torch.optim.LBFGS(
                self.model.parameters(), lr=0.1, max_iter=4, history_size=3
            )
        self.average: Any = None
        if kind == "EMA":
            averages: Any = torch.optim.swa_utils
            self.average = averages.AveragedModel(
                self.model, multi_avg_fn=averages.get_ema_multi_avg_fn(0.8), use_buffers=True
            )
        self.shuffle = torch.Generator().manual_seed(3)
        self.before_epoch = self.shuffle.get_state()
        self.loader: Any = torch.utils.data.DataLoader(
            Noisy(), batch_size=SIZE, shuffle=True, generator=self.shuffle,
            num_workers=2 if kind == "workers" else 0,
        )  # fmt: skip
        self.batches: Any = None
        self.step_number = 0

    def next_batch(self) -> Any:
        """From the place in the epoch, found again by fetching once more what came before."""
        position = self.step_number % BATCHES
        if position == 0:
            self.before_epoch = self.shuffle.get_state()
        if position == 0 or self.batches is None:
            self.shuffle.set_state(self.before_epoch)
            rng = fp.rng_state()
            self.batches = iter(self.loader)
            for _ in range(position):
                next(self.batches)
            if position:  # what these draw was drawn before the checkpoint
                fp.set_rng_state(rng)
        return next(self.batches)

    def step(self) -> str:
        """The loss, to the last bit."""
        batch = self.next_batch()

        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            return loss.detach()

        loss = float(self.optimizer.step(closure)) + random.random()
        if self.average is not None:
            self.average.update_parameters(self.model)
            self.average.eval()
            loss += float(self.average(batch).sum().detach())
        self.step_number += 1
        return loss.hex()

    def parts(self) -> dict[str, Any]:
        found = {"model": self.model, "optimizer": self.optimizer, "average": self.average}
        return {name: part for name, part in found.items() if part is not None}

    def state(self) -> dict[str, Any]:
        own = {"before_epoch": self.before_epoch, "shuffle": self.shuffle.get_state()}
        return {name: part.state_dict() for name, part in self.parts().items()} | own

    def restore(self, ckpt: fp.Checkpointer) -> int:
        own = {"before_epoch": self.before_epoch, "shuffle": self.shuffle.set_state}
        rank = {"rng": fp.set_rng_state}
        self.step_number = ckpt.restore(self.parts() | own, per_rank=rank, default=0)
        return self.step_number


def train(folder: str, kind: str, held_at: int) -> tuple[int, list[str], dict[str, Any]]:
    """From the newest checkpoint on; the save of step held_at never ends (0: all of them do). Where
    it began, the losses from there on, and the state at the end."""
    run = Run(kind)
    with support.open_run(folder, keep_last=2, verify_source="full") as ckpt:
        ckpt.attach(run.optimizer)
        start = run.restore(ckpt)
        losses = []
        for step in range(start + 1, STEPS + 1):
            losses.append(run.step())
            with open(pathlib.Path(folder, "losses"), "a") as file:
                file.write(f"{step} {losses[-1]}\n")
            if step == held_at:
                hold = held(folder, path=f"step-{step:08}/state.pt")
                hold.__enter__()  # not left: the process is killed in it
            ckpt.save(step, run.state(), per_rank={"rng": fp.rng_state()})
    return start, losses, run.state()


def train_without_checkpoints(kind: str) -> tuple[list[str], dict[str, Any]]:
    run = Run(kind)
    return [run.step() for _ in range(STEPS)], run.state()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_this_kind_that_is_killed_in_a_save_goes_on_bit_for_bit(
    kind: str, tmp_path: Any
) -> None:
    expected, end = faults.run(train_without_checkpoints, kind)
    assert len(set(expected)) == STEPS
    newest = 0
    for held_at in (5, BATCHES + 1, 2 * BATCHES + 2):  # within an epoch; at its end; in the last
        child = faults.start(train, str(tmp_path), kind, held_at, shim=True)
        support.wait_for(tmp_path / "hold.reached")
        child.kill()
        assert child.wait() == -signal.SIGKILL
        (tmp_path / "hold").unlink()
        newest = held_at - 1
    start, losses, state = faults.run(train, str(tmp_path), kind, 0)
    assert start == newest
    assert losses == expected[start:]
    assert support.difference(state, end) == ""
    for line in (tmp_path / "losses").read_text().splitlines():  # of those that were killed, too
        step, loss = line.split()
        assert loss == expected[int(step) - 1], step
