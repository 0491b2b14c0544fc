# SPDX-License-Identifier: Apache-2.0
"""What people who checkpoint training have met in what a state holds, and what must come of it.

Here, with numbers of pytorch/pytorch: slices that drag their storage along (#33101), one memory as
two types (#58970), tensors that live only while they are pickled (#24045), lazy conjugates
(safetensors/safetensors#831), tensors without elements (#180481), new types (#114634), objects that
cannot be pickled (#48243), flipped bits (#126952), very many small tensors (#124195).
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import random
import socket
import struct
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from conftest import read

import fastpersist as fp

# Torch warns about experimental dtypes and layouts.
pytestmark = pytest.mark.filterwarnings("ignore")


def round_trip(state: Any, path: Path, **arguments: Any) -> Any:
    fp.save(state, path, **arguments)
    return torch.load(path, weights_only=False)


def raw(tensor: torch.Tensor) -> bytes:
    """Its elements in memory, as bytes."""
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


# --- A slice drags its whole storage along (#33101) ---


def test_forty_layers_of_one_buffer_are_written_once_and_stay_one(tmp_path: Path) -> None:
    buffer = torch.randn(2_000_000)
    layers = dict(enumerate(buffer.view(40, -1)))
    info = fp.save(layers, tmp_path / "model.pt")
    assert 8_000_000 < info.bytes < 1.01 * 8_000_000
    assert info.referenced_bytes == 8_000_000
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert len({layer.untyped_storage().data_ptr() for layer in loaded.values()}) == 1
    assert all(torch.equal(loaded[n], layer) for n, layer in layers.items())
    loaded[0][-1] = 5.0  # the last element before layer 1, in the same memory
    assert loaded[1].as_strided((1,), (1,), 50_000 - 1).item() == 5.0


def test_a_slice_shows_what_it_costs_and_what_it_would_cost_alone(tmp_path: Path) -> None:
    big = torch.randn(1000, 1000)
    info = fp.save({"row": big[7]}, tmp_path / "row.pt")
    assert (info.referenced_bytes, info.bytes > 4_000_000) == (4000, True)
    alone = fp.save({"row": big[7]}, tmp_path / "row.pt", compact=True)
    assert alone.bytes < 6000
    assert torch.equal(torch.load(tmp_path / "row.pt", weights_only=True)["row"], big[7])


def test_files_of_one_layer_each_together_cost_the_buffer_and_not_its_square(
    tmp_path: Path,
) -> None:
    buffer = torch.randn(2_000_000)
    sizes = [
        fp.save([layer], tmp_path / f"{n}.pt", compact=True).bytes
        for n, layer in enumerate(buffer.view(40, -1))
    ]
    assert sum(sizes) < 1.05 * 8_000_000


# --- One memory as two types; empty tensors mistaken for aliases (#58970) ---


def _complex() -> torch.Tensor:
    return torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)


@pytest.mark.parametrize("kind", ["complex and real part", "float and int", "deep inside"])
def test_one_memory_as_two_types_is_refused_with_both_keys_and_nothing_is_lost(
    kind: str, tmp_path: Path
) -> None:
    x, c = torch.arange(4.0), _complex()
    state, places = {
        "complex and real part": ([c, c.real], ["[0]", "[1]"]),
        "float and int": ({"x": x, "i": x.view(torch.int32)}, ["['x']", "['i']"]),
        "deep inside": (
            {"ok": torch.ones(1), "m": {"x": x[1:]}, "o": [(0, x.view(torch.int32)[2:])]},
            ["['m']['x']", "['o'][0][1]"],
        ),
    }[kind]
    with pytest.raises(RuntimeError):
        torch.save(state, io.BytesIO())
    path = tmp_path / "model.pt"
    fp.save({"good": x}, path)
    before = read(path)
    with pytest.raises(fp.UnsupportedStateError) as caught:
        fp.save(state, path)
    assert all(place in str(caught.value) for place in places)
    assert read(path) == before
    assert os.listdir(tmp_path) == ["model.pt"]


def test_empty_tensors_of_any_types_are_never_taken_for_aliases(tmp_path: Path) -> None:
    types = [torch.int32, torch.int64, torch.float32, torch.bool, torch.complex64, torch.half]
    state = {str(t): torch.empty(0, 3, dtype=t) for t in types}
    state |= {f"sliced {t}": torch.ones(4).to(t)[4:] for t in types}
    loaded = round_trip(state, tmp_path / "model.pt")
    assert zoo.difference(state, loaded) is None
    assert [t.dtype for t in loaded.values()] == types * 2


def test_one_memory_twice_as_one_type_is_fine(tmp_path: Path) -> None:
    x = torch.arange(4.0)
    loaded = round_trip([x, x.view(torch.int32).view(torch.float32), x[2:]], tmp_path / "model.pt")
    loaded[0][3] = 9.0
    assert loaded[1][3] == loaded[2][1] == 9.0


# --- Tensors that exist only while they are pickled (#24045) ---


class Junk:
    """A file object that frees and fills memory at every write."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Any) -> int:
        gc.collect()
        for _ in range(50):
            torch.full((64,), -1.0)
        self.data += data
        return len(data)


@pytest.mark.parametrize("way", ["getstate", "reduce"])
def test_tensors_made_while_pickling_live_until_the_last_byte(way: str) -> None:
    kind = zoo.FreshOnGetstate if way == "getstate" else zoo.FreshOnReduce
    sink = Junk()
    fp.save([kind(index) for index in range(200)], sink)
    loaded = torch.load(io.BytesIO(sink.data), weights_only=False)
    assert [int(o.loaded[0]) for o in loaded] == list(range(200))
    assert all((o.loaded == o.index).all() for o in loaded)


def test_tensors_made_while_pickling_reach_a_file_right(tmp_path: Path) -> None:
    stop = threading.Event()

    def fill_memory() -> None:
        while not stop.is_set():
            torch.full((64,), -1.0)

    thread = threading.Thread(target=fill_memory)
    thread.start()
    try:
        loaded = round_trip([zoo.FreshOnGetstate(n) for n in range(200)], tmp_path / "model.pt")
    finally:
        stop.set()
        thread.join()
    assert all((o.loaded == o.index).all() for o in loaded)


def test_a_state_that_its_owner_forgets_meanwhile_is_still_written(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.pt"
    os.mkfifo(fifo)
    expected = torch.arange(500_000.0)
    state = {"weight": expected.clone()}
    received = bytearray()

    def forget_and_drain() -> None:
        with open(fifo, "rb") as file:
            received.extend(file.read(1000))  # now the save is under way
            state.clear()
            gc.collect()
            torch.full((500_000,), -1.0)
            received.extend(file.read())

    thread = threading.Thread(target=forget_and_drain, daemon=True)
    thread.start()
    fp.save(state, fifo)
    thread.join(timeout=60)
    loaded = torch.load(io.BytesIO(received), weights_only=True)
    assert torch.equal(loaded["weight"], expected)


# --- Lazy conjugates and negations (safetensors/safetensors#831) ---

LAZY = {
    "conj": lambda: _complex().conj(),
    "conj of a part": lambda: _complex()[1:].conj(),
    "neg": lambda: torch._neg_view(torch.arange(3.0)),
    "imaginary part of a conj": lambda: _complex().conj().imag,
    "conj and neg": lambda: torch._neg_view(_complex().conj()),
    "real part of a conj": lambda: _complex().conj().real,
    "parameter": lambda: torch.nn.Parameter(_complex().conj()),
}


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_tensor_comes_back_with_the_values_it_shows(name: str, tmp_path: Path) -> None:
    tensor = LAZY[name]()
    shown = tensor.tolist()
    assert round_trip({"t": tensor}, tmp_path / "model.pt")["t"].tolist() == shown
    assert tensor.tolist() == shown


def test_a_lazy_tensor_and_its_base_stay_one_memory(tmp_path: Path) -> None:
    c = _complex()
    loaded = round_trip({"c": c, "conj": c.conj()}, tmp_path / "model.pt")
    loaded["c"][0] = 7 + 8j
    assert loaded["conj"][0] == 7 - 8j


@pytest.mark.parametrize("name", LAZY)
def test_a_safetensors_file_has_the_values_that_a_lazy_tensor_shows(
    name: str, tmp_path: Path
) -> None:
    package = pytest.importorskip("safetensors.torch", reason="skipped: no safetensors here")
    tensor = LAZY[name]()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    fp.save({"t": tensor}, tmp_path / "model.safetensors")
    loaded = package.load_file(tmp_path / "model.safetensors")
    assert loaded["t"].tolist() == tensor.tolist()


# --- Tensors without elements (#180481) ---


def _empties() -> dict[str, Any]:
    return {
        "none": torch.empty(0),
        "0x3": torch.empty(0, 3, dtype=torch.int16),
        "2x0x4": torch.empty(2, 0, 4),
        "turned": torch.empty(2, 0, 4).permute(2, 0, 1),
        "end": torch.arange(5.0)[5:],
        "parameter": torch.nn.Parameter(torch.empty(0, 2)),
    }


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("compact", [False, True])
def test_tensors_without_elements_keep_key_shape_stride_and_type(
    others: bool, compact: bool, tmp_path: Path
) -> None:
    state = _empties()
    if others:
        state |= {"scalar": torch.tensor(2.5), "some": torch.arange(1000), "last": torch.empty(0)}
    loaded = round_trip(state, tmp_path / "model.pt", compact=compact)
    assert list(loaded) == list(state)
    for name, tensor in state.items():
        assert loaded[name].shape == tensor.shape
        assert loaded[name].stride() == tensor.stride()
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_file_of_empty_tensors_only_is_whole(mmap: bool, tmp_path: Path) -> None:
    fp.save(_empties(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False, mmap=mmap)
    assert zoo.difference(_empties(), loaded) is None
    assert zipfile.ZipFile(tmp_path / "model.pt").testzip() is None


def test_meta_tensors_keep_their_shapes_and_are_not_one_storage(tmp_path: Path) -> None:
    state = {
        "a": torch.empty(3, 3, device="meta"),
        "b": torch.empty(7, dtype=torch.int8, device="meta"),
        "c": torch.empty(4, 2, device="meta").t(),
        "real": torch.ones(2),
    }
    loaded = round_trip(state, tmp_path / "model.pt")
    for name, tensor in state.items():
        facts = (loaded[name].device, loaded[name].shape, loaded[name].stride(), loaded[name].dtype)
        assert facts == (tensor.device, tensor.shape, tensor.stride(), tensor.dtype)


def test_eight_ranks_share_a_bias_of_three_elements(tmp_path: Path) -> None:
    bias = torch.tensor([1.0, 2.0, 3.0])
    shards = []
    for rank in range(8):
        shard = {"bias": bias[rank : rank + 1], "weight": torch.full((2, 2), float(rank))}
        for compact in (False, True):
            fp.save(shard, tmp_path / f"{rank}.pt", compact=compact)
            loaded = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
            assert loaded["bias"].shape == ((1,) if rank < 3 else (0,))
        shards.append(loaded["bias"])
    assert torch.equal(torch.cat(shards), bias)


# --- New types (#114634) and byte order (#101688, #65300) ---

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
SAVABLE = [d for d in DTYPES if any(e.name == f"dtype_{str(d)[6:]}" for e in zoo.savable())]


@pytest.mark.parametrize("dtype", SAVABLE, ids=str)
def test_every_bit_pattern_of_every_type_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = next(e for e in zoo.ENTRIES if e.name == f"dtype_{str(dtype)[6:]}").build()
    expected = raw(tensor)
    loaded = round_trip({"t": tensor}, tmp_path / "model.pt")["t"]
    assert loaded.dtype == dtype
    assert raw(loaded) == expected


@pytest.mark.parametrize(
    "bits",
    [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x7F800000],
    ids=["payload", "negative payload", "signalling", "-0.0", "subnormal", "infinity"],
)
def test_floats_keep_their_bits(bits: int, tmp_path: Path) -> None:
    tensor = torch.frombuffer(bytearray(struct.pack("<I", bits)), dtype=torch.float32)
    assert raw(round_trip([tensor], tmp_path / "model.pt")[0]) == struct.pack("<I", bits)


@pytest.mark.parametrize("entry", zoo.parameters([e for e in zoo.refused() if "dtype" in e.name]))
def test_a_type_that_torch_cannot_save_is_named_with_its_tensor(
    entry: zoo.Entry, tmp_path: Path
) -> None:
    with pytest.raises(fp.UnsupportedStateError, match=r"\['odd'\]\['tensor'\]"):
        fp.save({"fine": torch.ones(2), "odd": {"tensor": entry.build()}}, tmp_path / "model.pt")
    assert os.listdir(tmp_path) == []


def test_the_byte_order_is_recorded(tmp_path: Path) -> None:
    fp.save([torch.ones(1)], tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        assert archive.read("model/byteorder") == sys.byteorder.encode()


# --- Objects that cannot be pickled (#48243) ---


class FailsLate:
    """Comes after megabytes of good tensors, and fails."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise pickle.PicklingError("not today")


UNPICKLABLE = {
    "lambda": lambda: lambda: 0,
    "lock": threading.Lock,
    "generator": lambda: (n for n in range(3)),
    "socket": socket.socket,
    "module": lambda: sys,
    "late": FailsLate,
    "local class": lambda: type("Local", (), {})(),
    "file": lambda: open(os.devnull),
}


@pytest.mark.parametrize("name", UNPICKLABLE)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"pickle_protocol": 4}, {"_use_new_zipfile_serialization": False}, {"compact": True}],
    ids=["usual", "protocol 4", "legacy", "compact"],
)
def test_an_object_that_cannot_be_pickled_leaves_the_good_file(
    name: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    fp.save({"step": 1}, path)
    before = read(path)
    bad = UNPICKLABLE[name]()
    state = {"weight": torch.randn(300_000), "extra": [1, bad], "after": torch.ones(2)}
    try:
        with pytest.raises(fp.UnsupportedStateError) as caught:
            fp.save(state, path, **arguments)
    finally:
        if hasattr(bad, "close"):
            bad.close()
    assert "['extra'][1]" in str(caught.value)
    assert read(path) == before
    assert os.listdir(tmp_path) == ["model.pt"]
    assert torch.load(path, weights_only=True) == {"step": 1}


def test_an_object_that_cannot_be_pickled_makes_no_file(tmp_path: Path) -> None:
    for name in ("model.pt", "model.safetensors"):
        with pytest.raises(fp.UnsupportedStateError, match="hook"):
            fp.save({"hook": lambda: 0}, tmp_path / name)
    assert os.listdir(tmp_path) == []


# --- Flipped bits (#126952): what is written lets a reader find them ---


def _records(path: Path) -> dict[str, tuple[int, int]]:
    """Offset and size of the data of each record that has any."""
    data = read(path)
    found = {}
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            at = record.header_offset
            lengths = struct.unpack("<HH", data[at + 26 : at + 30])
            if record.file_size:
                found[record.filename] = (at + 30 + sum(lengths), record.file_size)
    return found


@pytest.mark.parametrize("engine", ["auto", "buffered"])
def test_every_record_carries_a_checksum_that_finds_a_flipped_bit(
    engine: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    torch.manual_seed(2)
    state = {"large": torch.randn(1_500_000), "small": torch.randn(3), "step": 1}
    fp.save(state, path, options=fp.Options(engine=engine))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all(record.CRC != 0 for record in archive.infolist())
    choice = random.Random(2)
    for name, (offset, size) in _records(path).items():
        at = offset + choice.randrange(size)
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << choice.randrange(8)]))
            file.flush()
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() == name
            file.seek(at)
            file.write(bytes([byte]))
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize("count", [0, 1, 500, 1_000_000])
def test_the_file_ends_with_its_directory_and_no_padding(count: int, tmp_path: Path) -> None:
    info = fp.save([torch.ones(count)], tmp_path / "model.pt")
    data = read(tmp_path / "model.pt")
    assert len(data) == info.bytes
    assert data[-22:-18] == b"PK\x05\x06"
    assert data[-2:] == b"\0\0"  # no comment


def test_a_file_that_was_cut_is_no_zip_file(tmp_path: Path) -> None:
    fp.save([torch.ones(1000)], tmp_path / "model.pt")
    data = read(tmp_path / "model.pt")
    for cut in (1, 22, 100, len(data) // 2):
        with pytest.raises(zipfile.BadZipFile):
            zipfile.ZipFile(io.BytesIO(data[:-cut])).testzip()


# --- Very many small tensors (#124195) ---


@pytest.mark.slow
def test_a_hundred_thousand_tensors_of_one_element_come_back(tmp_path: Path) -> None:
    values = torch.arange(100_000.0)
    info = fp.save([value.clone() for value in values], tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        assert len(archive.infolist()) > 100_000
    assert info.referenced_bytes == 400_000
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)  # the faster of the two
    assert torch.equal(torch.stack(loaded), values)
    assert len({t.untyped_storage().data_ptr() for t in loaded}) == 100_000


def test_twenty_thousand_views_of_one_storage_are_one_record(tmp_path: Path) -> None:
    values = torch.arange(20_000.0)
    fp.save(list(values.unbind()), tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        assert [r.file_size for r in archive.infolist() if "/data/" in r.filename] == [80_000]
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(torch.stack(loaded), values)


def test_many_small_tensors_are_few_large_writes(tmp_path: Path) -> None:
    state = [torch.full((1,), float(n)) for n in range(3000)]
    info = fp.save(state, tmp_path / "model.pt")
    assert info.in_place_bytes == 0
    assert torch.equal(
        torch.cat(torch.load(tmp_path / "model.pt", weights_only=True)), torch.arange(3000.0)
    )
