# SPDX-License-Identifier: Apache-2.0
"""Writable file objects get the bytes that torch.save would give them, however they take them."""

from __future__ import annotations

import errno
import gzip
import io
import lzma
import os
import random
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import first_difference, read

import fastpersist as fp


def state() -> dict[str, Any]:
    torch.manual_seed(11)
    # More than the 4 MiB in which the bytes are handed over.
    return {"large": torch.randn(1_500_000), "small": torch.randn(3), "none": torch.empty(0)}


@pytest.fixture(scope="module")
def expected() -> bytes:
    buffer = io.BytesIO()
    torch.save(state(), buffer)
    return buffer.getvalue()


@pytest.fixture(params=["torch", "legacy", "safetensors"])
def arguments(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Those of fp.save: each road that leads to a file object."""
    return {
        "torch": {},
        "legacy": {"_use_new_zipfile_serialization": False},
        "safetensors": {"format": "safetensors"},
    }[request.param]


STATE = state()  # one, for the legacy format names storages by their address


def whole(arguments: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    fp.save(STATE, buffer, **arguments)
    return buffer.getvalue()


class Sink:
    """Keeps what it is given; subclasses differ in what write says and does."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.calls: list[str] = []

    def write(self, data: Any) -> Any:
        self.calls.append("write")
        self.data += data
        return len(data)

    def flush(self) -> None:
        self.calls.append("flush")


# --- What the object gets ---


def test_a_bytesio_gets_what_torch_gives_it(expected: bytes) -> None:
    buffer = io.BytesIO()
    info = fp.save(state(), buffer)
    assert first_difference(buffer.getvalue(), expected) is None
    assert (info.path, info.bytes, info.direct) == (None, len(expected), False)
    assert info.engine == "file object"
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True)["large"], state()["large"])


def test_writing_starts_where_the_object_stands(expected: bytes) -> None:
    buffer = io.BytesIO(b"before")
    buffer.seek(0, os.SEEK_END)
    fp.save(state(), buffer)
    buffer.write(b"after")
    assert buffer.getvalue() == b"before" + expected + b"after"


@pytest.mark.parametrize("buffering", [0, 1 << 16])
def test_an_open_file_gets_the_same(buffering: int, tmp_path: Path, expected: bytes) -> None:
    with open(tmp_path / "named.pt", "wb", buffering=buffering) as file:
        fp.save(state(), file)
    assert first_difference(read(tmp_path / "named.pt"), expected) is None


def test_a_temporary_file_gets_the_same(expected: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        fp.save(state(), file)
        file.seek(0)
        assert file.read() == expected


def test_a_pipe_gets_everything(expected: bytes) -> None:
    import threading

    reading, writing = os.pipe()
    received: list[bytes] = []

    def drain() -> None:
        with open(reading, "rb") as file:
            received.append(file.read())

    reader = threading.Thread(target=drain)
    reader.start()
    with open(writing, "wb", buffering=0) as file:
        fp.save(state(), file)
    reader.join()
    assert received[0] == expected


@pytest.mark.parametrize("module", [gzip, lzma])
def test_a_compressing_file_decompresses_to_the_same(
    module: Any, tmp_path: Path, expected: bytes
) -> None:
    small = {"w": torch.ones(1000)}
    with module.open(tmp_path / "model.pt.z", "wb") as file:
        fp.save(small, file)
    buffer = io.BytesIO()
    torch.save(small, buffer)
    with module.open(tmp_path / "model.pt.z", "rb") as file:
        assert file.read() == buffer.getvalue()


def test_a_member_of_a_zip_file_is_the_same(expected: bytes) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, archive.open("inner.pt", "w") as file:
        fp.save(state(), file)
    with zipfile.ZipFile(buffer) as archive:
        assert archive.read("inner.pt") == expected


def test_a_safetensors_object_needs_the_argument() -> None:
    buffer = io.BytesIO()
    fp.save({"w": torch.ones(2)}, buffer, format="safetensors", metadata={"k": "v"})
    assert b'"__metadata__":{"k":"v"}' in buffer.getvalue()


# --- How write answers ---


class TakesLittle(Sink):
    """An unbuffered file: takes a random part of what it is given."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def write(self, data: Any) -> int:
        part = data[: self.random.randrange(1, len(data) + 1)]
        self.data += part
        return len(part)


@pytest.mark.parametrize("seed", range(3))
def test_short_writes_are_continued(seed: int, arguments: dict[str, Any]) -> None:
    sink = TakesLittle(seed)
    fp.save(STATE, sink, **arguments)
    assert first_difference(bytes(sink.data), whole(arguments)) is None, f"seed {seed}"


class Silent(Sink):
    """Takes everything and says nothing, as many objects with a write do."""

    def write(self, data: Any) -> None:
        super().write(data)


def test_an_object_that_returns_none_took_everything(arguments: dict[str, Any]) -> None:
    sink = Silent()
    info = fp.save(STATE, sink, **arguments)
    assert first_difference(bytes(sink.data), whole(arguments)) is None
    assert info.bytes == len(sink.data)


class WriteOnly:
    """Has no flush, which torch.save would insist on."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)


def test_write_alone_is_enough(arguments: dict[str, Any]) -> None:
    sink = WriteOnly()
    fp.save(STATE, sink, **arguments)
    assert bytes(sink.data) == whole(arguments)


def test_flush_is_called_after_the_last_write(arguments: dict[str, Any]) -> None:
    sink = Sink()
    fp.save(STATE, sink, **arguments)
    assert sink.calls[-1] == "flush"
    assert "write" in sink.calls


class Keeper(Sink):
    """Keeps the objects it is given instead of copying them."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Any] = []

    def write(self, data: Any) -> int:
        self.pieces.append(data)
        return len(data)


def test_what_was_handed_over_does_not_change_afterwards(arguments: dict[str, Any]) -> None:
    if "_use_new_zipfile_serialization" in arguments:
        pytest.skip("skipped: in the legacy format torch hands over its own memory")
    sink = Keeper()
    fp.save(STATE, sink, **arguments)
    assert b"".join(sink.pieces) == whole(arguments)


# --- Errors ---


class FailsAfter(Sink):
    def __init__(self, room: int, error: BaseException) -> None:
        super().__init__()
        self.room, self.error = room, error

    def write(self, data: Any) -> int:
        if len(self.data) + len(data) > self.room:
            raise self.error
        return int(super().write(data))


@pytest.mark.parametrize("room", [0, 1, 5_000_000])
@pytest.mark.parametrize(
    ("kind", "what"),
    [(OSError, (errno.ENOSPC, "full")), (RuntimeError, ("mine",)), (KeyError, (7,))],
)
def test_the_objects_own_exception_comes_out(
    room: int, kind: type[Exception], what: tuple[Any, ...], arguments: dict[str, Any]
) -> None:
    error = kind(*what)
    with pytest.raises(kind) as caught:
        fp.save(state(), FailsAfter(room, error), **arguments)
    assert caught.value is error


@pytest.mark.parametrize("answer", [0, -1, 1 << 40])
def test_an_impossible_answer_is_an_error_and_no_endless_loop(
    answer: int, arguments: dict[str, Any]
) -> None:
    class Liar(Sink):
        def write(self, data: Any) -> int:
            return answer

    with pytest.raises(fp.Error, match=f"Liar.write took {answer}"):
        fp.save(state(), Liar(), **arguments)


def test_a_text_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    with open(tmp_path / "text", "w") as file, pytest.raises(TypeError):
        fp.save({"step": 1}, file)


def test_a_closed_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    file = open(tmp_path / "closed", "wb")
    file.close()
    with pytest.raises(ValueError, match="closed"):
        fp.save({"step": 1}, file)


def test_a_read_only_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"old")
    with open(tmp_path / "there", "rb") as file, pytest.raises(io.UnsupportedOperation):
        fp.save({"step": 1}, file)
    assert read(tmp_path / "there") == b"old"


@pytest.mark.parametrize("missing", [object(), type("NoCall", (), {"write": 5})()])
def test_an_object_without_a_write_is_refused(missing: object) -> None:
    with pytest.raises(fp.ArgumentError, match="neither a path nor a file object"):
        fp.save({}, missing)


def test_a_path_object_with_a_write_is_a_path(tmp_path: Path) -> None:
    class Both(Sink):
        def __fspath__(self) -> str:
            return str(tmp_path / "model.pt")

    both = Both()
    fp.save({"step": 1}, both)
    assert torch.load(tmp_path / "model.pt", weights_only=True) == {"step": 1}
    assert not both.data
