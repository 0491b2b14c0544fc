# SPDX-License-Identifier: Apache-2.0
"""What is trained while checkpoints are written, and how a run of steps is timed.

Three kinds: a GPT that keeps all cores busy; a sleep, for an accelerator that leaves the host idle,
after which a short optimizer update changes every tensor; and the 592 tensors of GPT-2-small with
Adam, which are never computed with.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn import functional

from bench.states import gpt2_shapes, tensors_in

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo"
BATCH = 8
CONTEXT = 128
VOCABULARY = 4096
LAYERS = 8
HEADS = 8
WIDTH = 512
PAGE = mmap.PAGESIZE
# A state's tensors of fewer bytes stay where they are.
SMALL_BYTES = 16 << 10

# Begin, computed, may change, changed, saved: seconds on one clock.
StepTimes = tuple[float, float, float, float, float]


class Workload(Protocol):
    """Something that is trained: what happens before the optimizer's step, and the step."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def compute(self) -> None:
        """Forward and backward, or what stands for them."""


class GptTraining:
    """A GPT of 27 M parameters (at size 1) with Adam: 329 MB of state."""

    def __init__(self, size: float, seed: int, sleep: float) -> None:
        sys.path.insert(0, str(DEMO))
        import gpt  # type: ignore[import-not-found]

        torch.manual_seed(seed)
        width = max(HEADS, round(WIDTH * size**0.5 / HEADS) * HEADS)
        config = gpt.Config(LAYERS, HEADS, width, context=CONTEXT, vocabulary=VOCABULARY)
        self.model: torch.nn.Module = gpt.GPT(config)
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
            self.model.parameters(), 3e-4, (0.9, 0.95)
        )
        self._generator = torch.Generator().manual_seed(seed)

    def compute(self) -> None:
        """One batch, forward and backward."""
        shape = (BATCH, CONTEXT + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=self._generator)
        logits = self.model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]


class SleepingTraining:
    """The same parameters with SGD and momentum: 220 MB of state; the gradients never change."""

    def __init__(self, size: float, seed: int, sleep: float) -> None:
        self.model = GptTraining(size, seed, sleep).model
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            parameters, 1e-6, momentum=0.9, foreach=True
        )
        self._sleep = sleep
        _give_gradients(parameters)

    def compute(self) -> None:
        """Leaves the host idle."""
        time.sleep(self._sleep)


class AttachedTensors:
    """GPT-2-small with Adam: 592 tensors, 1.49 GB."""

    def __init__(self, size: float, seed: int, sleep: float) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Module()
        for name, (rows, *rest) in gpt2_shapes().items():
            parameter = torch.nn.Parameter(torch.randn(max(1, round(rows * size)), *rest))
            self.model.register_parameter(name.replace(".", "_"), parameter)
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, 1e-6, foreach=True)
        _give_gradients(parameters)

    def compute(self) -> None:
        """Nothing: only saving is looked at."""


WORKLOADS: dict[str, Callable[[float, int, float], Workload]] = {
    "gpt": GptTraining,
    "sleep": SleepingTraining,
    "gpt2": AttachedTensors,
}


def _give_gradients(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def make(kind: str, *, size: float, seed: int, sleep: float = 0.0) -> Workload:
    """One of WORKLOADS, its optimizer's state complete. sleep: seconds of a step of "sleep"."""
    workload = WORKLOADS[kind](size, seed, sleep)
    workload.compute()
    workload.optimizer.step()
    return workload


def state_of(workload: Workload, step: int) -> dict[str, Any]:
    """What a script would save: it refers to the live tensors."""
    return {
        "model": workload.model.state_dict(),
        "optim": workload.optimizer.state_dict(),
        "step": step,
    }


def state_size(workload: Workload) -> tuple[int, int]:
    """Bytes and number of the tensors, tied ones counted once."""
    distinct = {t.data_ptr(): t.nbytes for _, t in tensors_in(state_of(workload, 0))}
    return sum(distinct.values()), len(distinct)


def move_to_pages(workload: Workload) -> None:
    """Puts parameters and optimizer state into mapped memory, which begins at a page.

    The way to a page-aligned state without another allocator. Small tensors stay.
    """
    with torch.no_grad():
        for parameter in workload.model.parameters():
            if parameter.nbytes >= SMALL_BYTES:
                parameter.data = _on_pages(parameter.data)
        for state in workload.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.nbytes >= SMALL_BYTES:
                    state[key] = _on_pages(value)


def _on_pages(tensor: torch.Tensor) -> torch.Tensor:
    # Private, for shared memory would not be read in place; the tensor keeps the mapping alive.
    memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    moved = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    moved.copy_(tensor)
    return moved


def aligned_share(workload: Workload) -> float:
    """The share of the state's bytes that lies in tensors that begin at a page."""
    found = {t.data_ptr(): t.nbytes for _, t in tensors_in(state_of(workload, 0))}
    aligned = sum(size for address, size in found.items() if address % PAGE == 0)
    return aligned / max(1, sum(found.values()))


def timed_steps(workload: Workload, save: Callable[[], None], steps: int) -> list[StepTimes]:
    """Trains `steps` steps, each followed by `save`.

    What passes between "computed" and "may change" is the wait for a save in flight, which the
    optimizer's step begins with.
    """
    clock = time.perf_counter
    may_change = [0.0]

    def now(*_: object) -> None:  # Hooks of one optimizer run after those of all optimizers.
        may_change[0] = clock()

    handle = workload.optimizer.register_step_pre_hook(now)
    found: list[StepTimes] = []
    try:
        for _ in range(steps):
            begin = clock()
            workload.compute()
            computed = clock()
            workload.optimizer.step()
            changed = clock()
            save()
            found.append((begin, computed, may_change[0], changed, clock()))
    finally:
        handle.remove()
    return found
