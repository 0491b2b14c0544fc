# SPDX-License-Identifier: Apache-2.0
"""The writers that are compared: fastpersist, its engines one by one, and what others offer.

Every writer ends with its files, and the directory that names them, synced to the device, so that
all are held to the same promise. What a writer needs once (imports, buffers, a flattened state) is
made by `prepare` outside the measured time.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.measure import Detail
from bench.states import State, flat_tensors

Save = Callable[[Path], Detail | None]

FILE_NAME = "model.pt"  # The same for all: the name is part of a torch file's bytes.
DEEPSPEED_BUFFER_BYTES = 64 << 20
DEEPSPEED_BLOCK_BYTES = 8 << 20
DEEPSPEED_QUEUE_DEPTH = 8


@dataclass(frozen=True)
class Peer:
    """A writer: `prepare(state)` returns a function that saves it below a given empty directory."""

    name: str
    title: str
    module: str
    prepare: Callable[[State], Save]

    def missing(self) -> str | None:
        """Why it cannot run here, or None if it can."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        return None


def sync_path(path: Path) -> None:
    """Forces the data and metadata of one file, or the entries of one directory, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """Syncs every file and directory below `root`, `root` itself and the directory around it."""
    for folder, _, names in os.walk(root):
        for name in names:
            sync_path(Path(folder, name))
        sync_path(Path(folder))
    sync_path(root.parent)


def _fastpersist(engine: str) -> Callable[[State], Save]:
    def prepare(state: State) -> Save:
        fastpersist = importlib.import_module("fastpersist")
        options = fastpersist.Options(engine=engine)

        def save(directory: Path) -> Detail:
            info = fastpersist.save(state.value, directory / FILE_NAME, options=options)
            if engine not in ("auto", info.engine):
                raise RuntimeError(f"{engine} was not used but {info.engine}: {info.engine_reason}")
            return {
                "engine": info.engine,
                "engine_reason": info.engine_reason,
                "direct": info.direct,
                "stages": dict(info.seconds),
            }

        return save

    return prepare


def _torch_save(state: State) -> Save:
    def save(directory: Path) -> None:
        torch.save(state.value, directory / FILE_NAME)
        sync_path(directory / FILE_NAME)
        sync_path(directory)

    return save


def _torch_save_committed(state: State) -> Save:
    def save(directory: Path) -> None:
        temporary = directory / (FILE_NAME + ".tmp")
        torch.save(state.value, temporary)
        sync_path(temporary)
        temporary.rename(directory / FILE_NAME)
        sync_path(directory)

    return save


def _safetensors(state: State) -> Save:
    save_file = importlib.import_module("safetensors.torch").save_file
    tensors = flat_tensors(state.value)

    def save(directory: Path) -> None:
        path = directory / "model.safetensors"
        save_file(tensors, path)
        sync_path(path)
        sync_path(directory)

    return save


def _distributed_checkpoint(state: State) -> Save:
    checkpoint = importlib.import_module("torch.distributed.checkpoint")

    def save(directory: Path) -> None:
        target = directory / "checkpoint"
        writer = checkpoint.FileSystemWriter(target, sync_files=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It warns that there is only one process.
            checkpoint.save(state.value, storage_writer=writer, no_dist=True)
        sync_tree(target)

    return save


def _torchsnapshot(state: State) -> Save:
    torchsnapshot = importlib.import_module("torchsnapshot")
    application = {"state": torchsnapshot.StateDict(**state.value)}

    def save(directory: Path) -> None:
        target = directory / "snapshot"
        torchsnapshot.Snapshot.take(str(target), application)
        sync_tree(target)

    return save


def _deepspeed_fast_file_writer(state: State) -> Save:
    """torch.save into DeepSpeed's FastFileWriter with its default, two halves of a 64 MiB buffer.

    The first use on a machine compiles DeepSpeed's operators, which takes minutes.
    """
    builders = importlib.import_module("deepspeed.ops.op_builder")
    module = importlib.import_module("deepspeed.io.fast_file_writer")
    handle = (
        builders.AsyncIOBuilder()
        .load(verbose=False)
        .aio_handle(
            block_size=DEEPSPEED_BLOCK_BYTES,
            queue_depth=DEEPSPEED_QUEUE_DEPTH,
            single_submit=False,
            overlap_events=True,
            intra_op_parallelism=1,
        )
    )
    buffer = handle.new_cpu_locked_tensor(DEEPSPEED_BUFFER_BYTES, torch.empty(0, dtype=torch.uint8))
    config = module.FastFileWriterConfig(
        dnvme_handle=handle, pinned_tensor=buffer, double_buffer=True
    )
    _let_writer_start_without_gpu(module)

    def save(directory: Path) -> None:
        path = directory / FILE_NAME
        writer = module.FastFileWriter(str(path), config)
        torch.save(state.value, writer)
        writer.close()
        sync_path(path)
        sync_path(directory)

    return save


def _let_writer_start_without_gpu(module: Any) -> None:
    """The writer loads an operator that DeepSpeed refuses to build for CPUs.

    It is called only through a patched torch, never in what is measured here: a stand-in will do.
    """
    try:
        module.UtilsBuilder().load()
    except (ValueError, NotImplementedError):
        operators = types.SimpleNamespace(cast_to_byte_tensor=None)
        module.UtilsBuilder = lambda: types.SimpleNamespace(load=lambda: operators)


FASTPERSIST = "fastpersist"
ENGINES = ("uring", "libaio", "threads")
TORCH = "torch"
TORCH_COMMITTED = "torch-committed"


def engine_peer_name(engine: str) -> str:
    """Name of the peer that is fastpersist held to one engine."""
    return f"{FASTPERSIST}-{engine}"


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(FASTPERSIST, "fp.save", FASTPERSIST, _fastpersist("auto")),
        *(
            Peer(
                engine_peer_name(engine),
                f"fp.save, {engine}",
                FASTPERSIST,
                _fastpersist(engine),
            )
            for engine in ENGINES
        ),
        Peer(TORCH, "torch.save + fsync", "torch", _torch_save),
        Peer(TORCH_COMMITTED, "torch.save, committed", "torch", _torch_save_committed),
        Peer("safetensors", "safetensors + fsync", "safetensors", _safetensors),
        Peer("dcp", "torch.distributed.checkpoint", "torch", _distributed_checkpoint),
        Peer("torchsnapshot", "torchsnapshot + fsync", "torchsnapshot", _torchsnapshot),
        Peer(
            "deepspeed",
            "DeepSpeed FastFileWriter",
            "deepspeed",
            _deepspeed_fast_file_writer,
        ),
    )
}
