# SPDX-License-Identifier: Apache-2.0
"""What a path may be: links, devices, pipes, mounts, odd names, and what it may not be."""

from __future__ import annotations

import errno
import os
import pathlib
import stat
import threading
from typing import Any

import faults_support as faults
import pytest
import torch
from faults_support import ENGINES, Target

import fastpersist as fp

STATE = faults.state_of(20_000, 7)
needs_root = pytest.mark.skipif(not faults.is_root(), reason="skipped: only root may do this")


def saved(path: Any, **options: Any) -> fp.SaveInfo:
    info = fp.save(STATE, path, options=fp.Options(**options))
    assert faults.content(path) == faults.torch_bytes(STATE, path)
    return info


# --- Links ---


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("dangling", [True, False])
def test_a_symbolic_link_stays_and_its_file_is_replaced(
    dangling: bool, atomic: bool, tmp_path: Any
) -> None:
    os.makedirs(tmp_path / "elsewhere" / "deep")
    real = tmp_path / "elsewhere" / "deep" / "real.pt"
    (tmp_path / "middle.pt").symlink_to("elsewhere/deep/real.pt")
    (tmp_path / "model.pt").symlink_to(tmp_path / "middle.pt")
    if not dangling:
        real.write_bytes(b"old")
        real.chmod(0o640)
    fp.save(STATE, tmp_path / "model.pt", options=fp.Options(atomic=atomic))
    assert (tmp_path / "model.pt").is_symlink() and (tmp_path / "middle.pt").is_symlink()
    assert real.is_file() and not real.is_symlink()
    # The name in the file is the one that was given, as with torch.save.
    assert real.read_bytes() == faults.torch_bytes(STATE, "model.pt")
    assert dangling or stat.S_IMODE(os.stat(real).st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "middle.pt", "model.pt"]


def test_links_in_a_circle_or_into_nothing_are_an_error(tmp_path: Any) -> None:
    (tmp_path / "a.pt").symlink_to("b.pt")
    (tmp_path / "b.pt").symlink_to("a.pt")
    (tmp_path / "c.pt").symlink_to("missing/real.pt")
    for name, number in (("a.pt", errno.ELOOP), ("c.pt", errno.ENOENT)):
        with pytest.raises(fp.StorageError) as caught:
            fp.save(STATE, tmp_path / name)
        assert caught.value.errno == number
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt", "c.pt"]


def test_another_hard_link_keeps_the_old_file_unless_written_in_place(tmp_path: Any) -> None:
    target = Target(tmp_path)
    os.link(target.path, tmp_path / "other.pt")
    target.succeeds("auto")
    assert faults.content(tmp_path / "other.pt") == target.old
    os.unlink(tmp_path / "other.pt")
    target.put_old()
    os.link(target.path, tmp_path / "other.pt")
    target.succeeds("auto", atomic=False)
    assert faults.content(tmp_path / "other.pt") == target.new


# --- What is no regular file ---


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pipe_is_written_in_order(engine: str, tmp_path: Any) -> None:
    path = str(tmp_path / "model.pt")
    os.mkfifo(path)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(faults.content(path)))
    reader.start()
    info = fp.save(STATE, path, options=fp.Options(engine=engine, block_bytes=4096))
    reader.join()
    assert received == [faults.torch_bytes(STATE, path)]
    assert (info.engine, info.direct) == ("buffered", False)
    assert stat.S_ISFIFO(os.stat(path).st_mode)


def test_a_pipe_whose_reader_goes_away_is_an_error(tmp_path: Any) -> None:
    path = str(tmp_path / "model.pt")
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: os.close(os.open(path, os.O_RDONLY)))
    reader.start()
    with pytest.raises(fp.StorageError) as caught:  # and no SIGPIPE that ends the process
        fp.save(faults.state_of(1 << 20), path)
    reader.join()
    assert (caught.value.errno, caught.value.operation) == (errno.EPIPE, "write")


def save_to_standard_output(folder: str, name: str) -> None:
    state = faults.state_of(5_000)
    with open(f"{folder}/out", "w+b") as file:
        file.write(b"x" * 100_000)  # longer than what comes
        file.flush()
        os.dup2(file.fileno(), 1)
        fp.save(state, name)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_that_is_a_file_is_written_anew(name: str, tmp_path: Any) -> None:
    if not os.path.exists(name):
        pytest.skip(f"skipped: there is no {name}")
    faults.run(save_to_standard_output, str(tmp_path), name)
    expected = faults.torch_bytes(faults.state_of(5_000), name)
    assert faults.content(tmp_path / "out") == expected


def test_a_descriptor_of_a_pipe_is_written_in_order() -> None:
    end, other_end = os.pipe()
    received: list[bytes] = []

    def read() -> None:
        with open(end, "rb") as file:
            received.append(file.read())

    reader = threading.Thread(target=read)
    reader.start()
    fp.save(STATE, f"/dev/fd/{other_end}")
    os.close(other_end)
    reader.join()
    assert received == [faults.torch_bytes(STATE, str(other_end))]


def test_the_null_device_takes_everything_and_stays_what_it_is() -> None:
    assert fp.save(STATE, "/dev/null").bytes == len(faults.torch_bytes(STATE, "null"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def save_to_a_block_device() -> None:
    device = faults.attach(1)
    try:
        for engine in ENGINES:
            info = fp.save(STATE, device, options=fp.Options(engine=engine))
            assert stat.S_ISBLK(os.stat(device).st_mode)
            assert faults.content(device)[: info.bytes] == faults.torch_bytes(STATE, device)
        try:
            fp.save(faults.state_of(2 << 20), device)
        except fp.StorageError as error:
            assert (error.errno, error.operation) == (errno.ENOSPC, "write")
        else:
            raise AssertionError("the device took more than it holds")
    finally:
        faults.detach(device)


@needs_root
def test_a_block_device_is_written_in_place() -> None:
    faults.run(save_to_a_block_device)


def save_over_a_bind_mount(folder: str) -> None:
    target = Target(folder)
    pathlib.Path(folder, "real.pt").write_bytes(target.old)
    faults.command("mount", "--bind", f"{folder}/real.pt", target.path)
    error = target.fails("auto")
    assert (error.errno, error.operation) == (errno.EBUSY, "replace")
    assert "atomic=False" in str(error)
    target.succeeds("auto", atomic=False)
    assert faults.content(f"{folder}/real.pt") == target.new


def test_a_bind_mounted_file_can_be_saved_in_place(tmp_path: Any) -> None:
    faults.run(save_over_a_bind_mount, str(tmp_path), mounts=True)


def save_on_a_read_only_file_system() -> None:
    with faults.mounted("tmpfs") as folder:
        target = Target(folder)
        faults.command("mount", "-o", "remount,ro", folder)
        for atomic in (True, False):
            error = target.fails("auto", atomic=atomic)
            assert error.errno == errno.EROFS and "read-only" in str(error), str(error)


def test_a_read_only_file_system_is_an_error() -> None:
    faults.run(save_on_a_read_only_file_system, mounts=True)


# --- Names ---


@pytest.mark.parametrize(
    "name",
    [
        "a" * 252 + ".pt",
        "я" * 126 + ".pt",
        "zażółć gęślą jaźń.pt",
        "two words\nand a line.pt",
        "-rf",
        "~",
        "a.b.c",
        "%s{0}$HOME.pt",
        b"\xff\xfe\x80.pt",
        b"caf\xe9.pt",
    ],
)
def test_a_name_is_taken_as_it_is(name: str | bytes, tmp_path: Any) -> None:
    path = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    info = fp.save(STATE, path if isinstance(name, bytes) else os.fsdecode(path))
    assert info.path == os.fsdecode(path)
    assert os.listdir(os.fsencode(tmp_path)) == [os.fsencode(name)]
    # torch cannot open a name that is no text; what it writes for one that is not ASCII is known.
    plain = os.fsdecode(name) if os.fsencode(name).isascii() else "archive"
    assert faults.content(path) == faults.torch_bytes(STATE, plain)


def test_a_name_in_the_working_directory_needs_no_folder(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    saved("model.pt")
    saved("./other.pt")
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "other.pt"]


# (path, errno, what the message says)
IMPOSSIBLE = [
    ("a" * 256, errno.ENAMETOOLONG, "shorter name"),
    ("missing/model.pt", errno.ENOENT, "create the directory"),
    ("file/model.pt", errno.ENOTDIR, "not a directory"),
    ("folder", errno.EISDIR, "inside the directory"),
    ("folder/", errno.EISDIR, "inside the directory"),
    ("folder/.", errno.EISDIR, "inside the directory"),
    ("..", errno.EISDIR, "inside the directory"),
]


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(("name", "number", "advice"), IMPOSSIBLE)
def test_a_path_that_cannot_be_is_an_error(
    name: str, number: int, advice: str, atomic: bool, tmp_path: Any
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"mine")
    path = f"{tmp_path}/{name}"
    with pytest.raises(fp.StorageError) as caught:
        fp.save({"x": torch.ones(3)}, path, options=fp.Options(atomic=atomic))
    assert caught.value.errno == number and caught.value.filename == path
    assert advice in str(caught.value) and path in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert (tmp_path / "file").read_bytes() == b"mine"
