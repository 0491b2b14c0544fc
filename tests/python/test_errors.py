# SPDX-License-Identifier: Apache-2.0
"""Errors: their types, what they carry, and that nothing on disk changed when they come."""

from __future__ import annotations

import copy
import errno
import io
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from conftest import read
from torch import nn

import fastpersist as fp

# Torch warns about experimental layouts.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A good older file, alone in its folder."""
    path = tmp_path / "folder" / "model.pt"
    path.parent.mkdir()
    fp.save({"step": 1, "weight": torch.arange(1000.0)}, path)
    return path


def raises_and_keeps(old: Path, error: type[BaseException], obj: Any, **arguments: Any) -> str:
    """Saving obj over the old file raises; the file and its folder stay as they are."""
    content, status = read(old), old.stat()
    with pytest.raises(error) as caught:
        fp.save(obj, old, **arguments)
    assert read(old) == content
    assert os.listdir(old.parent) == [old.name]
    assert (old.stat().st_ino, old.stat().st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
    return str(caught.value)


# --- Types ---


def test_one_base_and_the_builtin_types_that_callers_expect() -> None:
    assert issubclass(fp.StorageError, (fp.Error, OSError))
    for kind, builtin in [
        (fp.StorageError, OSError),
        (fp.UnsupportedStateError, ValueError),
        (fp.ArgumentError, ValueError),
        (fp.ForkedError, RuntimeError),
    ]:
        assert issubclass(kind, fp.Error)
        assert issubclass(kind, builtin)
    assert issubclass(fp.Error, Exception)


# --- StorageError ---


def storage_error(path: str | bytes | Path) -> fp.StorageError:
    with pytest.raises(fp.StorageError) as caught:
        fp.save({"step": 1}, path)
    return caught.value


def test_missing_folder_is_named_and_the_advice_is_to_create_it(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "model.pt")
    error = storage_error(path)
    assert (error.errno, error.strerror) == (errno.ENOENT, os.strerror(errno.ENOENT))
    assert (error.filename, error.offset, error.operation) == (path, None, "open directory")
    assert str(tmp_path / "missing") in str(error)
    assert "create the directory" in str(error)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("folder", errno.EISDIR),
        ("..", errno.EISDIR),
        ("file.pt/model.pt", errno.ENOTDIR),
        ("x" * 256, errno.ENAMETOOLONG),
        ("loop.pt", errno.ELOOP),
        ("dangling/model.pt", errno.ENOENT),
    ],
)
def test_a_path_that_cannot_be_is_a_storage_error(name: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.pt").write_bytes(b"")
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(os.listdir(tmp_path))
    error = storage_error(os.path.join(tmp_path, name))
    assert error.errno == number
    assert os.strerror(number) in str(error)
    assert "; " in str(error)  # and what to do
    assert sorted(os.listdir(tmp_path)) == before


def test_filename_is_the_path_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert storage_error("missing/model.pt").filename == "missing/model.pt"
    assert storage_error(b"missing/\xff.pt").filename == os.fsdecode(b"missing/\xff.pt")


def test_a_storage_error_is_caught_as_the_oserror_that_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        fp.save({}, tmp_path / "missing" / "model.pt")
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_errors_survive_copying_and_pickling(duplicate: Any, tmp_path: Path) -> None:
    error = storage_error(tmp_path / "missing" / "model.pt")
    twin = duplicate(error)
    assert type(twin) is fp.StorageError
    assert str(twin) == str(error)
    for name in ("errno", "strerror", "filename", "offset", "operation"):
        assert getattr(twin, name) == getattr(error, name)
    for kind in (fp.ArgumentError, fp.UnsupportedStateError, fp.ForkedError, fp.Error):
        twin = duplicate(kind("what happened"))
        assert (type(twin), str(twin)) == (kind, "what happened")


def test_an_error_with_an_offset_keeps_it_when_pickled() -> None:
    error = fp.StorageError("write failed", errno.EIO, "x.pt", 1 << 40, "write")
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.offset, twin.operation, str(twin)) == (1 << 40, "write", "write failed")


# --- ArgumentError ---


@pytest.mark.parametrize("f", [None, 5, 1.5, object(), ["model.pt"], {"a": 1}, fp.save])
def test_what_is_neither_path_nor_file_object_is_refused(f: object) -> None:
    with pytest.raises(fp.ArgumentError, match=f"{type(f).__name__} is neither"):
        fp.save({}, f)


@pytest.mark.parametrize("path", ["a\0b.pt", b"a\0b.pt", "\0"])
def test_a_null_byte_in_the_path_is_refused(path: str | bytes) -> None:
    with pytest.raises(fp.ArgumentError, match="null byte"):
        fp.save({}, path)


@pytest.mark.parametrize("name", ["", b"", ".pt", "folder/", "folder/.pt", ".", "folder/."])
def test_a_name_that_leaves_none_for_the_archive_is_refused(
    name: str | bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(fp.Error):
        fp.save({}, name)
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(tmp_path / "folder") == []
    with pytest.raises(RuntimeError):  # as torch does
        torch.save({}, os.fsdecode(name))


@pytest.mark.parametrize("format", ["zip", "", "TORCH", 5, b"torch", ["torch"]])
def test_an_unknown_format_is_refused(format: object, old: Path) -> None:
    message = raises_and_keeps(old, fp.ArgumentError, {}, format=format)
    assert repr(format) in message


@pytest.mark.parametrize("metadata", [{"a": "b"}, {}])
def test_metadata_is_for_safetensors_only(metadata: dict[str, str], old: Path) -> None:
    assert "metadata" in raises_and_keeps(old, fp.ArgumentError, {}, metadata=metadata)


@pytest.mark.parametrize(
    "metadata", [{"a": 1}, {1: "a"}, {"a": None}, [("a", "b")], "a=b", {b"a": "b"}]
)
def test_metadata_that_is_not_text_is_refused(metadata: Any, tmp_path: Path) -> None:
    with pytest.raises(fp.ArgumentError, match="metadata"):
        fp.save({"a": torch.ones(1)}, tmp_path / "m.safetensors", metadata=metadata)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("protocol", [6, -1.5, "2"])
def test_an_impossible_protocol_is_not_blamed_on_the_state(protocol: Any, old: Path) -> None:
    state = {"model": {"weight": torch.ones(3)}}
    message = raises_and_keeps(old, fp.ArgumentError, state, pickle_protocol=protocol)
    assert "weight" not in message


# --- UnsupportedStateError ---


class Holder:
    def __init__(self, value: object) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("obj", "place"),
    [
        ({"model": {"layers": [1, {"hook": lambda: 0}]}}, "['model']['layers'][1]['hook']"),
        ([torch.ones(2), (0, lambda: 0)], "[1][1]"),
        ({"run": Holder({"lock": threading.Lock()})}, "['run'].value['lock']"),
        ({7: {("a", 1): (x for x in "ab")}}, "[7][('a', 1)]"),
        ({"file": open(os.devnull)}, "['file']"),
        (lambda: 0, "the object (function)"),
    ],
    ids=["lambda", "in a tuple", "in an object", "odd keys", "open file", "itself"],
)
def test_what_cannot_be_pickled_is_named_and_the_old_file_stays(
    obj: object, place: str, old: Path
) -> None:
    message = raises_and_keeps(old, fp.UnsupportedStateError, obj)
    assert place in message
    assert "remove it or replace it" in message


def test_the_cause_is_the_error_of_the_pickler(old: Path) -> None:
    with pytest.raises(fp.UnsupportedStateError) as caught:
        fp.save({"lock": threading.Lock()}, old)
    assert isinstance(caught.value.__cause__, TypeError)
    assert "cannot pickle '_thread.lock'" in str(caught.value)


def test_one_storage_as_two_types_names_both_keys(old: Path) -> None:
    base = torch.ones(4)
    state = {"a": torch.ones(1), "f": base, "deep": [base.view(torch.int32)]}
    message = raises_and_keeps(old, fp.UnsupportedStateError, state)
    assert "['f']" in message
    assert "['deep'][0]" in message
    assert "['a']" not in message


def test_layouts_that_torch_cannot_save_are_named(old: Path) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("skipped: this torch has no layout that it cannot save")
    state = {"weight": torch.ones(2), "packed": torch.eye(3).to_mkldnn()}
    assert "['packed']" in raises_and_keeps(old, fp.UnsupportedStateError, state)


@pytest.mark.parametrize("name", ["sparse_csr", "sparse_coo", "meta", "nested_strided"])
def test_unusual_layouts_that_torch_saves_are_saved(name: str, tmp_path: Path) -> None:
    state = next(e for e in zoo.ENTRIES if e.name == name).build()
    fp.save(state, tmp_path / "model.pt")
    assert zoo.same(state, torch.load(tmp_path / "model.pt", weights_only=False))


def test_an_error_in_a_users_hook_is_the_cause(old: Path) -> None:
    class Refusing:
        def __reduce__(self) -> tuple[Any, ...]:
            raise KeyError("the user's own")

    message = raises_and_keeps(old, fp.UnsupportedStateError, {"a": 1, "b": Refusing()})
    assert "['b']" in message
    assert "the user's own" in message


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_no_fault_of_the_state_passes_through(
    error: type[BaseException], old: Path
) -> None:
    class Interrupting:
        def __reduce__(self) -> tuple[Any, ...]:
            raise error

    raises_and_keeps(old, error, {"a": Interrupting()})


def test_a_failed_save_keeps_no_reference_to_the_state(tmp_path: Path) -> None:
    import gc
    import weakref

    module = nn.Linear(3, 3)
    module.register_forward_hook(lambda *_: None)  # cannot be pickled
    gone = weakref.ref(module)
    with pytest.raises(fp.UnsupportedStateError):
        fp.save({"module": module}, tmp_path / "model.pt")
    del module
    gc.collect()
    assert gone() is None


def test_errors_leave_file_objects_alone() -> None:
    buffer = io.BytesIO(b"before")
    with pytest.raises(fp.UnsupportedStateError):
        fp.save({"weight": torch.ones(1000), "hook": lambda: 0}, buffer)
    assert buffer.getvalue() == b"before"


def test_the_next_save_works_after_every_error(old: Path) -> None:
    for obj, arguments in [({"f": lambda: 0}, {}), ({}, {"format": "zip"})]:
        with pytest.raises(fp.Error):
            fp.save(obj, old, **arguments)
        fp.save({"step": 2}, old)
        assert torch.load(old, weights_only=True) == {"step": 2}


# --- ForkedError ---


def test_a_forked_child_is_told_so_and_the_parent_goes_on(run_python: Any) -> None:
    program = """
import os, sys, fastpersist as fp, numpy
state = {"a": numpy.zeros(9)}
fp.save(state, "a.safetensors")
child = os.fork()
if child == 0:
    try:
        fp.save(state, "a.safetensors")
    except fp.ForkedError as error:
        print(error, flush=True)
        os._exit(7)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(fp.save(state, "a.safetensors").bytes > 0)
"""
    message, last = run_python(program).stdout.splitlines()
    assert "forked" in message
    assert "spawn" in message
    assert last == "True"


def test_a_child_may_save_when_its_parent_never_did(run_python: Any) -> None:
    program = """
import os, fastpersist as fp, numpy
child = os.fork()
fp.save({"a": numpy.zeros(9)}, "a.safetensors")
if child == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    run_python(program)
