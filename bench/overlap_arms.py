# SPDX-License-Identifier: Apache-2.0
"""Who saves after every step: nobody, fastpersist's Checkpointer, torch.save, DCP's async_save.

Every arm leaves its files synced. The others' old files are removed between blocks, outside of the
measured time; fastpersist retires its own while it saves.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.overlap_training import Workload, state_of
from bench.peers import sync_path

NONE = "none"
NONE_ALIGNED = "none-aligned"
STAGING = "staging"
ZERO_COPY = "zero-copy"
TORCH = "torch"
DCP = "dcp"

TITLES = {
    NONE: "no checkpoint",
    NONE_ALIGNED: "no checkpoint, page-aligned state",
    STAGING: "Checkpointer, staging",
    ZERO_COPY: "Checkpointer, zero-copy",
    TORCH: "torch.save + fsync",
    DCP: "DCP async_save",
}
# These run with a page-aligned state, in a process of their own, and are compared within it.
ALIGNED = (NONE_ALIGNED, ZERO_COPY)
BASELINE = {STAGING: NONE, ZERO_COPY: NONE_ALIGNED, TORCH: NONE, DCP: NONE}
OURS = (STAGING, ZERO_COPY)
KEPT = 2  # Checkpoints that fastpersist keeps.


def missing(name: str) -> str | None:
    """Why an arm cannot run here, or None if it can."""
    if name in OURS and importlib.util.find_spec("fastpersist") is None:
        return "fastpersist is not installed"
    if name == DCP and not hasattr(importlib.import_module(DCP_MODULE), "async_save"):
        return "this torch has no async_save"
    return None


DCP_MODULE = "torch.distributed.checkpoint"


class Arm:
    """Saves nothing: the base of all arms.

    `save` is called after each step; `finish` waits for what is in flight, and `tell` gives what is
    known of the saves since it was called last.
    """

    def __init__(self, workload: Workload, directory: Path) -> None:
        self.workload = workload
        self.directory = directory
        self.step = 0
        self.writes: list[tuple[float, float]] = []

    def save(self) -> None:
        """Saves the state as it is now, or begins to."""

    def finish(self) -> None:
        """Returns when nothing is in flight. Raises what went wrong."""

    def clean(self) -> None:
        """Removes files that a run would have removed long ago."""

    def close(self) -> None:
        """The last call."""

    def tell(self) -> dict[str, Any]:
        """ "writes": from the call of save to the commit, seconds; and what only this arm knows."""
        writes, self.writes = self.writes, []
        return {"writes": writes}

    def _state(self) -> dict[str, Any]:
        self.step += 1
        return state_of(self.workload, self.step)


class FastpersistArm(Arm):
    """A Checkpointer with its defaults, apart from the memory where it is given."""

    def __init__(self, workload: Workload, directory: Path, memory: int | None = None) -> None:
        super().__init__(workload, directory)
        fastpersist = importlib.import_module("fastpersist")
        self.checkpointer = fastpersist.Checkpointer(
            directory / "run", keep_last=KEPT, memory=memory, on_error="raise"
        )
        self.checkpointer.attach(workload.optimizer)
        self._saves: list[tuple[float, Any]] = []

    def save(self) -> None:
        """Starts to save."""
        begin = time.perf_counter()
        ticket = self.checkpointer.save(self.step + 1, self._state())
        self._saves.append((begin, ticket))

    def finish(self) -> None:
        """Waits, and raises what made a save fail."""
        self.checkpointer.wait_until_finished()

    def close(self) -> None:
        """Closes the checkpointer."""
        self.checkpointer.close()

    def tell(self) -> dict[str, Any]:
        """Also the stages' medians, the share in place, and the engine."""
        saves, self._saves = self._saves, []
        if not saves:
            return super().tell()
        infos = [ticket.result() for _, ticket in saves]
        self.writes += [
            (begin, begin + info.seconds["total"])
            for (begin, _), info in zip(saves, infos, strict=True)
        ]
        found = super().tell()
        stages = infos[-1].seconds.keys()
        return found | {
            "stages": {
                name: statistics.median(info.seconds[name] for info in infos) for name in stages
            },
            "in_place": sum(i.in_place_bytes for i in infos) / sum(i.bytes for i in infos),
            "engine": infos[-1].engine,
            "engine_reason": infos[-1].engine_reason,
            "direct": infos[-1].direct,
        }


class TorchArm(Arm):
    """torch.save, the file synced, training stopped meanwhile."""

    def save(self) -> None:
        """Returns when the file is on stable storage."""
        begin = time.perf_counter()
        state = self._state()
        path = self.directory / f"step-{self.step}.pt"
        torch.save(state, path)
        sync_path(path)
        sync_path(self.directory)
        self.writes.append((begin, time.perf_counter()))

    def clean(self) -> None:
        """Removes all files."""
        for path in self.directory.iterdir():
            path.unlink()


class DcpArm(Arm):
    """torch.distributed.checkpoint.async_save: copies everything, and writes in a thread."""

    def __init__(self, workload: Workload, directory: Path) -> None:
        super().__init__(workload, directory)
        self._module: Any = importlib.import_module(DCP_MODULE)
        self._future: Any = None

    def save(self) -> None:
        """Waits for the save before, as it is documented to be used, and begins the next."""
        self.finish()
        begin = time.perf_counter()
        state = self._state()
        writer = self._module.FileSystemWriter(
            self.directory / f"step-{self.step}", sync_files=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It warns that there is only one process.
            self._future = self._module.async_save(state, storage_writer=writer, no_dist=True)
        self._future.add_done_callback(lambda _: self.writes.append((begin, time.perf_counter())))

    def finish(self) -> None:
        """Waits, and raises what made the save fail."""
        if self._future is not None:
            self._future.result()
            self._future = None

    def clean(self) -> None:
        """Removes all checkpoints."""
        for path in self.directory.iterdir():
            shutil.rmtree(path)


_MAKERS: dict[str, Callable[[Workload, Path], Arm]] = {
    NONE: Arm,
    NONE_ALIGNED: Arm,
    STAGING: FastpersistArm,
    ZERO_COPY: FastpersistArm,
    TORCH: TorchArm,
    DCP: DcpArm,
}


def make(name: str, workload: Workload, directory: Path, memory: int | None = None) -> Arm:
    """An arm that saves below `directory`, which is made. memory: bytes, fastpersist's option."""
    directory.mkdir(parents=True, exist_ok=True)
    if name in OURS:
        return FastpersistArm(workload, directory, memory)
    return _MAKERS[name](workload, directory)
