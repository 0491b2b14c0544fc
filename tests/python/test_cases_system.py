# SPDX-License-Identifier: Apache-2.0
"""What people who save large files have met between a write call and the disk.

Here: writes that do less than they were asked (pytorch/pytorch#717), a last block that goes missing
(deepspeedai/DeepSpeed#1070), sectors of another size (kvcache-ai/AgentENV#274), files that take no
direct I/O (rapidsai/kvikio#126), and syncs in the wrong order (NVIDIA/nvidia-resiliency-ext#359).

Elsewhere: full disks in test_storage_faults, signals in test_signals, sandboxes in test_sandbox,
limits and leaks in test_resources, forks in test_concurrency, kills in test_kill, modes in
test_permissions.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import tempfile
import threading
from typing import Any

import faults_support as faults
import pytest
import torch
from faults_support import ENGINES, INTERCEPTED, Target

import fastpersist as fp

BLOCK, DEPTH = 8192, 4


# --- Writes that do less than they were asked ---


def save_with_short_writes(
    engine: str, folder: str, rule: str, direct: bool, queue_depth: int = DEPTH
) -> None:
    target = Target(folder)
    with faults.failing(f"pwrite {rule} .fp-"):
        target.succeeds(engine, direct=direct, retries=0, queue_depth=queue_depth)
    results = [result for call, result, *_ in faults.calls() if call == "pwrite"]
    asked = [length for call, _, _, length, _ in faults.calls() if call == "pwrite"]
    short = sum(got < wanted for got, wanted in zip(results, asked, strict=True))
    assert short > 0, "no write fell short"


RULES = ["short 1", "short 511", "short 512", "short 4095", "half 0", "less 0"]
WHICH = {"the first": "1 1", "the seventh": "7 7", "the last": "10 10", "all": "1 1000000"}


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("engine", "direct"), [("threads", True), ("threads", False), ("buffered", False)]
)
def test_short_writes_are_continued_to_the_last_byte(
    engine: str, direct: bool, rule: str, which: str, tmp_path: Any
) -> None:
    # One at a time to the end: of several in flight, the tenth may be the tail, which is too short
    # to fall short by that much.
    depth = 1 if which == "the last" else DEPTH
    arguments = (engine, str(tmp_path), f"{WHICH[which]} {rule}", direct, depth)
    faults.run(save_with_short_writes, *arguments, shim=True)


@pytest.mark.parametrize("engine", INTERCEPTED)
def test_writes_that_fall_short_at_random_are_continued(engine: str, tmp_path: Any) -> None:
    seed = random.SystemRandom().randrange(1 << 20)
    print("seed", seed)
    rule = f"1 1000000 random {seed}"
    faults.run(save_with_short_writes, engine, str(tmp_path), rule, True, shim=True)


def save_with_writes_of_nothing(engine: str, folder: str) -> None:
    target = Target(folder)
    for nth in (1, 5):
        with faults.failing(f"pwrite {nth} 1000 short 0 .fp-"):
            # One write at a time: of several that fail, any may be the first to be heard of.
            error = target.fails(engine, retries=0, queue_depth=1)
        assert (error.operation, error.errno) == ("write", errno.EIO)
        assert "0 bytes" in str(error) and error.offset == 4096 * (nth - 1)
        with faults.failing(f"pwrite {nth} {nth} short 0 .fp-"):
            target.succeeds(engine, retries=1)
        target.put_old()


@pytest.mark.parametrize("engine", INTERCEPTED)
def test_a_write_of_nothing_is_an_error_and_no_endless_loop(engine: str, tmp_path: Any) -> None:
    faults.run(save_with_writes_of_nothing, engine, str(tmp_path), shim=True, timeout=30)


# --- Files without direct I/O ---


def save_without_direct(folder: str, *rules: str) -> tuple[fp.SaveInfo, list[str]]:
    """One save for each rule. One write at a time: which one is refused is no matter of chance."""
    target = Target(folder)
    with faults.warnings_logged() as said:
        for rule in rules:
            target.put_old()
            with faults.failing(f"{rule} errno {errno.EINVAL} .fp-"):
                info = target.succeeds("threads", queue_depth=1, retries=0)
            called = [call for call, *_ in faults.calls()]
            assert called.count("fdatasync") == 1, "still on stable storage"
            writes = [i for i, call in enumerate(called) if call == "pwrite"]
            assert called.index("fdatasync") > max(writes)
    return info, said


@pytest.mark.parametrize("rule", ["direct 1 9", "pwrite 1 1", "pwrite 7 7", "pwrite 10 10"])
def test_a_file_that_refuses_direct_writes_is_written_through_the_page_cache(
    rule: str, tmp_path: Any
) -> None:
    info, said = faults.run(save_without_direct, str(tmp_path), rule, rule, shim=True)
    assert (info.engine, info.direct) == ("buffered", False)
    assert "direct" in info.engine_reason
    assert len(said) == 1 and "direct" in said[0], said


def test_refused_direct_writes_are_said_once_wherever_they_were(tmp_path: Any) -> None:
    rules = ["pwrite 1 1", "pwrite 3 3", "pwrite 7 7"]
    _, said = faults.run(save_without_direct, str(tmp_path), *rules, shim=True)
    assert len(said) == 1, said


def test_a_file_that_refuses_every_write_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(fp.StorageError) as caught:
        faults.run(save_without_direct, str(tmp_path), "pwrite 7 1000", shim=True)
    assert (caught.value.errno, caught.value.operation) == (errno.EINVAL, "write")


# --- The last block, and sectors of another size ---


def sizes_around_boundaries() -> list[int]:
    sizes = {0, 1}
    for unit, times in itertools.product((512, 4096, BLOCK, BLOCK * DEPTH), (1, 2, 3)):
        sizes |= {unit * times - 1, unit * times, unit * times + 1}
    return sorted(sizes)


def save_every_size(kind: str, mib: int, sector: int, engine: str) -> None:
    options = fp.Options(engine=engine, block_bytes=BLOCK, queue_depth=DEPTH, sync=False)
    with faults.mounted(kind, mib, sector) as folder:
        for size in sizes_around_boundaries():
            state = {"x": torch.arange(size).to(torch.uint8)}
            path = f"{folder}/model.pt"
            info = fp.save(state, path, options=options)
            assert faults.content(path) == faults.torch_bytes(state, path), size
            assert info.engine == engine and info.direct == (engine != "buffered")
            save_a_file_of_size(f"{folder}/model.safetensors", size, options)


def save_a_file_of_size(path: str, size: int, options: fp.Options) -> None:
    """A torch file grows in steps; a safetensors file may have any size above its header's."""
    import safetensors.torch

    header = len(safetensors.torch.save({"x": torch.zeros(100_000, dtype=torch.uint8)})) - 100_000
    state = {"x": torch.arange(max(0, size - header)).to(torch.uint8)}
    while len(expected := safetensors.torch.save(state)) > max(size, header):
        state["x"] = state["x"][1:].clone()
    fp.save(state, path, options=options)
    assert faults.content(path) == expected, size


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sector", [512, 4096])
@pytest.mark.parametrize(("kind", "mib"), [("ext4", 32), ("xfs", 320)])
def test_every_size_around_a_boundary_arrives_whole(
    kind: str, mib: int, sector: int, engine: str
) -> None:
    faults.run(save_every_size, kind, mib, sector, engine, mounts=True)


def random_saves(folder: str, seed: int, threads: int) -> None:
    def save(number: int) -> None:
        chance = random.Random(seed * 10 + number)
        for i in range(12):
            size = int(2 ** chance.uniform(0, 21))
            staging = 4096 * chance.randint(1, 64)
            options = fp.Options(
                engine=chance.choice(ENGINES),
                block_bytes=4096 * chance.randint(1, 16),
                queue_depth=chance.randint(1, 9),
                staging_bytes=staging,
                direct=chance.random() < 0.8,
                atomic=chance.random() < 0.8,
            )
            path = f"{folder}/{number}.pt"
            state = faults.state_of(size, i)
            fp.save(state, path, options=options)
            if faults.content(path) != faults.torch_bytes(state, path):
                wrong.append(f"{size} bytes with {options}")

    wrong: list[str] = []
    workers = [threading.Thread(target=save, args=[number]) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong, wrong
    assert len(os.listdir(folder)) == threads


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_random_sizes_and_options_give_the_bytes_of_torch_save(threads: int, tmp_path: Any) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    faults.run(random_saves, str(tmp_path), seed, threads)


def save_in_blocks_of(folder: str, block: int, staging: int) -> None:
    target = Target(folder)
    target.succeeds("auto", block_bytes=block, staging_bytes=staging)


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("pages", [1, 2, 3, 5, 6, 7])
def test_a_block_may_be_any_number_of_pages(pages: int, blocks: int, tmp_path: Any) -> None:
    block = pages * 4096
    faults.run(save_in_blocks_of, str(tmp_path), block, block * blocks, timeout=15)


def writes_of_a_save(kind: str, mib: int, sector: int) -> list[tuple[int, int]]:
    with faults.mounted(kind, mib, sector) as folder:
        target = Target(folder)
        with faults.failing(""):
            info = target.succeeds("threads")
        assert info.direct
    calls = [call for call in faults.calls() if call[0] == "pwrite" and ".fp-" in call[4]]
    return [(offset, length) for _, _, offset, length, _ in calls]


@pytest.mark.parametrize(("kind", "mib"), [("ext4", 32), ("xfs", 320), ("btrfs", 128)])
@pytest.mark.parametrize("sector", [512, 4096])
def test_direct_writes_are_whole_sectors(kind: str, mib: int, sector: int) -> None:
    writes = faults.run(writes_of_a_save, kind, mib, sector, mounts=True, shim=True)
    assert len(writes) > 5
    assert all(offset % sector == length % sector == 0 for offset, length in writes), writes


# --- Order ---


def order_of_calls(engine: str, sync: bool) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        target = Target(folder)
        with faults.failing(""):
            target.succeeds(engine, sync=sync)
        found = []
        for call, result, _, _, path in faults.calls():
            if not path.startswith(folder) or call in ("openat", "close", "direct"):
                continue
            assert result >= 0, (call, result, path)
            name = path[len(folder) + 1 :]
            what = "temporary" if name.startswith(".fp-") else name or "folder"
            found.append(f"{call} {what}")
    return [step for step, _ in itertools.groupby(found)]


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("engine", INTERCEPTED)
def test_data_is_synced_before_the_rename_and_the_folder_after_it(engine: str, sync: bool) -> None:
    steps = faults.run(order_of_calls, engine, sync, shim=True)
    expected = [
        "fallocate temporary",
        "pwrite temporary",
        "ftruncate temporary",
        "fdatasync temporary",
        "renameat temporary",
        "fsync folder",
    ]
    # Above all: nothing removes the old file, and nothing is written after the sync.
    assert steps == [step for step in expected if sync or "sync" not in step]
