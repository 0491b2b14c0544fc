# SPDX-License-Identifier: Apache-2.0
"""Scarce and counted resources: limits slow a save down but do not fail it, and many saves, failed
ones among them, leave descriptors, threads and memory as they were."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import resource
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import faults_support as faults
import pytest
import torch
from faults_support import ENGINES, Target

import fastpersist as fp

MIB = 1 << 20


@pytest.fixture
def open_folder() -> Iterator[str]:
    """A folder in which every user may save."""
    with tempfile.TemporaryDirectory(prefix="fastpersist-open-") as folder:
        os.chmod(folder, 0o777)
        yield folder


# --- Limits ---


def save_with_little_locked_memory(folder: str, name: str) -> tuple[fp.SaveInfo, list[str]]:
    faults.limit(resource.RLIMIT_MEMLOCK, 64 << 10)
    target = Target(folder, 20 * MIB, name)
    with faults.warnings_logged() as said:
        for _ in range(3):
            target.put_old()
            info = target.succeeds("auto", block_bytes=1 * MIB, retries=0)
    return info, said


def is_unlocked_and_says_so(info: fp.SaveInfo, said: list[str]) -> None:
    assert info.engine == "uring" and info.direct, info.engine_reason
    for word in ("RLIMIT_MEMLOCK", "65536"):
        assert word in info.engine_reason, info.engine_reason
    assert len(said) == 1 and "RLIMIT_MEMLOCK" in said[0], said


def test_a_small_lock_limit_is_said_once_and_costs_speed_only(open_folder: str) -> None:
    found = faults.run(save_with_little_locked_memory, open_folder, "model.pt", user=True)
    is_unlocked_and_says_so(*found)


def test_four_processes_of_one_user_save_under_a_small_lock_limit(open_folder: str) -> None:
    children = []
    for i in range(4):
        folder = os.path.join(open_folder, str(i))
        os.mkdir(folder)
        os.chmod(folder, 0o777)
        arguments = (save_with_little_locked_memory, folder, f"rank{i}.pt")
        children.append(faults.start(*arguments, user=True))
    for child in children:
        is_unlocked_and_says_so(*child.result())


def save_without_huge_pages(folder: str) -> fp.SaveInfo:
    faults.without_huge_pages()
    return Target(folder, 20 * MIB).succeeds("auto", block_bytes=1 * MIB)


def test_a_save_without_huge_pages_works(tmp_path: Any) -> None:
    assert faults.run(save_without_huge_pages, str(tmp_path)).direct


def save_with_few_descriptors(folder: str, free: int) -> str:
    """Returns the engine, or the operation that failed for want of a descriptor."""
    target = Target(folder)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    next_free = os.open("/dev/null", os.O_RDONLY)
    os.close(next_free)
    faults.limit(resource.RLIMIT_NOFILE, next_free + free)
    try:
        outcome = target.save("auto").engine
    except fp.StorageError as error:
        assert error.errno == errno.EMFILE and "ulimit -n" in str(error), str(error)
        outcome = error.operation
    faults.limit(resource.RLIMIT_NOFILE, before)
    assert faults.content(target.path) == (target.new if outcome in ENGINES else target.old)
    assert faults.temporaries(folder) == []
    target.put_old()
    target.succeeds("auto")
    return outcome


@pytest.mark.parametrize(
    ("free", "outcome"),
    [
        (0, "open directory"),
        (1, "create a temporary file"),
        (2, "libaio"),
        (3, "uring"),
        (4, "uring"),
    ],
)
def test_with_descriptors_for_the_file_and_its_directory_a_save_works(
    free: int, outcome: str, tmp_path: Any
) -> None:
    assert faults.run(save_with_few_descriptors, str(tmp_path), free) == outcome


def save_without_new_threads(folder: str) -> tuple[fp.SaveInfo, list[str]]:
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    target = Target(folder)
    with faults.warnings_logged() as said:
        info = target.succeeds("threads", retries=0)
    return info, said


def test_where_no_thread_can_be_started_the_save_goes_on_without(open_folder: str) -> None:
    info, said = faults.run(save_without_new_threads, open_folder, user=True)
    assert info.engine == "buffered"
    assert "threads" in info.engine_reason and "no thread can be started" in info.engine_reason
    assert len(said) == 1, said


def virtual_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def save_with_little_address_space(folder: str, engine: str) -> list[str]:
    outcomes = []
    target = Target(folder, 20 * MIB)
    for room in (0, 1, 2, 4, 8, 12, 24, 48):
        target.put_old()
        faults.limit(resource.RLIMIT_AS, virtual_bytes() + room * MIB)
        try:
            target.save(engine, block_bytes=2 * MIB)
            outcomes.append("saved")
        except fp.StorageError as error:
            assert error.errno == errno.ENOMEM, str(error)
            assert "free memory" in str(error)
            outcomes.append("no memory")
        except MemoryError:
            outcomes.append("no memory")
        faults.limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
        saved = outcomes[-1] == "saved"
        assert faults.content(target.path) == (target.new if saved else target.old)
        assert faults.temporaries(folder) == []
    target.succeeds(engine)
    return outcomes


@pytest.mark.parametrize("engine", ENGINES)
def test_little_address_space_gives_a_smaller_pool_or_an_error(engine: str, tmp_path: Any) -> None:
    outcomes = faults.run(save_with_little_address_space, str(tmp_path), engine)
    assert outcomes[-1] == "saved"
    assert outcomes[4:] == ["saved"] * 4, outcomes  # half the pool, or a quarter, was to be had


@pytest.fixture
def memory_group() -> Iterator[Callable[[int], str]]:
    """Makes a memory control group with a limit in bytes; returns the file of its processes."""
    v1 = pathlib.Path("/sys/fs/cgroup/memory")
    parent = v1 if v1.is_dir() else pathlib.Path("/sys/fs/cgroup")
    group = parent / f"fastpersist-{os.getpid()}"

    def make(limit_bytes: int) -> str:
        try:
            group.mkdir()
            limit_file = group / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")
            assert limit_file.exists(), "there is no memory controller"
            limit_file.write_text(str(limit_bytes))
        except (OSError, AssertionError) as error:
            pytest.skip(f"skipped: no memory control group: {error}")
        return str(group / "cgroup.procs")

    yield make
    if group.is_dir():
        group.rmdir()


def save_in_a_control_group(processes: str, path: str, state_mib: int, engine: str) -> None:
    pathlib.Path(processes).write_text(
        str(os.getpid())
    )  # charged for what is allocated from now on
    state = {"x": torch.full((state_mib * MIB // 4,), 3.0)}
    fp.save(state, path, options=fp.Options(engine=engine))


@pytest.mark.parametrize("room", [160, 24])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_memory_control_group_kills_no_save_of_a_state_that_fits(
    engine: str, room: int, memory_group: Callable[[int], str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.pt"
        processes = memory_group((96 + room) * MIB)
        faults.run(save_in_a_control_group, processes, path, 96, engine)
        assert torch.equal(torch.load(path)["x"], torch.full((96 * MIB // 4,), 3.0))


# --- Leaks ---


def in_use(folder: str) -> dict[str, int]:
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    threads = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    # The kernel's own workers of a ring go a little after it.
    threads = [name for name in threads if not name.startswith("iou-")]
    return {
        "descriptors": len(targets),
        "of files that are gone": sum(name.startswith(folder) for name in targets),
        "threads": len(threads),
    }


def resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


FAILURES = [
    f"pwrite 2 99 errno {errno.EIO} .fp-",
    f"fdatasync 1 9 errno {errno.EIO} .fp-",
    f"renameat 1 9 errno {errno.ENOSPC} .fp-",
    f"fallocate 1 9 errno {errno.ENOSPC} .fp-",
    f"close 1 9 errno {errno.EDQUOT} .fp-",
    f"openat 1 9 errno {errno.EACCES} .fp-",
]


def save_fifty_times(folder: str, engine: str) -> None:
    target = Target(folder, 1 * MIB)
    options: dict[str, Any] = {"block_bytes": 64 << 10}

    def save_both_ways(i: int) -> None:
        target.put_old()
        with faults.failing(FAILURES[i % len(FAILURES)]):
            with contextlib.suppress(fp.StorageError):
                target.save(engine, **options)
        limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        faults.limit(resource.RLIMIT_FSIZE, 100_000)  # fails with every engine
        target.fails(engine, **options) if i % 2 else None
        faults.limit(resource.RLIMIT_FSIZE, limited)
        target.succeeds(engine, **options)
        os.unlink(target.path)

    for i in range(6):  # allocators and caches settle
        save_both_ways(i)
    before, memory = in_use(folder), resident_bytes()
    for i in range(25):
        save_both_ways(i)
    after = in_use(folder)
    assert after == before, f"{before} became {after}"
    assert before["of files that are gone"] == 0
    grown = resident_bytes() - memory
    assert grown < 2 * MIB, f"{grown} bytes more"


@pytest.mark.parametrize("engine", ENGINES)
def test_fifty_saves_half_of_them_failing_leave_nothing_behind(engine: str, tmp_path: Any) -> None:
    # deepspeedai/DeepSpeed#8003: a descriptor a save, which keeps deleted checkpoints on the disk.
    faults.run(save_fifty_times, str(tmp_path), engine, shim=True)


def peak_growth(folder: str, engine: str) -> int:
    """Bytes by which the peak of resident memory rises in a save of 500 MB."""
    state = {f"layer{i}": torch.full((25 * MIB,), i, dtype=torch.float32) for i in range(5)}
    fp.save({"warm": torch.ones(3)}, f"{folder}/warm.pt")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts from now
    before = resident_bytes()
    info = fp.save(state, f"{folder}/model.pt", options=fp.Options(engine=engine))
    assert info.bytes > 500 * MIB
    status = pathlib.Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024 - before


@pytest.mark.parametrize("engine", ["auto", "threads", "buffered"])
def test_the_peak_of_memory_grows_by_little_more_than_the_staging_pool(engine: str) -> None:
    with tempfile.TemporaryDirectory(dir=faults.image_folder()) as folder:
        grown = faults.run(peak_growth, folder, engine)
    assert grown <= 64 * MIB + 64_000_000, grown
