# SPDX-License-Identifier: Apache-2.0
"""Storage that is full, limited or broken: a catchable error that says what to do, the old file bit
for bit as it was, no temporary file, and a next save that works. Everywhere in a child process."""

from __future__ import annotations

import errno
import os
import pathlib
import resource
import signal
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import faults_support as faults
import pytest
import torch
from faults_support import ENGINES, INTERCEPTED, Target, content, drop_from_page_cache

import fastpersist as fp

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
ADVICE = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "quota",
    errno.EIO: "kernel log",
    errno.EFBIG: "ulimit -f",
}


def has_all(error: fp.StorageError, operation: str, number: int) -> None:
    assert (error.operation, error.errno) == (operation, number), str(error)
    assert ADVICE[number] in str(error), str(error)


# --- Full for good, and room again ---


def save_to_dev_full(engine: str, folder: str) -> None:
    target = Target(folder)
    target.path = "/dev/full"
    try:
        target.save(engine)
    except fp.StorageError as error:
        has_all(error, "write", errno.ENOSPC)
        assert error.filename == "/dev/full"
        assert error.offset == 0 and "offset 0" in str(error)
    else:
        raise AssertionError("/dev/full took the file")
    target.path = f"{folder}/model.pt"
    target.succeeds(engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_device_gives_a_catchable_error(engine: str, tmp_path: Any) -> None:
    faults.run(save_to_dev_full, engine, str(tmp_path))


def save_under_a_size_limit(engine: str, folder: str, action: Any) -> None:
    signal.signal(signal.SIGXFSZ, action)  # with the default action crossing the limit kills
    target = Target(folder, 300_000)
    for atomic in (True, False):
        target.put_old()
        faults.limit(resource.RLIMIT_FSIZE, 100_000)
        error = target.fails(engine, atomic=atomic)
        has_all(error, "preallocate", errno.EFBIG)
        assert str(len(target.new)) in str(error), "the bytes that are needed"
        faults.limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
        target.succeeds(engine, atomic=atomic)


@pytest.mark.parametrize("action", [signal.SIG_IGN, signal.SIG_DFL], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_size_limit_fails_the_save_and_nothing_else(
    engine: str, action: Any, tmp_path: Any
) -> None:
    faults.run(save_under_a_size_limit, engine, str(tmp_path), action)


def save_at_the_size_limit(engine: str, folder: str) -> None:
    target = Target(folder)
    assert len(target.new) % 512 != 0, "the padding of the last block must cross the limit"
    faults.limit(resource.RLIMIT_FSIZE, len(target.new))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    target.succeeds(engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_that_just_fits_the_size_limit_is_saved(engine: str, tmp_path: Any) -> None:
    faults.run(save_at_the_size_limit, engine, str(tmp_path))


def fill_up(folder: str, leave: int) -> str:
    """Fills the file system until about leave bytes are free; returns the file that does it."""
    junk = f"{folder}/junk"
    room = os.statvfs(folder)
    with open(junk, "wb") as file:
        left = room.f_bavail * room.f_frsize - leave
        while left > 0:
            left -= file.write(b"j" * min(left, 1 << 16))
        file.flush()
        os.fsync(file.fileno())
    return junk


def save_on_a_full_file_system(engine: str, kind: str, operation: str) -> None:
    with faults.mounted(kind, 16) as folder:
        target = Target(folder, 1 << 20)
        junk = fill_up(folder, 512 << 10)
        for retries in (0, 1):
            error = target.fails(engine, retries=retries)
            has_all(error, operation, errno.ENOSPC)
            if operation == "write":
                assert error.offset is not None and 0 < error.offset < len(target.new)
                assert f"offset {error.offset}" in str(error)
            else:
                assert "bytes are needed" in str(error)
        os.unlink(junk)
        target.succeeds(engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_file_system_shows_before_a_byte_is_written(engine: str) -> None:
    faults.run(save_on_a_full_file_system, engine, "ext4", "preallocate", mounts=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_system_that_cannot_preallocate_may_be_full_later(engine: str) -> None:
    faults.run(save_on_a_full_file_system, engine, "ext2", "write", mounts=True)


def save_by_torch_on_a_full_file_system(new_format: bool) -> None:
    from fastpersist import _delegate

    if new_format:
        _delegate.reason = lambda new_format: "a test says so"  # type: ignore[assignment]
    with faults.mounted("tmpfs", 4) as folder:
        target = Target(folder, 2 << 20)
        junk = fill_up(folder, 1 << 20)
        try:
            fp.save(target.state, target.path, _use_new_zipfile_serialization=new_format)
        except fp.StorageError as error:
            assert (error.operation, error.errno) == ("write", errno.ENOSPC), str(error)
            assert error.filename == target.path and target.path in str(error)
        else:
            raise AssertionError("the save did not fail")
        target.is_untouched()
        os.unlink(junk)
        info = fp.save(target.state, target.path, _use_new_zipfile_serialization=new_format)
        assert info.engine == "torch"
        if new_format:
            assert faults.content(target.path) == faults.torch_bytes(target.state, "archive")


@pytest.mark.parametrize("new_format", [True, False], ids=["new format", "old format"])
def test_a_full_disk_is_catchable_where_torch_writes(new_format: bool) -> None:
    # torch.save itself may end the process: pytorch/pytorch#156955.
    faults.run(save_by_torch_on_a_full_file_system, new_format, mounts=True)


# --- One call fails ---


def count_of(call: str, target: Target, engine: str, **options: Any) -> int:
    with faults.failing(""):
        target.succeeds(engine, **options)
    return sum(name == call and ".fp-" in path for name, _, _, _, path in faults.calls())


def fail_each_write(engine: str, folder: str, numbers: tuple[int, ...]) -> None:
    target = Target(folder)
    writes = count_of("pwrite", target, engine)
    assert writes == -(-len(target.new) // 4096), "a write for each block"
    for number in numbers:
        for nth in range(1, writes + 1):
            target.put_old()
            with faults.failing(f"pwrite {nth} {nth} errno {number} .fp-"):
                error = target.fails(engine, retries=0)
            has_all(error, "write", number)
            failed = [offset for _, result, offset, _, _ in faults.calls() if result == -number]
            assert failed == [error.offset]
            with faults.failing(f"pwrite {nth} {nth} errno {number} .fp-"):
                target.succeeds(engine, retries=1)
    target.put_old()
    with faults.failing(f"pwrite 3 1000 errno {errno.EIO} .fp-"):
        has_all(target.fails(engine, retries=1), "write", errno.EIO)
    target.succeeds(engine)


@pytest.mark.parametrize("engine", INTERCEPTED)
def test_an_error_at_any_write_fails_the_save_or_passes_with_a_retry(
    engine: str, tmp_path: Any
) -> None:
    faults.run(fail_each_write, engine, str(tmp_path), FULL, shim=True)


def fail_one_call(engine: str, folder: str, call: str, operation: str, number: int) -> None:
    target = Target(folder)
    rule = f"{call} 1 1 errno {number} .fp-"
    with faults.failing(rule):
        has_all(target.fails(engine, retries=0), operation, number)
    with faults.failing(rule):
        target.succeeds(engine, retries=1)
    first, second = (path for name, *_, path in faults.calls() if name == "fallocate")
    assert first != second, "a new attempt takes a new file"
    target.put_old()
    with faults.failing(f"{call} 1 9 errno {number} .fp-"):
        has_all(target.fails(engine, retries=1), operation, number)
    target.succeeds(engine)


@pytest.mark.parametrize("number", FULL, ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("call", "operation"),
    [
        ("fallocate", "preallocate"),
        ("ftruncate", "truncate"),
        ("fdatasync", "fdatasync"),
        ("close", "close"),
        ("renameat", "rename"),
    ],
)
def test_an_error_of_this_call_fails_the_save_or_passes_with_a_new_file(
    call: str, operation: str, number: int, tmp_path: Any
) -> None:
    faults.run(fail_one_call, "threads", str(tmp_path), call, operation, number, shim=True)


def fail_the_directory_sync(engine: str, folder: str) -> None:
    target = Target(folder)
    with faults.failing(f"fsync 1 9 errno {errno.EIO} {folder}"):
        try:
            target.save(engine)
        except fp.StorageError as error:
            has_all(error, "sync the directory", errno.EIO)
            assert "new file is in place" in str(error) and "durability is unknown" in str(error)
        else:
            raise AssertionError("the save did not fail")
    assert sum(call == "fsync" for call, *_ in faults.calls()) == 1, "a sync is not repeated"
    assert faults.content(target.path) == target.new
    assert faults.temporaries(folder) == []
    for number in (errno.EINVAL, errno.EOPNOTSUPP):
        target.put_old()
        with faults.failing(f"fsync 1 9 errno {number} {folder}"), faults.warnings_logged() as said:
            target.succeeds(engine)
        # The same sentence for both errors, so only the first is logged.
        assert len(said) == (number == errno.EINVAL), said
        assert all("cannot be synced" in message for message in said)


def test_a_failing_directory_sync_says_that_the_new_file_is_in_place(tmp_path: Any) -> None:
    faults.run(fail_the_directory_sync, "threads", str(tmp_path), shim=True)


def save_without_preallocation(engine: str, folder: str) -> None:
    target = Target(folder)
    for number in (errno.EOPNOTSUPP, errno.ENOSYS):
        target.put_old()
        with faults.failing(f"fallocate 1 9 errno {number} .fp-"):
            target.succeeds(engine)
        called = [call for call, *_ in faults.calls()]
        assert called.index("fallocate") < called.index("ftruncate") < called.index("pwrite")


@pytest.mark.parametrize("engine", INTERCEPTED)
def test_a_file_system_without_preallocation_is_served(engine: str, tmp_path: Any) -> None:
    faults.run(save_without_preallocation, engine, str(tmp_path), shim=True)


def interrupt_every_call(engine: str, folder: str, times: int) -> None:
    target = Target(folder)
    calls = "openat fallocate direct pwrite ftruncate fdatasync renameat unlinkat".split()
    rules = [f"{call} 1 {times} errno {errno.EINTR} .fp-" for call in calls]
    rules.append(f"fsync 1 {times} errno {errno.EINTR} {folder}")
    with faults.failing(";".join(rules)):
        target.succeeds(engine)
    interrupted = {call for call, result, *_ in faults.calls() if result == -errno.EINTR}
    expected = {*calls, "fsync"} - {"unlinkat"}
    assert interrupted == expected - ({"direct"} if engine == "buffered" else set())


@pytest.mark.parametrize("times", [1, 20])
@pytest.mark.parametrize("engine", INTERCEPTED)
def test_interrupted_calls_are_repeated(engine: str, times: int, tmp_path: Any) -> None:
    faults.run(interrupt_every_call, engine, str(tmp_path), times, shim=True)


# --- Reads fail ---


def readers(path: str, engine: str) -> dict[str, Callable[[], Any]]:
    """Every way to read the tensors of the file, in blocks so small that there are many."""
    options = fp.Options(engine=engine, block_bytes=4096, queue_depth=4)
    mine = {"big": torch.zeros(300_000), "strided": torch.zeros(300_000)[::3]}
    return {
        "load": lambda: fp.load(path, options=options),
        "load_into": lambda: fp.load_into(mine, path, options=options),
        "open": lambda: fp.open(path).tensor("big", options=options),
    }


def file_to_read(folder: str) -> tuple[str, int]:
    """A file, and an offset in the middle of its first tensor."""
    path = f"{folder}/model.pt"
    torch.save({"big": torch.arange(300_000.0), "strided": torch.ones(100_000)}, path)
    at = content(path).index(struct.pack("<2f", 150_000, 150_001))
    drop_from_page_cache(path)
    return path, at


def fail_one_read(engine: str, folder: str) -> None:
    path, at = file_to_read(folder)
    for name, read in readers(path, engine).items():
        with faults.failing(f"pread-at {at} {at} errno {errno.EIO} model.pt"):
            try:
                read()
            except fp.StorageError as error:
                assert (error.operation, error.errno) == ("read", errno.EIO), str(error)
                assert error.filename == path and path in str(error)
                assert error.offset is not None and at - 4096 <= error.offset <= at, error
                assert error.partially_restored == (name == "load_into")
            else:
                raise AssertionError(f"{name} did not fail")
        assert any(call[:2] == ("pread", -errno.EIO) for call in faults.calls())
        read()


@pytest.mark.parametrize("engine", INTERCEPTED)
def test_an_error_in_the_middle_of_a_read_names_the_file_and_the_offset(
    engine: str, tmp_path: Any
) -> None:
    faults.run(fail_one_read, engine, str(tmp_path), shim=True)


def read_in_parts(engine: str, folder: str, action: str) -> None:
    path, _ = file_to_read(folder)
    with faults.failing(f"pread 1 1000000 {action} model.pt"):
        for name, read in readers(path, engine).items():
            got = read()
            if name != "load_into":
                big = got["big"] if name == "load" else got
                assert torch.equal(big, torch.arange(300_000.0))
    assert any(result < length for _, result, _, length, _ in faults.calls())


@pytest.mark.parametrize("action", ["half 0", "less 0", "random 3", f"once {errno.EINTR}"])
@pytest.mark.parametrize("engine", INTERCEPTED)
def test_reads_that_fall_short_or_are_interrupted_go_on(
    engine: str, action: str, tmp_path: Any
) -> None:
    faults.run(read_in_parts, engine, str(tmp_path), action, shim=True)


def shrink_while_reading(engine: str, folder: str) -> None:
    path, at = file_to_read(folder)
    whole = content(path)
    for name, read in readers(path, engine).items():
        pathlib.Path(path).write_bytes(whole)
        hold = f"{folder}/hold"
        pathlib.Path(hold).touch()
        os.environ["FASTPERSIST_HOLD"] = hold
        shrinker = threading.Thread(target=cut_when_reached, args=(path, at, hold))
        shrinker.start()
        with faults.failing(f"pread-at {at} {at} hold 0 model.pt"):
            try:
                read()
            except fp.CorruptCheckpointError as error:
                assert path in str(error) and "longer when it was opened" in str(error), error
                # Another thread may meet the end first, farther behind.
                assert error.offset is not None, error
                assert at // 2 - 4096 <= error.offset < len(whole), error
                assert error.partially_restored == (name == "load_into")
            else:
                raise AssertionError(f"{name} did not fail")
        shrinker.join()


def cut_when_reached(path: str, at: int, hold: str) -> None:
    """Cuts the file before the read that is held, and lets it go on."""
    while not os.path.exists(f"{hold}.reached"):
        time.sleep(0.001)
    os.truncate(path, at // 2)
    os.unlink(f"{hold}.reached")
    os.unlink(hold)


@pytest.mark.parametrize("engine", INTERCEPTED)
def test_a_file_that_shrinks_while_it_is_read_is_noticed(engine: str, tmp_path: Any) -> None:
    faults.run(shrink_while_reading, engine, str(tmp_path), shim=True)


# --- A device that is smaller than it says ---


def save_on_a_thin_device(engine: str) -> None:
    """A file system on a device whose own storage fills up: free space is not to be trusted."""
    with faults.mounted("tmpfs", 12) as pool:
        image = f"{pool}/image"
        with open(image, "wb") as file:
            file.truncate(64 << 20)
        device = faults.command("losetup", "--find", "--show", image)
        folder = f"{pool}/mount"
        os.mkdir(folder)
        try:
            faults.command("mkfs.ext2", "-q", "-F", "-m", "0", "-b", "4096", device)
            faults.command("mount", "-t", "ext2", device, folder)
        finally:
            faults.detach(device)
        try:
            target = Target(folder, 1 << 20)
            os.sync()
            junk = fill_up(pool, 256 << 10)
            error = target.fails(engine, retries=1)
            assert error.operation in ("write", "fdatasync"), str(error)
            assert error.errno in (errno.EIO, errno.ENOSPC), str(error)
            os.unlink(junk)
            target.succeeds(engine)
        finally:
            faults.command("umount", "--lazy", folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_thin_device_that_is_full_fails_the_save(engine: str) -> None:
    faults.run(save_on_a_thin_device, engine, mounts=True)


def test_the_images_of_these_tests_leave_nothing_behind() -> None:
    mounts = pathlib.Path("/proc/self/mounts").read_text()
    assert "fastpersist-mount-" not in mounts
