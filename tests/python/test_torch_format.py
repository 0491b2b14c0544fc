# SPDX-License-Identifier: Apache-2.0
"""A saved file is the file that torch.save writes, byte for byte, whatever the state and the name.

Runs under every supported version of torch; what a version does not have is skipped.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import subprocess
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from conftest import Pair, first_difference, read

import fastpersist as fp
from fastpersist import _capture

# Torch warns about experimental dtypes and layouts.
pytestmark = pytest.mark.filterwarnings("ignore")

try:
    from torch.utils.serialization import config
except ImportError:  # before torch 2.7
    config = None

Both = Callable[..., Pair]

has_alignment = pytest.mark.skipif(
    zoo.TORCH_VERSION < (2, 7), reason="skipped: torch before 2.7 has no storage_alignment"
)


def saved_by_torch(state: Any, **arguments: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, **arguments)
    return buffer.getvalue()


def saved_by_us(state: Any, **arguments: Any) -> bytes:
    buffer = io.BytesIO()
    fp.save(state, buffer, **arguments)
    return buffer.getvalue()


def plain_state() -> dict[str, Any]:
    torch.manual_seed(3)
    base = torch.randn(300)
    return {
        "weight": torch.nn.Parameter(torch.randn(7, 11)),
        "view": base[17:99],
        "base": base,
        "empty": torch.empty(0, 3),
        "half": torch.randn(1000).half(),
        "step": 12,
    }


# --- The whole zoo ---


def test_plain_states_are_left_to_the_compiled_pickler() -> None:
    assert fp.save(plain_state(), io.BytesIO()).referenced_bytes is not None


@pytest.mark.parametrize("entry", zoo.parameters(zoo.savable()))
def test_file_equals_the_one_of_torch_save(entry: zoo.Entry, save_with_both: Both) -> None:
    saved = save_with_both(entry.build())
    assert saved.difference() is None
    assert saved.info.bytes == os.path.getsize(saved.ours)
    if not entry.slow:
        with zipfile.ZipFile(saved.ours) as archive:
            assert archive.testzip() is None


@pytest.mark.parametrize("entry", [e for e in zoo.savable() if not e.slow], ids=str)
def test_both_picklers_make_the_same_file(
    entry: zoo.Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = entry.build()
    usual = saved_by_us(state)
    monkeypatch.setattr(_capture, "_fast_path_works", lambda: False)
    assert first_difference(usual, saved_by_us(state)) is None


@pytest.mark.parametrize("entry", zoo.parameters(zoo.refused()))
def test_what_torch_refuses_is_refused_before_a_file_appears(
    entry: zoo.Entry, tmp_path: Path
) -> None:
    with pytest.raises(fp.UnsupportedStateError, match=r"cannot be saved|view the same memory"):
        fp.save(entry.build(), tmp_path / "model.pt")
    assert os.listdir(tmp_path) == []


# --- Names ---


@pytest.mark.parametrize(
    "name",
    [
        "model.pt",
        "a.b.pt",
        "noext",
        "model.",
        "...",
        ".hidden.pt",
        "with a space.pt",
        "archive",
        "UPPER.PT",
        "quote'\".pt",
        "new\nline.pt",
        "percent%s{0}.pt",
        "ünïcode.pt",
        "模型.pt",
        "ordnér/model.pt",
        "fold.er/model",
        "n" * 200 + ".pt",
    ],
)
def test_archive_is_called_after_the_file_as_torch_does(name: str, save_with_both: Both) -> None:
    saved = save_with_both(plain_state(), name)
    assert saved.difference() is None


def test_non_utf8_path_equals_torch(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"\xff\xfe.pt")
    fp.save(plain_state(), path)
    theirs = os.path.join(os.fsencode(tmp_path), b"\xff\xfd.pt")
    torch.save(plain_state(), os.fsdecode(theirs))
    assert first_difference(read(path), read(theirs)) is None


def test_bytes_path_and_pathlike_give_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    torch.save(plain_state(), tmp_path / "torch" / "x.pt")
    for path in (os.fsencode(tmp_path / "x.pt"), str(tmp_path / "x.pt"), tmp_path / "x.pt"):
        fp.save(plain_state(), path)
        assert first_difference(read(tmp_path / "x.pt"), read(tmp_path / "torch/x.pt")) is None
        (tmp_path / "x.pt").unlink()


def test_relative_path_equals_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fp.save(plain_state(), "x.pt")
    ours = read("x.pt")
    torch.save(plain_state(), "x.pt")
    assert first_difference(ours, read("x.pt")) is None


def test_symbolic_link_names_the_archive_and_not_its_target(tmp_path: Path) -> None:
    for folder, save in (("ours", fp.save), ("theirs", torch.save)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "latest.pt").symlink_to("step-7.pt")
        save(plain_state(), tmp_path / folder / "latest.pt")
    ours, theirs = (read(tmp_path / folder / "step-7.pt") for folder in ("ours", "theirs"))
    assert first_difference(ours, theirs) is None


# --- The arguments of torch.save ---


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5, -1])
@pytest.mark.parametrize("name", ["whole_run", "shared_strings", "view_split_and_base"])
def test_pickle_protocol_equals_torch(protocol: int, name: str, save_with_both: Both) -> None:
    state = next(e for e in zoo.ENTRIES if e.name == name).build()
    assert save_with_both(state, pickle_protocol=protocol).difference() is None


class _MarkingPickler(pickle.Pickler):
    """Writes every Metrics as a tuple: a file that shows which pickler was at work."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, zoo.Metrics):
            return tuple, ((obj.loss, obj.histogram, "by the module"),)
        return NotImplemented


def _pickle_module() -> types.ModuleType:
    module = types.ModuleType("marking_pickle")
    module.__dict__.update(vars(pickle) | {"Pickler": _MarkingPickler, "__name__": module.__name__})
    return module


def test_another_pickle_module_is_used(save_with_both: Both) -> None:
    state = {"metrics": zoo.Metrics(0.5, torch.arange(4.0))}
    saved = save_with_both(state, pickle_module=_pickle_module())
    assert saved.difference() is None
    assert torch.load(saved.ours, weights_only=False)["metrics"][2] == "by the module"


@pytest.mark.parametrize("name", ["module_state_dict", "dataclass"])  # one for each pickler
def test_byteorder_record_comes_when_torch_closes_the_file(name: str, save_with_both: Both) -> None:
    state = next(e for e in zoo.ENTRIES if e.name == name).build()
    saved = save_with_both(state, _disable_byteorder_record=True)
    assert saved.difference() is None
    names = zipfile.ZipFile(saved.ours).namelist()
    assert names.index("model/byteorder") > names.index("model/version")


def test_the_legacy_format_is_written_by_torch(save_with_both: Both) -> None:
    state = plain_state()
    saved = save_with_both(state, _use_new_zipfile_serialization=False)
    assert saved.difference() is None
    assert not zipfile.is_zipfile(saved.ours)
    assert saved.info.engine == "torch"
    assert saved.info.bytes == os.path.getsize(saved.ours)
    assert zoo.same(state, torch.load(saved.ours, weights_only=True))


def test_the_legacy_format_replaces_the_file_at_once_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({"step": 1}, path, _use_new_zipfile_serialization=False)
    before = read(path)
    with pytest.raises(Exception, match="lambda"):
        fp.save(
            {"weight": torch.ones(1000), "hook": lambda: 0},
            path,
            _use_new_zipfile_serialization=False,
        )
    assert read(path) == before
    assert os.listdir(tmp_path) == ["model.pt"]


# --- Alignment ---


@pytest.fixture
def aligned_to() -> Iterator[Callable[[int], None]]:
    """Changes torch's settings until the test ends."""
    before = config.save.storage_alignment

    def change(alignment: int) -> None:
        config.save.storage_alignment = alignment

    yield change
    config.save.storage_alignment = before
    config.load.calculate_storage_offsets = False


def data_offsets(data: bytes) -> list[int]:
    """Where the records' data begin, by the local headers."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        starts = [record.header_offset for record in archive.infolist()]
    lengths = [int.from_bytes(data[at + 26 : at + 28], "little") for at in starts]
    extras = [int.from_bytes(data[at + 28 : at + 30], "little") for at in starts]
    return [a + 30 + n + e for a, n, e in zip(starts, lengths, extras, strict=True)]


@has_alignment
@pytest.mark.parametrize("alignment", [1, 2, 8, 64, 512, 4096, 32768])
@pytest.mark.parametrize(
    "name", ["records_of_0_to_160_bytes", "whole_run", "empties_between_others"]
)
def test_storage_alignment_is_torchs_setting(
    alignment: int, name: str, aligned_to: Callable[[int], None], save_with_both: Both
) -> None:
    state = next(e for e in zoo.ENTRIES if e.name == name).build()
    aligned_to(alignment)
    saved = save_with_both(state)
    assert saved.difference() is None
    data = read(saved.ours)
    assert all(offset % alignment == 0 for offset in data_offsets(data))
    stated = zipfile.ZipFile(saved.ours).read("model/.storage_alignment")
    assert stated == str(alignment).encode()


@has_alignment
@pytest.mark.parametrize("alignment", [3, 48, 65536])
def test_an_alignment_that_is_no_power_of_two_up_to_32768_is_left_to_torch(
    alignment: int, aligned_to: Callable[[int], None], tmp_path: Path, warned: Any
) -> None:
    state = plain_state()
    aligned_to(alignment)
    info = fp.save(state, tmp_path / "model.pt")
    assert info.engine == "torch"
    assert str(alignment) in info.engine_reason
    assert zoo.same(state, torch.load(tmp_path / "model.pt", weights_only=True))
    assert len(warned()) == 1
    aligned_to(64)
    assert fp.save(state, tmp_path / "model.pt").engine != "torch"


@has_alignment
def test_a_strange_alignment_in_the_first_save_does_not_spoil_the_later_ones(
    run_python: Any,
) -> None:
    program = """
import fastpersist as fp, torch
from torch.utils.serialization import config
config.save.storage_alignment = 48
print(fp.save([torch.ones(3)], "a.pt").engine == "torch")
config.save.storage_alignment = 64
print(fp.save([torch.ones(3)], "a.pt").engine == "torch")
"""
    assert run_python(program).stdout.split() == ["True", "False"]


@has_alignment
def test_alignment_0_which_kills_torch_is_refused(run_python: Any) -> None:
    program = """
import fastpersist as fp, torch
from torch.utils.serialization import config
config.save.storage_alignment = 0
try:
    fp.save([torch.ones(3)], "a.pt")
except fp.ArgumentError as error:
    print(error)
"""
    done = run_python(program, check=False)
    assert done.returncode == 0
    assert "storage_alignment 0" in done.stdout


# --- Checksums ---


@pytest.mark.parametrize("by", ["set_crc32_options", "config"])
def test_checksums_stay_true_when_torch_is_told_to_leave_them_out(by: str, tmp_path: Path) -> None:
    if zoo.TORCH_VERSION < (2, 5) or (by == "config" and config is None):
        pytest.skip("skipped: this torch cannot leave them out that way")
    state = plain_state()
    with_checksums = saved_by_us(state)
    before = torch.serialization.get_crc32_options()
    try:
        if by == "config":
            config.save.compute_crc32 = False
        else:
            torch.serialization.set_crc32_options(False)
        fp.save(state, tmp_path / "archive.pt")
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(before)
    assert first_difference(read(tmp_path / "archive.pt"), with_checksums) is None
    with zipfile.ZipFile(tmp_path / "archive.pt") as archive:
        assert archive.testzip() is None


def test_a_first_save_with_torchs_checksums_off_is_ours_too(run_python: Any) -> None:
    if zoo.TORCH_VERSION < (2, 5):
        pytest.skip("skipped: this torch always writes checksums")
    program = """
import fastpersist as fp, torch
torch.serialization.set_crc32_options(False)
print(fp.save([torch.ones(3)], "a.pt").engine != "torch", torch.serialization.get_crc32_options())
"""
    assert run_python(program).stdout.split() == ["True", "False"]


def test_unzip_finds_no_fault(tmp_path: Path) -> None:
    if not (unzip := shutil.which("unzip")):
        pytest.skip("skipped: no unzip here")
    state = {**plain_state(), "large": torch.randn(3_000_001)}
    fp.save(state, tmp_path / "model.pt")
    done = subprocess.run([unzip, "-tq", tmp_path / "model.pt"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- Loading with torch ---


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(
    "name", ["optimizer_adam", "view_overlapping_and_base", "empties_between_others"]
)
def test_torch_load_brings_the_state_back(
    weights_only: bool, mmap: bool, name: str, tmp_path: Path
) -> None:
    state = next(e for e in zoo.ENTRIES if e.name == name).build()
    fp.save(state, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=weights_only, mmap=mmap)
    assert zoo.difference(state, loaded) is None


@has_alignment
@pytest.mark.parametrize("alignment", [64, 4096])
def test_torch_load_finds_the_storages_by_calculation(
    alignment: int,
    aligned_to: Callable[[int], None],
    tmp_path: Path,
) -> None:
    state = next(e for e in zoo.ENTRIES if e.name == "whole_run").build()
    aligned_to(alignment)
    fp.save(state, tmp_path / "model.pt")
    aligned_to(64)
    config.load.calculate_storage_offsets = True
    loaded = torch.load(tmp_path / "model.pt", weights_only=False, mmap=True)
    assert zoo.difference(state, loaded) is None


# --- Words that torch uses too ---

WORDS = ["cpu", "storage", "data", "archive", "torch", "FloatStorage", "_rebuild_tensor_v2"]
WORDS += [str(number) for number in range(12)] + ["torch.float32", "é", "\x80", "", "collections"]


def _again(word: str) -> str:
    """An equal string that is another object, where Python has more than one."""
    return "".join(list(word))


@pytest.mark.parametrize("make", [lambda word: word, _again], ids=["same", "equal"])
def test_words_that_torch_uses_itself_keep_their_identity(
    make: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {make(word): torch.arange(3.0) for word in WORDS}
    state = [make("cpu"), make("storage"), tensors, {w: make(w) for w in WORDS}, make("cpu")]
    expected = saved_by_torch(state)
    assert first_difference(saved_by_us(state), expected) is None
    monkeypatch.setattr(_capture, "_fast_path_works", lambda: False)
    assert first_difference(saved_by_us(state), expected) is None


def test_a_set_is_written_in_the_order_of_this_process(run_python: Any) -> None:
    program = """
import io, fastpersist as fp, torch
state = {"tags": {"alpha", "beta", "gamma", "delta"}, "frozen": frozenset("xyz"), "w": 1}
ours, theirs = io.BytesIO(), io.BytesIO()
fp.save(state, ours)
torch.save(state, theirs)
print(ours.getvalue() == theirs.getvalue(), list(state["tags"]))
"""
    outputs = {run_python(program, environment={"PYTHONHASHSEED": s}).stdout for s in "12"}
    assert all(output.startswith("True") for output in outputs)
    assert len(outputs) == 2  # the orders did differ


# --- Random states ---


class RandomState:
    """Makes states of everything that checkpoints hold, with much sharing."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.known: list[Any] = [torch.arange(12.0)]

    def make(self, depth: int = 0) -> Any:
        if self.random.random() < 0.2:
            return self.random.choice(self.known)
        kinds: list[Callable[[], Any]] = [self._tensor, self._text, self._number]
        if depth < 4:
            kinds += [lambda: self._container(depth + 1)] * 3
        made = self.random.choice(kinds)()
        self.known.append(made)
        return made

    def _tensor(self) -> Any:
        known = [t for t in self.known if type(t) is torch.Tensor and t.numel() > 1]
        base = self.random.choice(known) if known and self.random.random() < 0.5 else None
        if base is not None:
            flat = base.reshape(-1)
            return flat[self.random.randrange(flat.numel()) :]
        shape = [self.random.choice([0, 1, 2, 3, 300]) for _ in range(self.random.randrange(4))]
        dtype = self.random.choice([torch.float32, torch.int64, torch.bfloat16, torch.bool])
        tensor = torch.zeros(shape[:2] + [min(n, 3) for n in shape[2:]], dtype=dtype)
        if self.random.random() < 0.3:
            tensor = tensor.transpose(0, -1) if tensor.dim() else tensor
        if self.random.random() < 0.3:
            return torch.nn.Parameter(tensor, requires_grad=dtype.is_floating_point)
        return tensor

    def _text(self) -> str:
        word = self.random.choice([*WORDS, "w" * 255, "w" * 256, "ü" * 128, "\ud800", "a\nb"])
        return word if self.random.random() < 0.5 else _again(word)

    def _number(self) -> Any:
        near = self.random.choice([0, 1 << 8, 1 << 16, 1 << 31, 1 << 63, 1 << 64, 1 << 2040])
        small = self.random.choice([-near, near]) + self.random.randrange(-2, 3)
        return self.random.choice([small, self.random.gauss(0, 1), True, False, None])

    def _container(self, depth: int) -> Any:
        length = self.random.choice([0, 1, 1, 2, 3, 4, 5])
        values = [self.make(depth) for _ in range(length)]
        kind = self.random.randrange(4)
        if kind == 0:
            return values
        if kind == 1:
            return tuple(values)
        keys = [self._text() if self.random.random() < 0.7 else self._number() for _ in values]
        return (dict if kind == 2 else OrderedDict)(zip(keys, values, strict=True))


@pytest.mark.parametrize("seed", range(0, 400, 100))
def test_random_states_equal_torch_with_both_picklers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(seed, seed + 100):
        state = RandomState(number).make()
        try:
            expected = saved_by_torch(state)
        except UnicodeEncodeError:
            continue
        assert first_difference(saved_by_us(state), expected) is None, f"seed {number}"
        with monkeypatch.context() as patch:
            patch.setattr(_capture, "_fast_path_works", lambda: False)
            assert first_difference(saved_by_us(state), expected) is None, f"seed {number}"


@pytest.mark.parametrize("length", [999, 1000, 1001, 1999, 2000, 2001])
def test_batches_of_a_thousand_equal_torch(length: int) -> None:
    for state in (
        dict.fromkeys(range(length)),
        OrderedDict.fromkeys(range(length)),
        list(range(length)),
        tuple(range(length)),
        {str(n): [n] for n in range(length)},
    ):
        assert first_difference(saved_by_us(state), saved_by_torch(state)) is None


# --- When torch is not as known ---


@pytest.fixture
def unknown_torch(monkeypatch: pytest.MonkeyPatch) -> str:
    reason = "torch 9.9 writes files that we do not know"
    monkeypatch.setattr(_capture, "self_test", lambda: reason)
    return reason


def test_an_unknown_torch_writes_itself_with_one_warning(
    unknown_torch: str, tmp_path: Path, warned: Any
) -> None:
    state = plain_state()
    for _ in range(3):
        info = fp.save(state, tmp_path / "model.pt")
    assert (info.engine, info.engine_reason, info.direct) == ("torch", unknown_torch, False)
    assert info.bytes == os.path.getsize(tmp_path / "model.pt")
    assert zoo.same(state, torch.load(tmp_path / "model.pt", weights_only=True))
    assert [unknown_torch in message for message in warned()] == [True]


def test_an_unknown_torch_leaves_the_old_file_when_it_fails(
    unknown_torch: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    fp.save({"step": 1}, path)
    before = read(path)
    with pytest.raises(fp.UnsupportedStateError, match="hook"):
        fp.save({"weight": torch.ones(9), "hook": lambda: 0}, path)
    assert read(path) == before
    assert os.listdir(tmp_path) == ["model.pt"]


def test_an_unknown_torch_writes_to_file_objects(unknown_torch: str) -> None:
    state = plain_state()
    buffer = io.BytesIO()
    info = fp.save(state, buffer)
    assert info.bytes == len(buffer.getvalue())
    assert buffer.getvalue() == saved_by_torch(state)


def test_a_private_function_that_changed_means_an_unknown_torch(run_python: Any) -> None:
    program = """
import fastpersist as fp, torch
real = torch.serialization._save
def changed(*arguments, **more):
    if not isinstance(arguments[1], torch._C.PyTorchFileWriter):
        raise TypeError("another signature")
    return real(*arguments, **more)
torch.serialization._save = changed
info = fp.save([torch.ones(3)], "a.pt")
print(info.engine, torch.load("a.pt")[0].tolist())
print(info.engine_reason)
"""
    first, reason = run_python(program).stdout.splitlines()
    assert first == "torch [1.0, 1.0, 1.0]"
    assert "another signature" in reason


def test_skip_data_is_left_to_torch(tmp_path: Path) -> None:
    if not hasattr(torch.serialization, "skip_data"):
        pytest.skip("skipped: this torch has no skip_data")
    state = {"weight": torch.full((1000,), 7.0)}
    with torch.serialization.skip_data():
        info = fp.save(state, tmp_path / "model.pt")
    assert info.engine == "torch"
    assert info.bytes == os.path.getsize(tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=True)["weight"].sum() == 0
