# SPDX-License-Identifier: Apache-2.0
"""Files that are no checkpoint, or that somebody made to do harm: a clear error, and never a crash,
a hang, unbounded memory, or code of the file that runs."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import socket
import struct
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults_support as faults
import numpy as np
import pytest
import torch
from load_support import Record, difference, outcome, records_of, saved, with_pickle, zip_of

import fastpersist as fp

PREFIX = b"archive"


def checkpoint() -> list[Record]:
    return records_of(saved({"w": torch.arange(30.0), "v": torch.ones(4)}))


def refused(path: Path, kind: type[fp.Error] | tuple[type[fp.Error], ...], *words: str) -> str:
    """Loading it raises; both as a path and, if it is a regular file, as a file object."""
    with pytest.raises(kind) as caught:
        fp.load(path)
    text = str(caught.value)
    for word in (str(path), *words):
        assert word in text, text
    if path.is_file():
        with pytest.raises(kind):
            fp.load(io.BytesIO(path.read_bytes()))
    return text


# --- Other files ---


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, body in members.items():
            archive.writestr(name.replace("__", "/"), body)
    return buffer.getvalue()


def npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.ones(3))
    return buffer.getvalue()


def office() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
    return buffer.getvalue()


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"))
    return buffer.getvalue()


def torch_script() -> bytes:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(Twice(), torch.ones(2)), buffer)
    return buffer.getvalue()


OTHERS: dict[str, tuple[Callable[[], bytes], type[fp.Error], str]] = {
    "empty": (lambda: b"", fp.CorruptCheckpointError, "empty"),
    "zeros": (lambda: bytes(5000), fp.CorruptCheckpointError, "zero"),
    "pickle": (lambda: pickle.dumps([1], 2), fp.CorruptCheckpointError, "pickle"),
    "pickle 4": (lambda: pickle.dumps([1], 4), fp.CorruptCheckpointError, "pickle"),
    "gzip": (lambda: gzip.compress(saved([])), fp.CorruptCheckpointError, "gzip"),
    "tar": (tar, fp.CorruptCheckpointError, "tar"),
    "text": (lambda: b"hello\n" * 9, fp.CorruptCheckpointError, "text"),
    "html": (lambda: b"<!DOCTYPE html><html></html>", fp.CorruptCheckpointError, "HTML"),
    "npz": (npz, fp.UnsupportedFileError, "npz"),
    "office": (office, fp.UnsupportedFileError, "office"),
    "jar": (lambda: zipped(**{"META-INF__MANIFEST.MF": b""}), fp.UnsupportedFileError, "Java"),
    "empty zip": (lambda: zipped(), fp.CorruptCheckpointError, "0 entries"),
    "other zip": (lambda: zipped(a=b"b"), fp.CorruptCheckpointError, "without data.pkl"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_files_are_named_as_what_they_are(other: str, tmp_path: Path) -> None:
    make, kind, word = OTHERS[other]
    path = tmp_path / "model.pt"
    path.write_bytes(make())
    refused(path, kind, word)


@pytest.mark.filterwarnings("ignore")
def test_a_program_of_torch_script_is_left_to_torch(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(torch_script())
    refused(path, fp.UnsupportedFileError, "TorchScript", "torch.jit.load")


def test_a_safetensors_file_may_begin_as_a_zip_archive_does(tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'.ljust(0x4B50)
    data = struct.pack("<Q", len(header)) + header + b"abc"
    assert data.startswith(b"PK")
    assert bytes(fp.load(io.BytesIO(data))["w"]) == b"abc"
    for name in ("model.safetensors", "model.pt"):
        (tmp_path / name).write_bytes(data)
        assert bytes(fp.load(tmp_path / name)["w"]) == b"abc"


def test_a_checkpoint_may_have_any_suffix(tmp_path: Path) -> None:
    state = {"w": torch.arange(30.0)}
    torch.save({"a": [state]}, tmp_path / "torch.safetensors")
    with open(tmp_path / "torch.safetensors", "rb") as file:
        assert difference(torch.load(file), fp.load(tmp_path / "torch.safetensors")) is None
    fp.save(state, tmp_path / "safe.pt", format="safetensors")
    assert torch.equal(fp.load(tmp_path / "safe.pt")["w"], state["w"])


# --- What is no regular file ---


def test_directories_pipes_sockets_and_devices_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, fp.UnsupportedFileError, "directory")
    os.mkfifo(tmp_path / "pipe")  # nobody writes: opening it must not wait
    refused(tmp_path / "pipe", fp.UnsupportedFileError, "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        refused(tmp_path / "socket", fp.UnsupportedFileError, "socket")
    for device in ("/dev/zero", "/dev/null"):
        refused(Path(device), fp.UnsupportedFileError, "character device")


def test_missing_files_are_not_found(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "missing.pt", tmp_path / "link", tmp_path / "file" / "model.pt"):
        refused(path, fp.NotFoundError, "check the path")
        with pytest.raises(FileNotFoundError) as caught:
            fp.load(path)
        assert caught.value.filename == str(path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "loop", fp.StorageError)


def load_as_somebody(path: str) -> tuple[str, Any, Any, str]:
    try:
        fp.load(path)
    except fp.StorageError as error:
        return type(error).__name__, error.errno, error.filename, error.operation
    return "loaded", None, None, ""


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save([], path)
    path.chmod(0)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    answer = faults.run(load_as_somebody, str(path), user=True)
    assert answer == ("StorageError", 13, str(path), "open")


# --- Archives that lie ---

LIES: dict[str, tuple[str, Any]] = {
    "overlapping records": ("offset", 0),
    "a record beyond the end": ("offset", 1 << 30),
    "a huge size": ("size", 0xFFFFFFF0),
    "a size that is too small": ("size", 3),
    "64 bits announced, not there": ("size", 0xFFFFFFFF),
    "another name in the header": ("local_name", b"x"),
    "encrypted": ("flags", 1),
    "deflated": ("method", 8),
}
"""A field of one record, and what it is set to."""


@pytest.mark.parametrize("lie", LIES)
def test_archives_that_lie_are_refused(lie: str, tmp_path: Path) -> None:
    records = checkpoint()
    setattr(records[2], *LIES[lie])
    path = tmp_path / "model.pt"
    path.write_bytes(zip_of(records))
    known = lie in ("encrypted", "deflated")
    refused(path, fp.UnsupportedFileError if known else fp.CorruptCheckpointError)


def test_a_descriptor_that_is_announced_and_not_there_is_not_missed() -> None:
    """Nothing in it is needed: the directory has the checksum."""
    records = checkpoint()
    right = torch.load(io.BytesIO(zip_of(records)))
    records[2].flags = 8
    assert difference(right, fp.load(io.BytesIO(zip_of(records)))) is None


@pytest.mark.parametrize("number", [0, 2, -1])
def test_two_records_of_one_name_are_refused(number: int, tmp_path: Path) -> None:
    records = checkpoint()
    records.append(Record(records[number].name, b"N."))
    path = tmp_path / "model.pt"
    path.write_bytes(zip_of(records))
    refused(path, fp.CorruptCheckpointError, records[number].name.decode())


@pytest.mark.parametrize("repacked", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_archives_are_refused_with_advice(repacked: int, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w", repacked) as archive:
        for record in checkpoint():
            archive.writestr(record.name.decode(), record.body)
    refused(path, fp.UnsupportedFileError, "compress")


def pickle_of_storage(size: int, shape: int, key: str = "0") -> bytes:
    """A tensor of `shape` elements in a float storage that claims `size` elements."""
    number = b"\x8a\x08" + struct.pack("<q", size)
    count = b"\x8a\x08" + struct.pack("<q", shape)
    text = b"".join(b"X" + struct.pack("<I", len(t)) + t for t in (key.encode(), b"cpu"))
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
        + text + number + b"tQK\0(" + count + b"t(K\x01t\x89ccollections\nOrderedDict\n)RtR."
    )  # fmt: skip


MISFITS = [(10 << 30, 10 << 30, "0"), (30, 1 << 40, "0"), (30, -1, "0"), (30, 31, "0")]
MISFITS += [(-4, 4, "0"), (30, 30, "7"), (30, 30, "../0"), (30, 30, "")]


@pytest.mark.parametrize(("size", "shape", "key"), MISFITS)
@pytest.mark.parametrize("weights_only", [True, False])
def test_tensors_that_do_not_fit_their_storage(
    size: int, shape: int, key: str, weights_only: bool
) -> None:
    good = with_pickle(saved(torch.arange(30.0)), pickle_of_storage(30, 30))
    assert fp.load(io.BytesIO(good), weights_only=weights_only).tolist() == list(range(30))
    data = with_pickle(saved(torch.arange(30.0)), pickle_of_storage(size, shape, key))
    # A negative extent is torch's to refuse.
    with pytest.raises(fp.CorruptCheckpointError if shape >= 0 else RuntimeError):
        fp.load(io.BytesIO(data), weights_only=weights_only)


# --- Pickles ---


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_code_of_the_file_does_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(3), "config": {"evil": Malicious(trap)}}, path)
    for named in ({}, {"weights_only": True}, {"weights_only": True, "mmap": True}):
        with pytest.raises(fp.WeightsOnlyError) as caught:
            fp.load(path, **named)
        assert caught.value.entries == [("config.evil", "posix system")]
        assert isinstance(caught.value, pickle.UnpicklingError)
        assert "config.evil" in str(caught.value) and "posix.system" in str(caught.value)
    assert not trap.exists()
    fp.load(path, weights_only=False)
    assert trap.exists()


def test_old_files_do_not_run_code_either(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    trap = tmp_path / "trap"
    torch.save({"evil": Malicious(trap)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(fp.WeightsOnlyError, match="system"):
        fp.load(path)
    assert not trap.exists()


PROGRAMS: dict[str, bytes] = {
    "nothing": b"",
    "no end": b"\x80\x02]",
    "pop of nothing": b"0.",
    "deep lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "memo at 4 billion": b"\x80\x02]r\xff\xff\xff\xff.",
    "text of 4 GB": b"\x80\x02X\xff\xff\xff\xffabc.",
    "text of 2^63 bytes": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7fabc.",
    "long of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
    "frame of 2^60 bytes": b"\x80\x04\x95" + b"\0" * 7 + b"\x10N.",
    "get of nothing": b"\x80\x02h\x05.",
    "unhashable key": b"\x80\x02}]K\x01s.",
    "build of an int": b"\x80\x02K\x01}b.",
    "unknown opcode": b"\x80\x02\xfe.",
    "protocol 200": b"\x80\xc8N.",
    "billion laughs": b"\x80\x02]" + b"".join(b"q%c]h%ch%ce" % (i, i, i) for i in range(60)) + b".",
    "mark missing": b"\x80\x02K\x01t.",
    "persistent id of nothing": b"\x80\x02Q.",
    "persistent id of a number": b"\x80\x02K\x05Q.",
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_broken_pickles_give_errors_as_with_torch(program: str, weights_only: bool) -> None:
    data = with_pickle(saved([]), PROGRAMS[program])
    theirs = outcome(torch.load, io.BytesIO(data), weights_only=weights_only)
    ours = outcome(fp.load, io.BytesIO(data), weights_only=weights_only)
    if ours.error is None:
        # torch reserves 32 GB for a memo of that size.
        assert theirs.error is None or "memo" in program, theirs.error
        if theirs.error is None and "deep" not in program:
            assert difference(theirs.value, ours.value) is None
    elif not isinstance(ours.error, fp.Error):
        assert type(ours.error) is type(theirs.error), ours.error
    else:  # that protocol does not exist
        assert theirs.error is not None or "200" in program, ours.error


# --- Files that change while they are read ---


@pytest.mark.parametrize("engine", ["uring", "libaio", "threads", "buffered"])
def test_a_file_cut_between_opening_and_reading(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastpersist import _load, _rebuild

    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(100_000)}, path)
    whole, plainly = path.read_bytes(), _rebuild.plainly
    for size in (0, 5000, 4096, 200_000):
        path.write_bytes(whole)

        def cut_first(*arguments: Any, at: int = size) -> Any:
            os.truncate(path, at)
            return plainly(*arguments)

        monkeypatch.setattr(_rebuild, "plainly", cut_first)
        with pytest.raises(
            fp.CorruptCheckpointError, match=r"longer when it was opened|ends"
        ) as caught:
            _load.load(path, options=fp.Options(engine=engine))
        assert caught.value.filename == str(path)


def test_a_file_that_is_cut_and_written_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    state = {"w": torch.arange(500_000.0)}
    torch.save(state, path)
    whole, stop = path.read_bytes(), threading.Event()

    def disturb() -> None:
        size = len(whole)
        while not stop.is_set():
            size = (size * 1103515245 + 12345) % len(whole)
            os.truncate(path, size)
            path.write_bytes(whole)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(60):
            got = outcome(fp.load, path)
            if got.error is None:
                assert torch.equal(got.value["w"], state["w"])
            else:
                assert isinstance(got.error, fp.Error), got.error
    finally:
        stop.set()
        thread.join()
