# SPDX-License-Identifier: Apache-2.0
"""Trains the demo's model for a few steps and puts together the state that a script would save."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from corpus import random_batch
from gpt import GPT, Config
from torch.nn import functional

BATCH = 8
LEARNING_RATE = 5e-4


class Training:
    """A model, its optimizer and the text; deterministic for a given seed and number of threads."""

    def __init__(self, config: Config, text: torch.Tensor, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.config = config
        self.text = text
        self.model = GPT(config)
        self.optimizer = torch.optim.Adam(self.model.parameters(), LEARNING_RATE, (0.9, 0.95))
        self.losses: list[float] = []
        self.batches = torch.Generator().manual_seed(seed)

    def run(self, steps: int) -> Iterator[tuple[float, float]]:
        """Trains step by step; yields each step's loss (nats a byte) and its time (seconds)."""
        for _ in range(steps):
            start = time.perf_counter()
            loss = self.forward_and_backward()
            self.optimizer.step()
            self.losses.append(loss)
            yield loss, time.perf_counter() - start

    def forward_and_backward(self) -> float:
        """Computes the gradients of the next batch; returns its loss."""
        inputs, targets = random_batch(self.text, BATCH, self.config.context, self.batches)
        logits = self.model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def loss_went_down(self) -> bool:
        """Whether the last quarter of the steps had a lower mean loss than the first."""
        quarter = max(1, len(self.losses) // 4)
        return sum(self.losses[-quarter:]) < sum(self.losses[:quarter])

    def state(self) -> dict[str, Any]:
        """What a run needs to go on: it refers to the live tensors, nothing is copied."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": len(self.losses),
            "config": dataclasses.asdict(self.config),
            "generator": self.batches.get_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes back to where the run was when `state()` was saved; the text is not in it."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.set_state(state["generator"])
