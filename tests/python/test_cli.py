# SPDX-License-Identifier: Apache-2.0
"""The program `fastpersist`, run as a user runs it but without Python within its reach.

The files are made by torch and by safetensors, which also judge what was converted. What
docs/cli.md promises (examples, statuses, the keys of the JSON) is taken from there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import termios
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults_child
import faults_support as faults
import pytest
import torch
from conftest import REPOSITORY, read
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_docs import blocks_of, commands_of
from test_storage_faults import cut_when_reached

import fastpersist as fp

PROGRAM = Path(os.environ.get("FASTPERSIST_PROGRAM", REPOSITORY / "build/release/fastpersist"))
MANUAL = (REPOSITORY / "docs/cli.md").read_text()

pytestmark = pytest.mark.skipif(
    not PROGRAM.is_file(), reason=f"skipped: {PROGRAM} is not built (make build)"
)

GOOD, DAMAGED, USAGE, STORAGE = 0, 1, 2, 3

Done = subprocess.CompletedProcess


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., Done[str]]:
    """Runs the program in tmp_path with an empty environment; names may be bytes."""

    def run(*arguments: Any, status: int | None = GOOD, **options: Any) -> Done[str]:
        done = subprocess.run(
            [PROGRAM, *arguments],
            cwd=tmp_path,
            env={},
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=subprocess.PIPE,
            timeout=120,
            **options,
        )
        done.stdout = (done.stdout or b"").decode()
        done.stderr = done.stderr.decode()
        assert status is None or done.returncode == status, (done.stdout, done.stderr)
        return done

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small PyTorch file of torch's: two tensors that share, one apart, one value."""
    path = tmp_path / "model.pt"
    w = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    torch.save({"w": w, "tied": w, "b": torch.ones(5, dtype=torch.bfloat16), "step": 3}, path)
    return path


def complaint(done: Done[str]) -> str:
    """The one line on stderr."""
    (line,) = done.stderr.splitlines()
    assert line.startswith("fastpersist: ")
    return line


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    return tensor.dtype, tuple(tensor.shape), raw


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return {k: bits(v) for k, v in ours.items()} == {k: bits(v) for k, v in theirs.items()}


# --- What the manual says ---


def documented_keys(command: str) -> set[str]:
    """The first column of the table in the section of this command."""
    section = MANUAL.split(f"\n## {command}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|", section, re.M)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def documented_keys_within(command: str, key: str) -> set[str]:
    """The words in code marks in the third column of the row of this key."""
    section = MANUAL.split(f"\n## {command}\n")[1].split("\n## ")[0]
    (text,) = re.findall(rf"^\| [^|]*`{key}`[^|]* \| [^|]+ \| (.*) \|$", section, re.M)
    return set(re.findall(r"`(\w+)`", text))


def document(done: Done[str], command: str) -> dict[str, Any]:
    """The JSON on stdout, its keys compared with the manual."""
    found = json.loads(done.stdout)
    assert list(found)[:2] == ["schema", "command"]
    assert (found["schema"], found["command"]) == (1, command)
    keys = set(found) - {"schema", "command"}
    optional = {"archive", "metadata"} if command == "inspect" else set()
    assert keys - optional == documented_keys(command) - optional
    assert keys <= documented_keys(command)
    return dict(found)


def test_the_examples_of_the_manual_run(tmp_path: Path, model: Path) -> None:
    torch.save({"w": torch.ones(3)}, model)
    a = torch.arange(4.0)
    torch.save({"a": a, "b": a, "lr": 0.1}, tmp_path / "checkpoint.pt")
    blocks = [b for b in blocks_of(MANUAL) if b.not_run and "test_cli.py" in b.not_run]
    assert len(blocks) == 4
    for block in blocks:
        done = subprocess.run(
            ["/bin/bash", "-eu", "-c", commands_of(block)],
            cwd=tmp_path,
            env={"PATH": str(PROGRAM.parent)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"docs/cli.md:{block.line}: {done.stderr}"
        assert done.stdout


def test_the_help_of_every_command_has_an_example_and_its_options(
    cli: Callable[..., Done[str]],
) -> None:
    everything = cli("--help").stdout
    for command in ("inspect", "verify", "convert", "bench"):
        assert f"fastpersist {command} " in everything
        text = cli(command, "--help").stdout
        assert f"Examples:\n  fastpersist {command} " in text
        completion = (REPOSITORY / "scripts/completion/fastpersist.bash").read_text()
        manual_page = (REPOSITORY / "docs/man/fastpersist.1").read_text().replace("\\-", "-")
        (offered,) = re.findall(rf'{command}\) words="([^"]+)"', completion)
        options = set(re.findall(r"(?<![\w-])--[a-z-]+", text))
        own = set(re.findall(r"^  (?:-h,)?(--[a-z-]+)", text, re.M))
        assert own == set(offered.split())
        assert own <= options
        assert all(option in manual_page for option in own)


def test_the_version_is_the_packages(cli: Callable[..., Done[str]]) -> None:
    assert cli("--version").stdout == f"fastpersist {fp.__version__}\n"
    manual_page = (REPOSITORY / "docs/man/fastpersist.1").read_text()
    assert f'"fastpersist {fp.__version__}"' in manual_page


# --- Statuses and messages ---


def test_a_wrong_command_line_is_a_usage_error(cli: Callable[..., Done[str]], model: Path) -> None:
    for arguments in (
        [],
        ["nothing"],
        ["inspect"],
        ["inspect", model, "--nothing"],
        ["inspect", model, model],
        ["bench", ".", "--engine", "steam"],
        ["bench", ".", "--size", "many"],
        ["bench", ".", "--size", "1"],
        ["bench", ".", "--rounds", "0"],
        ["convert", model],
        ["convert", model, "model.txt"],
        ["convert", model, "other.pt"],
    ):
        done = cli(*arguments, status=USAGE)
        assert done.stdout == ""
        complaint(done)


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_a_missing_file_and_a_folder_are_told_from_damage(
    command: str, cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    out = ["out.safetensors"] if command == "convert" else []
    assert "missing.pt" in complaint(cli(command, "missing.pt", *out, status=STORAGE))
    cli(command, "missing.pt/in-no-folder", *out, status=STORAGE)
    assert "directory" in complaint(cli(command, tmp_path, *out, status=DAMAGED))


@pytest.mark.parametrize("content", [b"", b"text" * 100, b"\0" * 4096, b"PK\3\4" + b"\0" * 500])
@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_what_is_no_checkpoint_has_status_1(
    command: str, content: bytes, cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    out = ["out.safetensors"] if command == "convert" else []
    done = cli(command, "x.pt", *out, status=DAMAGED)
    assert "x.pt" in done.stdout + done.stderr


def run_as_somebody(words: list[str]) -> tuple[int, str]:
    done = subprocess.run(words, env={}, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_files_that_may_not_be_read_have_status_3(command: str, model: Path) -> None:
    model.chmod(0)
    for folder in (model.parent, model.parent.parent, model.parent.parent.parent):
        folder.chmod(0o755)
    target = [f"{model}.safetensors"] if command == "convert" else []
    words = [str(PROGRAM), command, str(model), *target]
    status, said = faults.run(run_as_somebody, words, user=faults.is_root())
    assert status == STORAGE
    (line,) = said.splitlines()
    assert "ermission" in line and str(model) in line


@pytest.mark.parametrize("protocol", range(1, 6))
def test_a_file_of_torch_before_1_6_is_named_whatever_its_pickle_protocol(
    protocol: int, cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    path = tmp_path / "old.pt"
    state = {"w": torch.ones(3)}
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    said = complaint(cli("inspect", path, status=DAMAGED))
    assert "PyTorch before 1.6, or _use_new_zipfile_serialization=False" in said


# --- Reads that fail ---


@pytest.fixture(scope="session")
def shim() -> Iterator[str]:
    """The compiled testing/preload/faults.c."""
    if (library := faults_child._compiled_shim()) is None:
        pytest.skip("skipped: gcc is not installed, so the failing calls cannot be compiled")
    yield library
    shutil.rmtree(Path(library).parent)


def run_with_faults(words: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """Without io_uring and libaio, whose reads do not go through the C library."""
    faults.refuse_system_calls([425, 206])
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, int]:
    """A file of many blocks, and an offset in the middle of its first tensor."""
    path = tmp_path / "large.pt"
    torch.save({"big": torch.arange(8e6), "small": torch.ones(3)}, path)
    return path, path.read_bytes().index(struct.pack("<2f", 4e6, 4e6 + 1))


@pytest.mark.parametrize("command", ["verify", "convert"])
def test_a_device_that_fails_in_the_middle_of_a_file_has_status_3(
    command: str, large: tuple[Path, int], shim: str, tmp_path: Path
) -> None:
    path, at = large
    target = tmp_path / "out.safetensors"
    words = [str(PROGRAM), command, str(path)] + ([str(target)] if command == "convert" else [])
    rule = f"pread-at {at} {at} errno {errno.EIO} large.pt"
    environment = {"LD_PRELOAD": shim, "FASTPERSIST_FAULTS": rule}
    status, out, said = faults.run(run_with_faults, words, environment)
    assert status == STORAGE, (out, said)
    assert "Input/output error" in said and str(path) in said and "offset" in said
    assert not target.exists()
    assert faults.run(run_with_faults, words, {})[0] == GOOD


def verify_a_file_that_shrinks(path: str, at: int, shim: str) -> tuple[int, str, str]:
    hold = f"{path}.hold"
    Path(hold).touch()
    threading.Thread(target=cut_when_reached, args=(path, at, hold)).start()
    rule = f"pread-at {at} {at} hold 0 large.pt"
    environment = {"LD_PRELOAD": shim, "FASTPERSIST_FAULTS": rule, "FASTPERSIST_HOLD": hold}
    return run_with_faults([str(PROGRAM), "verify", path], environment)


def test_a_file_that_shrinks_while_it_is_verified_is_damaged(
    large: tuple[Path, int], shim: str
) -> None:
    path, at = large
    status, out, said = faults.run(verify_a_file_that_shrinks, str(path), at, shim)
    assert status == DAMAGED, (out, said)
    assert "longer when it was opened" in out + said and str(path) in out + said


def test_a_reader_that_goes_early_is_no_error(cli: Callable[..., Done[str]], model: Path) -> None:
    for arguments in (["inspect", model], ["verify", "--json", model], ["--help"]):
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = cli(*arguments, stdout=write_end)
        os.close(write_end)
        assert done.stderr == ""


def test_a_full_disk_behind_stdout_is_an_error(cli: Callable[..., Done[str]], model: Path) -> None:
    with open("/dev/full", "wb") as full:
        assert "No space left" in complaint(cli("inspect", model, stdout=full, status=STORAGE))


def test_options_may_stand_anywhere_and_names_may_look_like_commands(
    cli: Callable[..., Done[str]], model: Path, tmp_path: Path
) -> None:
    assert cli("inspect", "--json", model).stdout == cli("inspect", model, "--json").stdout
    for name in ("verify", "-x.pt"):
        shutil.copy(model, tmp_path / name)
        assert cli("inspect", "--", name).stdout.startswith(name)


# --- inspect ---


def test_inspect_tells_everything_about_a_file_of_torchs(
    cli: Callable[..., Done[str]], model: Path
) -> None:
    text = cli("inspect", model).stdout
    assert "PyTorch file" in text and "3 tensors" in text and "byte order little" in text
    assert "shares data/0 with 'w'" in text
    assert re.search(r"^w +float32 \[3, 4\] +48  data/0$", text, re.M)
    assert re.search(r"^  step +3$", text, re.M)
    found = document(cli("inspect", model, "--json"), "inspect")
    assert found["format"] == "torch" and found["bytes"] == model.stat().st_size
    assert found["tensor_bytes"] == 48 + 48 + 10 and found["storage_bytes"] == 48 + 10
    assert set(found["archive"]) == documented_keys_within("inspect", "archive")
    assert found["archive"]["prefix"] == "model" and found["archive"]["byteorder"] == "little"
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    for tensor in found["tensors"]:
        assert set(tensor) == documented_keys_within("inspect", "tensors")
    assert by_name["tied"]["shares_with"] == "w" and by_name["w"]["shares_with"] is None
    assert by_name["w"]["shape"] == [3, 4] and by_name["w"]["strides"] == [4, 1]
    assert by_name["b"]["dtype"] == "bfloat16"
    assert found["values"] == [{"name": "step", "text": "3", "opaque": False}]
    with zipfile.ZipFile(model) as archive:
        crcs = [archive.getinfo(f"model/data/{i}").CRC for i in (0, 1)]
    assert [s["crc32"] for s in found["storages"]] == [f"{crc:08x}" for crc in crcs]


class Opaque:
    """Something that only Python can make."""


def test_inspect_marks_what_only_python_can_make(
    cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(2), "thing": Opaque()}, tmp_path / "x.pt")
    assert "opaque: " in cli("inspect", "x.pt").stdout
    values = document(cli("inspect", "x.pt", "--json"), "inspect")["values"]
    assert any(value["opaque"] and "Opaque" in value["text"] for value in values)


def test_inspect_shows_the_metadata_of_safetensors(
    cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    save_file({"w": torch.ones(2, 3)}, tmp_path / "x.safetensors", metadata={"who": "me\x1b[31m"})
    text = cli("inspect", "x.safetensors").stdout
    assert "safetensors file" in text and r"metadata: who = me\x1b[31m" in text
    found = document(cli("inspect", "x.safetensors", "--json"), "inspect")
    assert found["metadata"] == {"who": "me\x1b[31m"} and "archive" not in found


def test_names_cannot_command_the_terminal_nor_break_lines(
    cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    hostile = "a\x1b]0;title\x07\nb\u202ec\x9bd\x7f"
    torch.save({hostile: torch.ones(1), "v\r": "\x1b[2J"}, tmp_path / "x.pt")
    text = cli("inspect", "x.pt").stdout
    assert r"a\x1b]0;title\x07\nb\u202ec\u009bd\x7f" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert hostile in [
        t["name"] for t in json.loads(cli("inspect", "x.pt", "--json").stdout)["tensors"]
    ]


def test_names_of_files_that_are_not_utf8_do_not_break_the_json(
    cli: Callable[..., Done[str]], model: Path, tmp_path: Path
) -> None:
    name = b"m\xff\x1b.pt"
    shutil.copy(model, os.path.join(os.fsencode(tmp_path), name))
    for command in ("inspect", "verify"):
        assert json.loads(cli(command, "--json", name).stdout)["file"] == "m\ufffd\x1b.pt"
        assert r"m\xff\x1b.pt" in cli(command, name).stdout
    assert r"n\xff" in complaint(cli("inspect", b"n\xff", status=STORAGE))


# --- On a terminal ---


def on_terminal(arguments: list[Any], folder: Path, terminal: str = "xterm") -> tuple[int, str]:
    """Runs the program with stdout and stderr on a terminal; returns status and what it shows."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [PROGRAM, *arguments], cwd=folder, env={"TERM": terminal}, stdout=other, stderr=other
    )
    os.close(other)
    shown = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(main)
    return process.wait(timeout=60), shown.decode().replace("\r\n", "\n")


def test_a_terminal_gets_the_first_rows_and_the_number_of_others(
    cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    torch.save({f"t{i}": torch.ones(1) for i in range(60)}, tmp_path / "x.pt")
    status, shown = on_terminal(["inspect", "x.pt"], tmp_path)
    assert status == 0
    assert "t49 " in shown and "t50 " not in shown and "10 more tensors" in shown
    _, everything = on_terminal(["inspect", "--all", "x.pt"], tmp_path)
    assert "t59 " in everything and "more tensors" not in everything
    assert everything == cli("inspect", "x.pt").stdout


def test_a_short_command_shows_no_progress_even_on_a_terminal(model: Path) -> None:
    status, shown = on_terminal(["verify", model], model.parent)
    assert status == 0
    assert "\x1b" not in shown and "verifying" not in shown


# --- verify ---


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def body_offset(path: Path, record: str) -> int:
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo(record).header_offset
    with open(path, "rb") as file:
        file.seek(at + 26)
        name, extra = struct.unpack("<HH", file.read(4))
    return at + 30 + name + extra


def test_verify_finds_a_good_file_good(cli: Callable[..., Done[str]], model: Path) -> None:
    text = cli("verify", model).stdout
    assert "good, 3 tensors" in text and "GB/s" in text
    found = document(cli("verify", "--json", model), "verify")
    assert found["good"] and found["damages"] == [] and found["checked_records"] >= 4
    assert found["unchecked_records"] == 0
    assert set(found["read"]) == documented_keys_within("verify", "read")
    quick = document(cli("verify", "--quick", "--json", model), "verify")
    assert quick["good"] and quick["quick"] and quick["read"]["bytes"] == 0
    assert "no data was read" in cli("verify", "--quick", model).stdout


def test_verify_names_every_damaged_record(cli: Callable[..., Done[str]], model: Path) -> None:
    for record in ("model/data/0", "model/data/1"):
        flip(model, body_offset(model, record) + 3)
    lines = cli("verify", model, status=DAMAGED).stdout.splitlines()
    assert [line.startswith("damaged: ") for line in lines] == [True, True, False]
    assert "2 damages" in lines[-1]
    found = document(cli("verify", "--json", model, status=DAMAGED), "verify")
    assert not found["good"] and len(found["damages"]) == 2
    for damage, names in zip(found["damages"], (("w", "tied", "data/0"), ("b", "data/1"))):
        assert set(damage) == documented_keys_within("verify", "damages")
        assert damage["code"] == "corrupt"
        assert damage["expected_crc32"] != damage["found_crc32"]
        assert any(name in damage["entry"] for name in names), damage
    assert "no data was read" in cli("verify", "--quick", model).stdout, "sizes are good"


def test_verify_calls_a_truncated_file_damaged(cli: Callable[..., Done[str]], model: Path) -> None:
    os.truncate(model, model.stat().st_size - 100)
    for options in ([], ["--quick"]):
        assert "damaged: " in cli("verify", model, *options, status=DAMAGED).stdout
    found = document(cli("verify", "--json", model, status=DAMAGED), "verify")
    assert not found["good"] and found["format"] is None and len(found["damages"]) == 1


def test_verify_does_not_claim_checksums_that_safetensors_lacks(
    cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(100), "b": torch.zeros(3)}, path)
    text = cli("verify", path).stdout
    assert "2 tensors read without error; the format carries no checksums" in text
    found = document(cli("verify", "--json", path), "verify")
    assert found["good"] and found["checked_records"] == 0 and found["unchecked_records"] == 2
    os.truncate(path, path.stat().st_size - 1)
    cli("verify", "--quick", path, status=DAMAGED)


# --- convert ---


def plain_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    whole = torch.arange(100, dtype=torch.int64)
    return {
        "float": torch.randn(300, 7),
        "bf16": torch.randn(33).to(torch.bfloat16),
        "half": torch.randn(5).half(),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "bool": torch.tensor([True, False]),
        "bytes": torch.arange(255, dtype=torch.uint8),
        "complex": torch.randn(4, dtype=torch.complex64),
        "e4m3": torch.randn(9).to(torch.float8_e4m3fn),
        "e5m2": torch.randn(9).to(torch.float8_e5m2),
        "u16": torch.tensor([1, 65535], dtype=torch.uint16),
        "u64": torch.tensor([7], dtype=torch.uint64),
        "name with \u00e9 and \n": torch.ones(1, dtype=torch.int8),
        "large": torch.randn(3_000_000),
        # Two parts of one storage, apart from each other, and one that is not row-major.
        "head": whole[:10],
        "tail": whole[40:60],
        "transposed": torch.randn(40, 30).t(),
    }


def test_converted_files_hold_the_same_bits(cli: Callable[..., Done[str]], tmp_path: Path) -> None:
    state = plain_state()
    torch.save(state, tmp_path / "x.pt")
    done = cli("convert", "x.pt", "x.safetensors")
    assert done.stderr == "" and f"{len(state)} tensors" in done.stdout
    assert same(load_file(tmp_path / "x.safetensors"), state)
    assert cli("verify", "x.safetensors").returncode == GOOD
    done = cli("convert", "x.safetensors", "back.pt")
    assert done.stderr == ""
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert same(back, state)
    assert "good" in cli("verify", "back.pt").stdout
    assert json.loads(cli("inspect", "--json", "back.pt").stdout)["archive"]["prefix"] == "back"


def test_an_expanded_tensor_is_written_out_when_that_is_asked_for(
    cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    state = {"expanded": torch.randn(3, 1).expand(3, 4)}
    torch.save(state, tmp_path / "x.pt")
    assert "'expanded'" in cli("convert", "x.pt", "x.safetensors", status=None).stderr
    cli("convert", "--duplicate-shared", "x.pt", "x.safetensors")
    assert same(load_file(tmp_path / "x.safetensors"), state)


def test_converted_files_are_those_of_the_formats_own_writers(
    cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    state = {k: v.contiguous().clone() for k, v in plain_state().items()}
    torch.save(state, tmp_path / "x.pt")
    cli("convert", "x.pt", "x.safetensors")
    save_file(state, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert read(tmp_path / "x.safetensors") == read(tmp_path / "theirs.safetensors")
    (tmp_path / "ours").mkdir()
    cli("convert", "x.safetensors", "ours/y.pt")
    order = json.loads(cli("inspect", "--json", "x.safetensors").stdout)["tensors"]
    torch.save({t["name"]: state[t["name"]] for t in order}, tmp_path / "y.pt")
    assert read(tmp_path / "ours/y.pt") == read(tmp_path / "y.pt")


@pytest.mark.parametrize("state", [{}, {"only": torch.ones(2)}, {"e": torch.empty(0)}])
def test_small_states_are_converted(
    state: dict[str, torch.Tensor], cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "x.pt")
    cli("convert", "x.pt", "x.safetensors")
    assert same(load_file(tmp_path / "x.safetensors"), state)
    cli("convert", "x.safetensors", "back.pt")
    assert same(torch.load(tmp_path / "back.pt"), state)


def test_shared_memory_is_refused_with_both_names_or_written_out(
    cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    w = torch.arange(10.0)
    state = {"w": w, "tied": w, "part": w[8:], "apart": torch.ones(1), "none": w[:0]}
    torch.save(state, tmp_path / "x.pt")
    said = complaint(cli("convert", "x.pt", "x.safetensors", status=DAMAGED))
    assert "'tied' with 'w'" in said and "'part' with 'w'" in said and "--duplicate-shared" in said
    assert "apart" not in said and "none" not in said
    assert not (tmp_path / "x.safetensors").exists()
    done = cli("convert", "x.pt", "x.safetensors", "--duplicate-shared", "--json")
    assert same(load_file(tmp_path / "x.safetensors"), state)
    found = document(done, "convert")
    assert sorted(found["duplicated"]) == ["part", "tied"]
    assert found["warnings"] and f"warning: {found['warnings'][0]}" in done.stderr
    assert found["bytes"] == (tmp_path / "x.safetensors").stat().st_size


def test_what_is_no_tensor_is_refused_by_name_or_left_out(
    cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    state = {"model": {"w": torch.ones(2)}, "step": 3, "thing": Opaque()}
    torch.save(state, tmp_path / "x.pt")
    said = complaint(cli("convert", "x.pt", "x.safetensors", status=DAMAGED))
    assert "'step'" in said and "'thing'" in said and "--tensors-only" in said
    assert "model" not in said
    done = cli("convert", "x.pt", "x.safetensors", "--tensors-only")
    assert "'step'" in done.stderr and "joined by dots" in done.stderr
    assert same(load_file(tmp_path / "x.safetensors"), {"model.w": torch.ones(2)})


def test_a_state_dict_of_a_module_is_converted_without_a_word(
    cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save(module.state_dict(), tmp_path / "x.pt")
    assert cli("convert", "x.pt", "x.safetensors").stderr == ""
    assert same(load_file(tmp_path / "x.safetensors"), module.state_dict())


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(2, dtype=torch.complex128), r"'bad' \(complex128\)"),
        (torch.ones(2, dtype=torch.complex64).conj(), "lazy conjugates.*'bad'"),
        (torch.ones(2, device="meta"), r"no tensors \(.*\): 'bad'$"),  # so does torch save it
    ],
)
def test_what_safetensors_cannot_hold_is_refused_by_name(
    tensor: torch.Tensor, reason: str, cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    torch.save({"fine": torch.ones(1), "bad": tensor}, tmp_path / "x.pt")
    said = complaint(cli("convert", "x.pt", "x.safetensors", status=DAMAGED))
    assert re.search(reason, said) and "fine" not in said
    assert os.listdir(tmp_path) == ["x.pt"]


def test_metadata_is_lost_with_a_warning(cli: Callable[..., Done[str]], tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"who": "me"})
    done = cli("convert", "x.safetensors", "x.pt")
    assert "metadata is lost" in done.stderr


def test_an_output_that_exists_is_replaced_only_by_force(
    cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    out = tmp_path / "x.safetensors"
    out.write_bytes(b"old")
    assert "--force" in complaint(cli("convert", "x.pt", out, status=USAGE))
    assert out.read_bytes() == b"old"
    cli("convert", "x.pt", out, "--force")
    assert same(load_file(out), {"w": torch.ones(2)})


def test_the_input_cannot_be_the_output(cli: Callable[..., Done[str]], tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    (tmp_path / "x.safetensors").symlink_to("x.pt")
    before = read(tmp_path / "x.pt")
    for out in ("x.pt", "./x.pt", "x.safetensors"):
        said = complaint(cli("convert", "--force", "x.pt", out, status=USAGE))
        assert "same file" in said
    assert read(tmp_path / "x.pt") == before


def test_a_damaged_input_is_not_converted(cli: Callable[..., Done[str]], tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(2)}, path)
    flip(path, body_offset(path, "x/data/0"))
    assert "damaged" in complaint(cli("convert", path, "x.safetensors", status=DAMAGED))
    assert os.listdir(tmp_path) == ["x.pt"]


def test_an_output_that_cannot_be_written_has_status_3(
    cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    done = cli("convert", "x.pt", "no/such/folder/x.safetensors", status=STORAGE)
    assert "x.safetensors" in complaint(done)


def test_a_large_file_is_converted_in_little_memory(
    cli: Callable[..., Done[str]], tmp_path: Path
) -> None:
    size = 600 << 20
    fp.save({"w": torch.zeros(size, dtype=torch.uint8)}, tmp_path / "x.pt")
    kilobytes = (400 << 20) // 1024
    command = [PROGRAM, "convert", "x.pt", "x.safetensors"]
    done = subprocess.run(
        ["/bin/bash", "-c", f'ulimit -v {kilobytes}; exec "$@"', "-", *command],
        cwd=tmp_path,
        env={},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.get_slice("w").get_shape() == [size]


# --- bench and interrupts ---


def test_bench_measures_and_leaves_nothing(cli: Callable[..., Done[str]], tmp_path: Path) -> None:
    text = cli("bench", ".", "--size", "8M", "--rounds", "1", "--engine", "threads").stdout
    assert re.search(r"^save +\d+\.\d\d GB/s  \d+ % of raw$", text, re.M)
    found = document(cli("bench", "--json", "--size", "70M", "--rounds", "2", tmp_path), "bench")
    assert found["bytes"] == 70 << 20
    for step in ("raw_write", "save", "raw_read", "load"):
        assert set(found[step]) == {"seconds", "bytes_per_second"}
        assert len(found[step]["seconds"]) == 2
    assert os.listdir(tmp_path) == []
    cli("bench", "no-such-folder", status=STORAGE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_nothing(number: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [PROGRAM, "bench", ".", "--size", "16M", "--rounds", "100"],
        cwd=tmp_path,
        env={},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not any(tmp_path.rglob("*")):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert said == "fastpersist: interrupted\n"
    assert os.listdir(tmp_path) == []


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    fp.save({"w": torch.zeros(900 << 20, dtype=torch.uint8)}, tmp_path / "x.pt")
    process = subprocess.Popen(
        [PROGRAM, "convert", "x.pt", "x.safetensors"], cwd=tmp_path, env={}, stderr=subprocess.PIPE
    )
    while not list(tmp_path.glob(".fp-*")):
        time.sleep(0.001)
        if process.poll() is not None:
            pytest.skip("skipped: the conversion was too fast to be interrupted")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    # Whoever comes too late finds a complete file.
    assert process.returncode in (130, GOOD)
    assert sorted(os.listdir(tmp_path)) == (
        ["x.pt"] if process.returncode == 130 else ["x.pt", "x.safetensors"]
    )
