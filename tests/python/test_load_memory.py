# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""What can be done with loaded tensors: they are the caller's own, and their memory goes when they
go. And loading itself: from many threads, around forks, and interrupted."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from load_support import difference, saved

import fastpersist as fp

MIB = 1 << 20


def state() -> dict[str, Any]:
    big, small = torch.arange(100_000.0), torch.arange(10.0)
    return {
        "big": big,
        "part": big[5:9],
        "small": small,
        "tiny": torch.tensor([1], dtype=torch.int8),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    fp.save(state(), path)
    return path


def from_path(path: Path) -> Any:
    return fp.load(path)


def from_object(path: Path) -> Any:
    return fp.load(io.BytesIO(path.read_bytes()))


BOTH = pytest.mark.parametrize("load", [from_path, from_object])
Load = Callable[[Path], Any]


@BOTH
@pytest.mark.parametrize("fate", ["deleted", "overwritten", "cut"])
def test_the_tensors_do_not_need_the_file(load: Load, fate: str, path: Path) -> None:
    loaded = load(path)
    if fate == "deleted":
        path.unlink()
    elif fate == "cut":
        os.truncate(path, 0)
    else:
        with open(path, "r+b") as file:
            file.write(b"\xff" * path.stat().st_size)
            os.fsync(file.fileno())
    assert zoo.difference(state(), loaded) is None


@BOTH
def test_the_tensors_can_be_written_and_share_what_they_shared(load: Load, path: Path) -> None:
    before, loaded = path.read_bytes(), load(path)
    loaded["big"].add_(1)
    loaded["small"].zero_()
    assert loaded["part"].tolist() == [6, 7, 8, 9]
    assert loaded["tiny"].tolist() == [1]
    loaded["small"].numpy()[3] = 8
    assert loaded["small"][3] == 8
    assert path.read_bytes() == before
    assert zoo.difference(state(), load(path)) is None


@BOTH
@pytest.mark.parametrize("kept", ["big", "part", "small", "tiny"])
def test_a_tensor_outlives_the_others(load: Load, kept: str, path: Path) -> None:
    tensor = load(path)[kept]
    gc.collect()
    noise = [torch.full((50_000,), 3.0) for _ in range(20)]
    assert torch.equal(tensor, state()[kept])
    assert len(noise) == 20


@BOTH
def test_saving_again_gives_the_same_file(load: Load, path: Path) -> None:
    before, loaded = path.read_bytes(), load(path)
    fp.save(loaded, path)
    assert path.read_bytes() == before


@BOTH
def test_copies_pickles_and_shared_memory(load: Load, path: Path) -> None:
    loaded = load(path)
    assert zoo.difference(loaded, copy.deepcopy(loaded)) is None
    assert zoo.difference(state(), torch.load(io.BytesIO(saved(loaded)))) is None
    again = pickle.loads(pickle.dumps(loaded["small"]))
    assert torch.equal(again, loaded["small"])
    for tensor in loaded.values():
        tensor.share_memory_()
    assert loaded["big"].is_shared()
    loaded["big"][5] = -1
    assert loaded["part"][0] == -1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="skipped: there is no CUDA device")
def test_tensors_can_be_pinned_and_moved(path: Path) -> None:
    loaded = fp.load(path)
    assert loaded["big"].pin_memory().is_pinned()
    assert torch.equal(fp.load(path, map_location="cuda")["big"].cpu(), state()["big"])


@BOTH
def test_a_storage_cannot_be_resized(load: Load, path: Path) -> None:
    loaded = load(path)
    with pytest.raises(RuntimeError, match="not resizable"):
        loaded["small"].resize_(1_000)
    mapped = torch.load(path, mmap=True)
    with pytest.raises(RuntimeError, match="not resizable"):
        mapped["small"].resize_(1_000)
    assert loaded["small"].resize_(2, 5).shape == (2, 5)  # the same number of elements


@BOTH
def test_tensors_of_torch_are_aligned_as_its_own_memory(load: Load, path: Path) -> None:
    for name, tensor in load(path).items():
        if name != "part":
            assert tensor.data_ptr() % 64 == 0, name


def resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Most bytes that were ever resident. (ru_maxrss is inherited from whoever started us.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("this kernel does not tell VmHWM")


LOAD_AND_DROP = """
import gc, sys, torch, fastpersist as fp
from test_load_memory import MIB, resident
fp.load("big.pt")
before = resident()
loaded = fp.load("big.pt")
full = resident()
kept = loaded["small"]
del loaded
gc.collect()
after = resident()
assert kept.sum() == 45
print((full - before) // MIB, (after - before) // MIB)
"""


def test_memory_goes_back_when_all_but_one_small_tensor_are_dropped(
    tmp_path: Path, run_python: Any
) -> None:
    layers = {f"layer{i}": torch.ones(2 * MIB) for i in range(6)}
    fp.save({"small": torch.arange(10.0), **layers}, tmp_path / "big.pt")
    full, after = map(int, run_python(LOAD_AND_DROP).stdout.split())
    assert full >= 44
    assert after < 16


REPEAT = """
import torch, fastpersist as fp
from test_load_memory import MIB, resident
for _ in range(5): fp.load("big.pt")
before = resident()
for _ in range(40): fp.load("big.pt")
print((resident() - before) // MIB)
import os
print(len(os.listdir("/proc/self/fd")))
"""


def test_loading_again_and_again_takes_no_more_memory(tmp_path: Path, run_python: Any) -> None:
    fp.save({"w": torch.ones(2 * MIB), "v": torch.ones(100)}, tmp_path / "big.pt")
    grown, descriptors = map(int, run_python(REPEAT).stdout.split())
    assert grown < 24
    assert descriptors < 24


# --- Threads, forks, signals ---


def test_threads_load_at_the_same_time(path: Path) -> None:
    problems: list[str | None] = []

    def work() -> None:
        for _ in range(6):
            problems.append(zoo.difference(state(), fp.load(path)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [None] * 48


@BOTH
def test_a_forked_child_sees_the_values_and_writes_its_own(load: Load, path: Path) -> None:
    loaded = load(path)
    child = os.fork()
    if child == 0:
        # Single elements: torch's own threads do not survive a fork.
        good = loaded["big"][99_999].item() == 99_999 and loaded["small"][9].item() == 9
        loaded["big"][7] = -5
        os._exit(0 if good and loaded["part"][2].item() == -5 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert zoo.difference(state(), loaded) is None


def test_a_child_that_was_forked_after_use_is_told(path: Path) -> None:
    fp.load(path)
    ends = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            fp.load(path)
        except BaseException as error:
            os.write(ends[1], f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(ends[1])
    with os.fdopen(ends[0], "rb") as told:
        text = told.read().decode()
    os.waitpid(child, 0)
    assert text.startswith("ForkedError: ")
    assert "fork" in text


INTERRUPTED = """
import os, signal, threading, fastpersist as fp
fp.load("small.pt")
main, count, stop = threading.main_thread().ident, 0, threading.Event()
def strike():
    while not stop.wait(0.05): signal.pthread_kill(main, signal.SIGINT)
thread = threading.Thread(target=strike)
signal.signal(signal.SIGINT, lambda *_: None)
thread.start()
try:
    for _ in range(5):
        assert fp.load("model.pt")["w"].sum() == 8 << 20  # no handler raises: nothing is lost
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True: fp.load("model.pt")
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop.set()
thread.join()
assert fp.load("model.pt")["w"].sum() == 8 << 20
left = [name for name in map(os.readlink, (f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{n}"))) if name.endswith(".pt")]
assert left == [], left
print("interrupted")
"""


def test_an_interrupted_load_ends_cleanly(tmp_path: Path, run_python: Any) -> None:
    fp.save({"w": torch.ones(8 << 20)}, tmp_path / "model.pt")
    fp.save({"w": torch.ones(8)}, tmp_path / "small.pt")
    assert run_python(INTERRUPTED).stdout == "interrupted\n"


def test_an_interrupted_process_ends_by_the_signal(tmp_path: Path, run_python: Any) -> None:
    fp.save({"w": torch.ones(1 << 20)}, tmp_path / "model.pt")
    program = (
        "import signal, threading, os, fastpersist as fp\n"
        "fp.load('model.pt')\n"
        "threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "while True: fp.load('model.pt')\n"
    )
    done = run_python(program, check=False)
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode in (-signal.SIGINT, 130, 1)


# --- Engines ---

SIZES = [0, 1, 4095, 4096, 4097, 65535, 65536, 65537]
LARGE = [4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 3]


@pytest.mark.parametrize("engine", ["uring", "libaio", "threads", "buffered", "not direct"])
@pytest.mark.parametrize("sizes", [SIZES, LARGE], ids=["small", "large"])
def test_every_engine_gives_the_same(engine: str, sizes: list[int], tmp_path: Path) -> None:
    options = fp.Options(direct=False) if engine == "not direct" else fp.Options(engine=engine)
    generator = torch.Generator().manual_seed(1)
    for size in sizes:
        tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        path = tmp_path / f"{size}.pt"
        torch.save({"w": tensor, "after": torch.ones(1)}, path)
        assert difference(torch.load(path), fp.load(path, options=options)) is None
        odd = {"one": torch.ones(1, dtype=torch.uint8), "w": tensor}
        fp.save(odd, tmp_path / "odd.safetensors")
        again = fp.load(tmp_path / "odd.safetensors", options=options)
        assert difference(odd, {name: again[name] for name in odd}) is None


BLOCKS = [
    {"block_bytes": 4096, "queue_depth": 1, "staging_bytes": 4096},
    {"block_bytes": 4096, "queue_depth": 64},
    {"block_bytes": 1 << 20, "staging_bytes": 1 << 20},
]


@pytest.mark.parametrize("options", BLOCKS, ids=str)
def test_options_do_not_change_what_is_read(options: dict[str, int], tmp_path: Path) -> None:
    state = {f"{size}": torch.arange(size, dtype=torch.uint8) for size in [*SIZES, 300_000]}
    path = tmp_path / "model.pt"
    torch.save(state, path)
    assert difference(torch.load(path), fp.load(path, options=fp.Options(**options))) is None
