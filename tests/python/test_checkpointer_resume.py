# SPDX-License-Identifier: Apache-2.0
"""A run that goes on from a checkpoint computes what it would have computed, bit for bit; and one
that is killed at any moment has such a checkpoint (KempnerInstitute/KempnerForge#114,
Lightning-AI/pytorch-lightning#19970)."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time
import zlib
from typing import Any

import checkpoint_support as support
import faults_support as faults
import pytest
import torch
from checkpoint_support import Training

import fastpersist as fp

KILLS = int(os.environ.get("FASTPERSIST_TEST_KILLS", "200"))

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
}
STEPS, BATCHES = 24, 7


class Run:
    """Everything that decides what comes next: BatchNorm, dropout, a scheduler, shuffled data."""

    def __init__(self, kind: str):
        torch.manual_seed(5)
        random.seed(5)
        torch.set_num_threads(1)
        numbers: Any = torch.randn(BATCHES * 8, 130)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(130, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.3),
            torch.nn.Linear(64, 1),
        )  # fmt: skip
        optimizer, arguments = OPTIMIZERS[kind]
        self.optimizer = optimizer(self.model.parameters(), **arguments)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.shuffle = torch.Generator().manual_seed(1)
        self.before_epoch = self.shuffle.get_state()
        self.loader: Any = torch.utils.data.DataLoader(
            numbers, batch_size=8, shuffle=True, generator=self.shuffle
        )
        self.batches: Any = None
        self.step_number = 0

    def step(self) -> float:
        position = self.step_number % BATCHES
        if position == 0 or self.batches is None:
            if position == 0:
                self.before_epoch = self.shuffle.get_state()
            self.shuffle.set_state(self.before_epoch)
            rng = fp.rng_state()
            self.batches = iter(self.loader)
            for _ in range(position):
                next(self.batches)
            if position:  # what was drawn for the batches before was drawn before the checkpoint
                fp.set_rng_state(rng)
        batch = next(self.batches)
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean() + random.random()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step_number += 1
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "before_epoch": self.before_epoch,
            "shuffle": self.shuffle.get_state(),
        }

    def restore(self, ckpt: fp.Checkpointer, step: int | None = None) -> int:
        targets = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "before_epoch": self.before_epoch,
            "shuffle": self.shuffle.set_state,
        }
        rank = {"rng": fp.set_rng_state}
        self.step_number = ckpt.restore(targets, per_rank=rank, step=step, default=0)
        return self.step_number


@pytest.mark.parametrize("stop", [1, 7, 11])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_run_is_the_same_run(kind: str, stop: int, tmp_path: Any) -> None:
    whole = Run(kind)
    expected = [whole.step() for _ in range(STEPS)]
    first = Run(kind)
    with support.open_run(tmp_path, verify_source="full") as ckpt:
        ckpt.attach(first.optimizer)
        assert first.restore(ckpt) == 0
        for step in range(1, stop + 4):  # goes on a little, then is lost
            assert first.step() == expected[step - 1]
            if step <= stop:
                ckpt.save(step, first.state(), per_rank={"rng": fp.rng_state()})
    random.seed(99)
    second = Run(kind)  # fresh: no moments, another place in the data
    with support.open_run(tmp_path) as ckpt:
        assert second.restore(ckpt) == stop
        again = [second.step() for _ in range(STEPS - stop)]
    assert again == expected[stop:]
    assert support.difference(second.state(), whole.state()) == ""


# --- Kills ---


def _digest(training: Training) -> int:
    crc = 0
    for value in torch.utils._pytree.tree_leaves(training.state()):
        if isinstance(value, torch.Tensor):
            crc = zlib.crc32(value.detach().contiguous().view(-1).numpy().tobytes(), crc)
    return crc


def restore_training(ckpt: fp.Checkpointer, training: Training) -> int:
    targets = {"model": training.model, "optim": training.optimizer}
    found: int = ckpt.restore(targets, per_rank={"rng": fp.set_rng_state}, default=0)
    return found


def train_until_killed(folder: str, engine: str, keep: int) -> None:
    """A checkpoint after every step, from the newest one on."""
    options = fp.Options(engine=engine, block_bytes=support.BLOCK)
    ckpt = support.open_run(folder, keep_last=keep, keep_every=50, options=options)
    training = Training(layers=2)
    ckpt.attach(training.optimizer)
    step = restore_training(ckpt, training)
    pathlib.Path(folder, "ready").touch()
    while True:
        training.step()
        step += 1
        ckpt.save(step, training.state(), per_rank={"rng": fp.rng_state()})


def test_after_kills_at_random_moments_a_run_goes_on_as_if_nothing_had_been(tmp_path: Any) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    reference = Training(layers=2)
    digests = [_digest(reference)]
    newest, found = 0, 0
    for kill in range(KILLS):
        engine, keep = chance.choice(faults.ENGINES), chance.choice([1, 2, 3])
        child = faults.start(train_until_killed, str(tmp_path), engine, keep)
        support.wait_for(tmp_path / "ready")
        time.sleep(chance.uniform(0, 0.1))
        child.kill()
        assert child.wait() == -signal.SIGKILL
        before = torch.get_rng_state()
        with support.open_run(tmp_path) as ckpt:
            training = Training(layers=2)
            step = restore_training(ckpt, training)
            steps = ckpt.all_steps()
        torch.set_rng_state(before)
        assert step >= newest, f"kill {kill}: the newest checkpoint is gone"
        made, newest = step - newest, step
        while len(digests) <= step:
            reference.step()
            digests.append(_digest(reference))
        assert _digest(training) == digests[step], f"kill {kill}: other values at step {step}"
        recent = [s for s in steps if s % 50]
        # Older ones are retired after each commit, before the next: who made two has retired once.
        most = 4 if made > 1 else max(3, found) + made
        assert len(recent) <= most, f"kill {kill}: {steps} are still there, after {made} more"
        found = len(recent)
        assert list(range(50, step + 1, 50)) == [s for s in steps if s % 50 == 0]
    print(f"{KILLS} kills, {newest} steps")
    assert newest > 0
