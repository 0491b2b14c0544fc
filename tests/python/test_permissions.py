# SPDX-License-Identifier: Apache-2.0
"""Mode and owner of the file that is there after a save, and folders and files that may not be
written (safetensors/safetensors#782)."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import faults_support as faults
import pytest
import torch
from faults_support import ENGINES, NOBODY, Target

import fastpersist as fp

STATE = faults.state_of(20_000, 7)
needs_root = pytest.mark.skipif(not faults.is_root(), reason="skipped: only root may do this")


@pytest.fixture
def open_folder() -> Iterator[str]:
    """A folder that belongs to an unprivileged user."""
    with tempfile.TemporaryDirectory(prefix="fastpersist-open-") as folder:
        with contextlib.suppress(OSError):
            os.chown(folder, NOBODY, NOBODY)
        yield folder


def mode_of(path: Any) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def saved(path: Any, **options: Any) -> fp.SaveInfo:
    info = fp.save(STATE, path, options=fp.Options(**options))
    assert faults.content(path) == faults.torch_bytes(STATE, path)
    return info


def save_under_umask(folder: str, umask: int) -> list[int]:
    os.umask(umask)
    modes = []
    for atomic in (True, False):
        saved(f"{folder}/new.pt", atomic=atomic)
        modes.append(mode_of(f"{folder}/new.pt"))
        os.unlink(f"{folder}/new.pt")
    now = os.umask(0)
    assert now == umask, "the umask of the process has changed"
    return modes


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002], ids=oct)
def test_a_new_file_has_the_mode_that_the_umask_gives(umask: int, tmp_path: Any) -> None:
    assert faults.run(save_under_umask, str(tmp_path), umask) == [0o666 & ~umask] * 2


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444, 0o755, 0o2664], ids=oct)
def test_a_replaced_file_keeps_its_mode(mode: int, atomic: bool, tmp_path: Any) -> None:
    if mode == 0o444 and os.geteuid() != 0:
        pytest.skip("skipped: only root may write a read-only file")
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    path.chmod(mode)
    saved(path, atomic=atomic)
    assert mode_of(path) == mode


@needs_root
def test_a_replaced_file_keeps_its_group(tmp_path: Any) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    os.chown(path, -1, 54321)
    path.chmod(0o2660)  # changing the group may clear set-id bits: the mode comes after it
    saved(path)
    assert (os.stat(path).st_gid, mode_of(path)) == (54321, 0o2660)


def save_over_a_file_of_another_group(folder: str) -> None:
    saved(f"{folder}/model.pt")


@needs_root
def test_a_group_that_one_is_not_in_fails_nothing(open_folder: str) -> None:
    path = f"{open_folder}/model.pt"
    pathlib.Path(path).write_bytes(b"old")
    os.chown(path, NOBODY, 54321)
    os.chmod(path, 0o640)
    faults.run(save_over_a_file_of_another_group, open_folder, user=True)
    found = os.stat(path)
    assert (found.st_uid, found.st_gid, mode_of(path)) == (NOBODY, NOBODY, 0o640)


def save_while_another_thread_creates_files(folder: str) -> None:
    os.umask(0o027)
    over = threading.Event()
    wrong: list[str] = []

    def create() -> None:
        number = 0
        while not over.is_set():
            path = f"{folder}/other{number}"
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
            if mode_of(path) != 0o640:
                wrong.append(oct(mode_of(path)))
            number += 1
            os.unlink(path)

    thread = threading.Thread(target=create)
    thread.start()
    target = Target(folder)
    os.chmod(target.path, 0o604)
    for i in range(40):
        target.save(ENGINES[i % len(ENGINES)])
        assert mode_of(target.path) == 0o604
        fp.save(STATE, f"{folder}/new{i}.pt")
        assert mode_of(f"{folder}/new{i}.pt") == 0o640
    over.set()
    thread.join()
    assert not wrong, wrong


def test_the_umask_is_not_touched_even_for_a_moment(tmp_path: Any) -> None:
    faults.run(save_while_another_thread_creates_files, str(tmp_path))


def save_in_a_read_only_folder(folder: str) -> None:
    target = Target.__new__(Target)
    target.folder, target.path, target.state = folder, f"{folder}/model.pt", STATE
    target.old = faults.content(target.path)
    target.new = faults.torch_bytes(STATE, target.path)
    error = target.fails("auto")
    assert error.errno == errno.EACCES and error.operation == "create a temporary file"
    assert "atomic=False" in str(error)
    target.succeeds("auto", atomic=False)


@needs_root
def test_a_writable_file_in_a_read_only_folder_can_be_saved_in_place(open_folder: str) -> None:
    path = f"{open_folder}/model.pt"
    pathlib.Path(path).write_bytes(os.urandom(50_000))  # longer than the new one
    os.chown(path, NOBODY, NOBODY)
    os.chmod(open_folder, 0o555)
    faults.run(save_in_a_read_only_folder, open_folder, user=True)


def save_without_permission(folder: str) -> list[int | None]:
    found = []
    for name in ("read-only.pt", "closed/model.pt"):
        for atomic in (True, False):
            try:
                fp.save(STATE, f"{folder}/{name}", options=fp.Options(atomic=atomic))
            except fp.StorageError as error:
                assert "permissions" in str(error), str(error)
                found.append(error.errno)
    return found


@needs_root
def test_permissions_that_are_missing_are_an_error(open_folder: str) -> None:
    path = pathlib.Path(open_folder, "read-only.pt")
    path.write_bytes(b"old")
    path.chmod(0o444)
    os.mkdir(f"{open_folder}/closed", 0o000)
    found = faults.run(save_without_permission, open_folder, user=True)
    assert found == [errno.EACCES] * 4
    assert path.read_bytes() == b"old"


def save_in_a_drop_box(folder: str) -> None:
    torch.save(STATE, f"{folder}/theirs.pt")
    saved_info = fp.save(STATE, f"{folder}/ours.pt")
    assert saved_info.bytes == os.stat(f"{folder}/ours.pt").st_size


@needs_root
def test_a_folder_that_may_be_written_but_not_listed_takes_a_file(open_folder: str) -> None:
    os.chown(open_folder, 0, 0)
    os.chmod(open_folder, 0o1733)
    faults.run(save_in_a_drop_box, open_folder, user=True)


@needs_root
@pytest.mark.parametrize(("attribute", "operation"), [("i", "open"), ("a", "rename")])
def test_an_immutable_or_append_only_file_is_an_error(
    attribute: str, operation: str, tmp_path: Any
) -> None:
    target = Target(tmp_path)
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(["chattr", f"+{attribute}", target.path], capture_output=True)
    try:
        os.rename(target.path, target.path + ".moved")
        pytest.skip("skipped: this file system has no such attributes")
    except PermissionError:
        pass
    try:
        error = target.fails("auto")
        assert (error.errno, error.operation) == (errno.EPERM, operation), str(error)
    finally:
        subprocess.run(["chattr", f"-{attribute}", target.path], check=True)
    target.succeeds("auto")
