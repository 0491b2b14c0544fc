# SPDX-License-Identifier: Apache-2.0
"""fp.save as its callers meet it: arguments, what it returns, what it says, threads, no torch."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import logging
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import read

import fastpersist as fp


def state(value: float = 1.0) -> dict[str, Any]:
    return {"weight": torch.full((1000, 3), value), "step": int(value)}


# --- Arguments ---


def test_positional_arguments_are_those_of_torch_save() -> None:
    ours = list(inspect.signature(fp.save).parameters.values())
    theirs = list(inspect.signature(torch.save).parameters.values())
    positional = [p for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_it_takes_the_place_of_torch_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", fp.save)
    torch.save(state(), tmp_path / "model.pt", pickle, 2, True)
    torch.save(state(), f=tmp_path / "again.pt", pickle_protocol=2)
    for name in ("model.pt", "again.pt"):
        assert torch.load(tmp_path / name, weights_only=True)["step"] == 1


def test_it_takes_the_place_of_torch_save_from_the_start(run_python: Any) -> None:
    program = """
import fastpersist as fp, torch
torch.save = fp.save
print(torch.save([torch.ones(3)], "a.pt").engine)
torch.save([torch.ones(3)], "b.pt", _use_new_zipfile_serialization=False)
print(torch.load("a.pt")[0].tolist(), torch.load("b.pt")[0].tolist())
"""
    engine, values = run_python(program, timeout=30).stdout.splitlines()
    assert engine != "torch"
    assert values == "[1.0, 1.0, 1.0] [1.0, 1.0, 1.0]"


class PathLike:
    def __init__(self, path: str | bytes) -> None:
        self.path = path

    def __fspath__(self) -> str | bytes:
        return self.path


@pytest.mark.parametrize("kind", [str, os.fsencode, Path, PathLike])
def test_every_kind_of_path_is_taken(kind: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "ünï.pt")
    info = fp.save(state(), kind(path))
    assert torch.load(path, weights_only=True)["step"] == 1
    assert info.path == path


def test_a_pathlike_of_bytes_is_taken(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"\xff.pt")
    info = fp.save(state(), PathLike(path))
    assert info.path == os.fsdecode(path)
    assert os.path.getsize(path) == info.bytes


@pytest.mark.parametrize(
    ("name", "format", "is_safetensors"),
    [
        ("a.safetensors", None, True),
        ("a.pt", None, False),
        ("a.SAFETENSORS", None, False),
        ("a.safetensors.pt", None, False),
        ("a.safetensors", "torch", False),
        ("a.pt", "safetensors", True),
    ],
)
def test_the_suffix_or_the_argument_chooses_the_format(
    name: str, format: str | None, is_safetensors: bool, tmp_path: Path
) -> None:
    fp.save({"w": torch.ones(3)}, tmp_path / name, format=format)
    assert (read(tmp_path / name)[:2] != b"PK") == is_safetensors


# --- What it returns ---


def test_info_tells_what_was_written_and_how(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    info = fp.save(state(), path)
    assert isinstance(info, fp.SaveInfo)
    assert (info.path, info.bytes) == (str(path), path.stat().st_size)
    assert (info.step, info.parts) == (None, 1)
    assert info.referenced_bytes == 12_000
    assert 0 <= info.in_place_bytes <= info.bytes
    assert info.engine in ("uring", "libaio", "threads", "buffered")
    assert info.engine_reason
    assert info.direct == (info.engine != "buffered")


def test_seconds_say_where_the_time_went(tmp_path: Path) -> None:
    seconds = fp.save(state(), tmp_path / "model.pt").seconds
    parts = {"capture", "plan", "fill", "write", "sync", "commit"}
    assert set(seconds) == parts | {"stall", "total"}
    assert all(value >= 0 for value in seconds.values())
    assert seconds["stall"] == seconds["total"]
    assert sum(seconds[part] for part in parts) <= seconds["total"] * 1.000001
    with pytest.raises(TypeError):
        seconds["total"] = 0.0  # type: ignore[index]


@pytest.mark.parametrize("target", ["file", "file object", "legacy", "safetensors"])
def test_every_road_gives_an_info_with_total_and_stall(target: str, tmp_path: Path) -> None:
    tensors = {"w": torch.ones(5)}
    if target == "file object":
        info = fp.save(tensors, io.BytesIO())
    elif target == "legacy":
        info = fp.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    else:
        info = fp.save(tensors, tmp_path / ("a.pt" if target == "file" else "a.safetensors"))
    assert info.seconds["total"] >= info.seconds["stall"] > 0
    assert info.bytes > 20


def test_repr_is_one_readable_line(tmp_path: Path) -> None:
    line = repr(fp.save({"w": torch.zeros(500_000)}, tmp_path / "model.pt"))
    assert "\n" not in line
    assert str(tmp_path / "model.pt") in line
    assert "2 MB" in line
    assert "GB/s" in line


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1_490_000_000, "1.49 GB"), (2 * 10**12, "2 TB")],
)
def test_repr_gives_sizes_in_their_unit(size: int, text: str) -> None:
    info = fp.SaveInfo("x.pt", size, {"total": 2.0}, "uring", "", True)
    assert f": {text} in 2.000 s" in repr(info)


def test_repr_of_no_time_does_not_divide_by_it() -> None:
    assert "no time" in repr(fp.SaveInfo("x.pt", 1, {"total": 0.0}, "uring", "", True))


def test_info_is_frozen_and_can_be_copied_and_sent(tmp_path: Path) -> None:
    info = fp.save(state(), tmp_path / "model.pt")
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.bytes = 0  # type: ignore[misc]
    for twin in (copy.copy(info), copy.deepcopy(info), pickle.loads(pickle.dumps(info))):
        assert twin == info
        assert repr(twin) == repr(info)
        with pytest.raises(TypeError):
            twin.seconds["total"] = 0.0
    assert len({info, copy.copy(info)}) == 1


def test_referenced_bytes_count_what_tensors_show_once() -> None:
    base = torch.zeros(1000)
    for saved, expected in [
        (base, 4000),
        (base[:10], 40),
        ([base[:10], base[5:15]], 60),
        ([base[:10], base[500:510]], 80),
        ([base, base], 4000),
        (torch.zeros(0), 0),
        (base.as_strided((3, 2), (100, 1)), 4 * 202),
        ({"step": 1}, 0),
    ]:
        assert fp.save(saved, io.BytesIO()).referenced_bytes == expected


# --- What it says ---


def test_nothing_is_printed(run_python: Any) -> None:
    program = """
import io, fastpersist as fp, torch
fp.save({"a": torch.ones(3)}, "a.pt")
fp.save({"a": torch.ones(3)}, "a.safetensors")
fp.save({"a": torch.ones(3)}, io.BytesIO())
try:
    fp.save({"a": lambda: 0}, "a.pt")
except fp.Error:
    pass
"""
    done = run_python(program)
    assert (done.stdout, done.stderr) == ("", "")


def test_nothing_is_printed_when_the_interpreter_ends(run_python: Any) -> None:
    # An error that is still there then keeps the frames, and what was in them, of the save.
    program = """
import builtins, fastpersist as fp, numpy
class Full:
    def write(self, data):
        raise OSError(28, "full")
try:
    fp.save({"a": numpy.zeros(3)}, Full(), format="safetensors")
except OSError as error:
    builtins.kept = error
"""
    done = run_python(program)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_save_is_logged_at_debug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fastpersist"):
        info = fp.save(state(), tmp_path / "model.pt")
    text = "\n".join(r.getMessage() for r in caplog.records if r.name == "fastpersist")
    assert str(tmp_path / "model.pt") in text
    assert info.engine_reason in text


def test_a_reason_is_said_once(
    tmp_path: Path, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastpersist import _capture

    monkeypatch.setattr(_capture, "self_test", lambda: "first reason")
    for _ in range(3):
        fp.save(state(), tmp_path / "model.pt")
    monkeypatch.setattr(_capture, "self_test", lambda: "second reason")
    for _ in range(3):
        fp.save(state(), tmp_path / "model.pt")
    assert [m.rsplit(": ")[-1] for m in warned()] == ["first reason", "second reason"]


LOG_PROGRAM = """
import fastpersist as fp, numpy
fp.save({"a": numpy.zeros(3)}, "a.safetensors")
"""


def test_the_environment_shows_the_log_on_stderr(run_python: Any) -> None:
    for word in ("debug", "DEBUG"):
        done = run_python(LOG_PROGRAM, environment={"FASTPERSIST_LOG": word})
        assert "fastpersist DEBUG" in done.stderr
        assert "a.safetensors" in done.stderr
        assert done.stdout == ""
    done = run_python(LOG_PROGRAM, environment={"FASTPERSIST_LOG": "error"})
    assert done.stderr == ""


def test_a_level_that_does_not_exist_is_said_and_taken_as_info(run_python: Any) -> None:
    done = run_python(LOG_PROGRAM, environment={"FASTPERSIST_LOG": "loud"})
    assert "FASTPERSIST_LOG" in done.stderr
    assert "DEBUG" not in done.stderr


# --- Threads ---


def test_many_threads_save_at_once(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    gate = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            mine = {"weight": torch.full((200_000,), float(number)), "step": number}
            gate.wait()
            for name in ("own", "shared"):
                fp.save(mine, tmp_path / (f"{number}.pt" if name == "own" else "shared.pt"))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for number in range(8):
        loaded = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        assert loaded["step"] == number
        assert (loaded["weight"] == number).all()
    last = torch.load(tmp_path / "shared.pt", weights_only=True)  # one of them, whole
    assert (last["weight"] == last["step"]).all()
    assert sorted(os.listdir(tmp_path)) == sorted(["shared.pt", *(f"{n}.pt" for n in range(8))])


def test_other_threads_run_while_a_save_waits_for_its_device(tmp_path: Path) -> None:
    # The device is a FIFO that takes 64 KiB; the rest has to wait for a reader in this process. A
    # save that kept the interpreter's lock would wait for ever.
    fifo = tmp_path / "fifo.pt"
    os.mkfifo(fifo)
    saved = {"weight": torch.arange(500_000.0)}
    received: list[bytes] = []

    def drain() -> None:
        received.append(read(fifo))

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    info = fp.save(saved, fifo)
    reader.join(timeout=60)
    assert len(received[0]) == info.bytes
    loaded = torch.load(io.BytesIO(received[0]), weights_only=True)
    assert torch.equal(loaded["weight"], saved["weight"])
    assert info.engine == "buffered"


# --- Without torch ---

WITHOUT_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is not installed here")
sys.meta_path.insert(0, Blocker())
"""


def test_numpy_arrays_are_saved_without_torch(run_python: Any, tmp_path: Path) -> None:
    program = f"""{WITHOUT_TORCH}
import numpy, fastpersist as fp
info = fp.save({{"a": numpy.arange(6.0).reshape(2, 3), "b": numpy.arange(3)}}, "a.safetensors")
fp.save({{"a": numpy.ones(1)}}, open("b.bin", "wb"), format="safetensors")
print(info.bytes, "torch" in sys.modules)
"""
    size, has_torch = run_python(program).stdout.split()
    assert (int(size), has_torch) == (os.path.getsize(tmp_path / "a.safetensors"), "False")
    numpy_files = pytest.importorskip("safetensors.numpy", reason="skipped: no safetensors here")
    loaded = numpy_files.load_file(tmp_path / "a.safetensors")
    assert np.array_equal(loaded["a"], np.arange(6.0).reshape(2, 3))
    assert np.array_equal(loaded["b"], np.arange(3))


def test_a_torch_file_without_torch_is_an_import_error(run_python: Any, tmp_path: Path) -> None:
    program = f"""{WITHOUT_TORCH}
import fastpersist as fp
try:
    fp.save({{"a": 1}}, "a.pt")
except ImportError as error:
    print(error)
"""
    assert "torch" in run_python(program).stdout
    assert os.listdir(tmp_path) == []


def test_importing_fastpersist_imports_neither_torch_nor_numpy(run_python: Any) -> None:
    program = "import sys, fastpersist; print({'torch', 'numpy'} & set(sys.modules))"
    assert run_python(program).stdout == "set()\n"


# --- The package ---


def test_public_names_are_documented() -> None:
    for name in fp.__all__:
        if name != "__version__":
            assert inspect.getdoc(getattr(fp, name)), name
    assert set(fp.__all__) <= set(dir(fp))
