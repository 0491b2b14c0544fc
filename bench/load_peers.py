# SPDX-License-Identifier: Apache-2.0
"""The loaders that are compared: fastpersist, and what others offer for the same tensors.

All end with every byte in memory. What maps the file instead of reading it therefore touches each
page once. What a loader needs before (imports, the tensors that it fills) is made by `prepare`
outside the measured time. torch is imported by those who need it only, so that the process that
runs the command line program stays small.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import subprocess
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.states import State

REPOSITORY = Path(__file__).resolve().parent.parent
PROGRAM = REPOSITORY / "build" / "release" / "fastpersist"
INSTALL_ADVICE = "pip install -r requirements/bench.txt"
BUILD_ADVICE = "make build"
PAGE_BYTES = 4096

FP_LOAD = "fp.load"
FP_LOAD_INTO = "fp.load_into"
VERIFY = "verify"
TORCH = "torch"
TORCH_MMAP = "torch-mmap"
SAFETENSORS = "safetensors"
RUNAI = "runai"
FASTSAFETENSORS = "fastsafetensors"
DCP = "dcp"

# Below the directory of a run. The first is also what `inspect` looks into.
TORCH_FILE = "model.pt"
SAFETENSORS_FILE = "model.safetensors"
DCP_DIRECTORY = "checkpoint"

Load = Callable[[], Any]


@dataclass(frozen=True)
class Loader:
    """Somebody who loads what lies at `source` below the run's directory.

    `prepare(path of the source)` returns the function to be measured, which returns what it loaded;
    None for a program of its own, whose command line `command(path)` is. `attribute` is what the
    module must have.
    """

    name: str
    title: str
    module: str
    source: str
    prepare: Callable[[Path], Load] | None
    command: Callable[[Path], list[str]] | None = None
    attribute: str | None = None

    def missing(self) -> str | None:
        """Why it cannot run here and what to do, or None if it can."""
        if self.command is not None:
            return None if PROGRAM.is_file() else f"{PROGRAM.name} is not built: {BUILD_ADVICE}"
        if importlib.util.find_spec(self.module) is None:
            advice = BUILD_ADVICE if self.module == "fastpersist" else INSTALL_ADVICE
            return f"{self.module} is not installed: {advice}"
        if self.attribute and not hasattr(importlib.import_module(self.module), self.attribute):
            return f"{self.module}.{self.attribute} is not available in this version"
        return None


class LastRead(logging.Handler):
    """Keeps what fastpersist logs of its last read: seconds, engine, why it was chosen."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.detail: dict[str, Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Takes the mapping among the arguments of a message, if there is one."""
        arguments = record.args if isinstance(record.args, tuple) else (record.args,)
        found = next((entry for entry in arguments if isinstance(entry, Mapping)), {})
        if "engine" in found:
            self.detail = {
                key: found[key] for key in ("engine", "engine_reason", "direct") if key in found
            }
            self.detail["stages"] = {"read": found.get("seconds", 0.0)}


def page_toucher() -> Callable[[object], None]:
    """Makes a function that reads a byte of every page of every tensor of a state."""
    tensors_in = importlib.import_module("bench.states").tensors_in
    torch = importlib.import_module("torch")

    def touch(value: object) -> None:
        for _, tensor in tensors_in(value):
            if tensor.nbytes:
                data = tensor.view(-1).view(torch.uint8)
                int(data[::PAGE_BYTES].sum()) + int(data[-1])

    return touch


def existing_state(path: Path) -> Any:
    """A state like the saved one, its tensors in memory of their own, each page of it written."""
    import torch

    outline = torch.load(path, map_location="meta", mmap=True, weights_only=True)

    def filled(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty(value.shape, dtype=value.dtype).fill_(1)
        if isinstance(value, dict):
            return type(value)((key, filled(entry)) for key, entry in value.items())
        if isinstance(value, list):
            return [filled(entry) for entry in value]
        return value

    return filled(outline)


def _fp_load(path: Path) -> Load:
    importlib.import_module("torch")
    fastpersist = importlib.import_module("fastpersist")
    return lambda: fastpersist.load(path)


def _fp_load_into(path: Path) -> Load:
    state = existing_state(path)
    fastpersist = importlib.import_module("fastpersist")

    def load() -> Any:
        fastpersist.load_into(state, path)
        return state

    return load


def _torch_load(path: Path) -> Load:
    torch = importlib.import_module("torch")
    return lambda: torch.load(path, weights_only=True)


def _torch_load_mapped(path: Path) -> Load:
    torch = importlib.import_module("torch")
    touch = page_toucher()

    def load() -> Any:
        value = torch.load(path, mmap=True, weights_only=True)
        touch(value)
        return value

    return load


def _safetensors(path: Path) -> Load:
    load_file = importlib.import_module("safetensors.torch").load_file
    touch = page_toucher()

    def load() -> Any:
        value = load_file(path)
        touch(value)
        return value

    return load


def _runai_streamer(path: Path) -> Load:
    """Keeps each tensor as it arrives; with the streamer's defaults the caller owns it."""
    streamer_type = importlib.import_module("runai_model_streamer").SafetensorsStreamer

    def load() -> Any:
        with streamer_type() as streamer:
            streamer.stream_file(str(path))
            return dict(streamer.get_tensors())

    return load


def _fastsafetensors(path: Path) -> Load:
    """Its way through memory, since there is no GPU for GPUDirect Storage."""
    loader_type = importlib.import_module("fastsafetensors").SafeTensorsFileLoader

    def load() -> Any:
        loader = loader_type(None, device="cpu", nogds=True)
        loader.add_filenames({0: [str(path)]})
        buffers = loader.copy_files_to_device()
        value = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        # Tensors share ownership of the memory; they outlive both.
        buffers.close()
        loader.close()
        return value

    return load


def _distributed_checkpoint(path: Path) -> Load:
    checkpoint = importlib.import_module("torch.distributed.checkpoint")
    state = existing_state(path.parent / TORCH_FILE)

    def load() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It warns that there is only one process.
            reader = checkpoint.FileSystemReader(path)
            checkpoint.load(state, storage_reader=reader, no_dist=True)
        return state

    return load


def verify_command(path: Path) -> list[str]:
    """Reads the whole file and compares every checksum."""
    return [str(PROGRAM), "verify", "--json", str(path)]


def inspect_command(path: Path) -> list[str]:
    """Shows names and shapes, and reads no tensor."""
    return [str(PROGRAM), "inspect", str(path)]


LOADERS: dict[str, Loader] = {
    loader.name: loader
    for loader in (
        Loader(FP_LOAD, "fp.load", "fastpersist", TORCH_FILE, _fp_load, attribute="load"),
        Loader(
            FP_LOAD_INTO,
            "fp.load_into, in place",
            "fastpersist",
            TORCH_FILE,
            _fp_load_into,
            attribute="load_into",
        ),
        Loader(VERIFY, "fastpersist verify", "", TORCH_FILE, None, command=verify_command),
        Loader(TORCH, "torch.load", "torch", TORCH_FILE, _torch_load),
        Loader(TORCH_MMAP, "torch.load, mmap + touch", "torch", TORCH_FILE, _torch_load_mapped),
        Loader(SAFETENSORS, "safetensors + touch", "safetensors", SAFETENSORS_FILE, _safetensors),
        Loader(
            RUNAI,
            "run:ai model streamer",
            "runai_model_streamer",
            SAFETENSORS_FILE,
            _runai_streamer,
        ),
        Loader(
            FASTSAFETENSORS,
            "fastsafetensors, CPU",
            "fastsafetensors",
            SAFETENSORS_FILE,
            _fastsafetensors,
        ),
        Loader(DCP, "DCP, in place", "torch", DCP_DIRECTORY, _distributed_checkpoint),
    )
}


def save_sources(state: State, directory: Path, sources: set[str]) -> None:
    """Writes what the loaders will read below `directory`, and syncs it.

    The file of torch.save is always written. The limit's file is not among these.
    """
    import torch

    from bench.peers import sync_tree
    from bench.states import flat_tensors

    torch.save(state.value, directory / TORCH_FILE)
    if SAFETENSORS_FILE in sources:
        save_file = importlib.import_module("safetensors.torch").save_file
        save_file(flat_tensors(state.value), directory / SAFETENSORS_FILE)
    if DCP_DIRECTORY in sources:
        checkpoint = importlib.import_module("torch.distributed.checkpoint")
        writer = checkpoint.FileSystemWriter(directory / DCP_DIRECTORY)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It warns that there is only one process.
            checkpoint.save(state.value, storage_writer=writer, no_dist=True)
    sync_tree(directory)


def program_reason(finished: subprocess.CompletedProcess[str]) -> str:
    """The last line that a program wrote on stderr, or its exit status."""
    lines = finished.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {finished.returncode}"
