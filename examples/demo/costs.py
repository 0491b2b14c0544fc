# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint after every iteration costs: the same training with nobody saving, with
fastpersist, torch.save, and torch.distributed.checkpoint's async_save, in turns.

It is a look, of a few iterations each. `make bench-overlap` measures.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from report import aligned
from saving import save_with_torch
from training import Training

import fastpersist as fp

ITERATIONS = 5
TURNS = 2
NOBODY = "no checkpoint"
HEADINGS = ("a checkpoint after every iteration", "seconds", "extra time", "stands still, s")

Save = Callable[[int, Any], None]


class Costs:
    """Seconds of each iteration, and of the standstill for its checkpoint, by writer."""

    def __init__(self, run: Training, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._number = 0
        self.seconds: dict[str, list[float]] = {}
        self.stalls: dict[str, list[float]] = {}

    def measure(self) -> None:
        """All writers in turns."""
        for turn in range(TURNS):
            writers = [self._nobody, self._fastpersist, self._torch, self._dcp]
            for writer in writers if turn % 2 == 0 else reversed(writers):
                writer()

    def _iterate(self, name: str, save: Save) -> None:
        """The first iteration is not counted: each that is has a save before and after it."""
        may_change = 0.0

        def note(*_: Any) -> None:  # runs when the optimizer has waited for a save in flight
            nonlocal may_change
            may_change = time.perf_counter()

        hook = self._run.optimizer.register_step_pre_hook(note)
        for number in range(ITERATIONS + 1):
            start = time.perf_counter()
            self._run.forward_and_backward()
            computed = time.perf_counter()
            self._run.optimizer.step()
            changed = time.perf_counter()
            self._number += 1
            save(self._number, self._run.state())
            end = time.perf_counter()
            if number > 0:
                self.seconds.setdefault(name, []).append(end - start)
                stall = may_change - computed + end - changed
                self.stalls.setdefault(name, []).append(stall)
        hook.remove()

    def _nobody(self) -> None:
        self._iterate(NOBODY, lambda number, state: None)

    def _fastpersist(self) -> None:
        with fp.Checkpointer(self._folder / "fastpersist-run", keep_last=2) as ckpt:
            ckpt.attach(self._run.optimizer)

            def save(number: int, state: Any) -> None:
                ckpt.save(number, state)

            self._iterate("fastpersist.Checkpointer", save)

    def _torch(self) -> None:
        path = self._folder / "every-iteration.pt"

        def save(number: int, state: Any) -> None:
            save_with_torch(state, path)

        self._iterate("torch.save + fsync", save)
        path.unlink()

    def _dcp(self) -> None:
        import torch.distributed.checkpoint as dcp

        folder = self._folder / "dcp"
        in_flight: list[Any] = []

        def save(number: int, state: Any) -> None:
            while in_flight:
                in_flight.pop().result()
            writer = dcp.FileSystemWriter(folder / str(number), sync_files=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns that there is only one process
                in_flight.append(dcp.async_save(state, storage_writer=writer, no_dist=True))

        self._iterate("DCP async_save", save)
        in_flight.pop().result()
        shutil.rmtree(folder)

    def table(self) -> str:
        """Medians of the iterations, and how they compare with nobody saving."""
        base = median(self.seconds[NOBODY])
        rows: list[tuple[str, ...]] = [HEADINGS]
        for name, seconds in self.seconds.items():
            extra = "" if name == NOBODY else f"{median(seconds) / base - 1:+.0%}"
            rows.append((name, f"{median(seconds):.3f}", extra, f"{median(self.stalls[name]):.3f}"))
        return aligned(rows)
