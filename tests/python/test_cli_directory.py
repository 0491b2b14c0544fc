# SPDX-License-Identifier: Apache-2.0
"""The program `fastpersist` on directories of checkpoints: ls, prune, inspect, verify.

The directories are written here from what docs/format.md says, so that page and program check each
other. The files in them are torch's.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from test_cli import (
    DAMAGED,
    GOOD,
    MANUAL,
    PROGRAM,
    STORAGE,
    USAGE,
    Done,
    cli,
    complaint,
)
from test_docs import blocks_of, commands_of

pytestmark = pytest.mark.skipif(
    not PROGRAM.is_file(), reason=f"skipped: {PROGRAM} is not built (make build)"
)

__all__ = ["cli"]

Cli = Callable[..., Done[str]]

ROOT_ID = "fedcba9876543210" * 2
JOB = "0123456789abcdef" * 2


def crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def manifest_text(inner: dict[str, Any]) -> str:
    canonical = json.dumps(inner, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return json.dumps({"crc32": crc(canonical.encode()), "manifest": inner})


def manifest_of(step: int, sequence: int, name: str, data: bytes) -> dict[str, Any]:
    part = {"root": ROOT_ID, "file": "state.pt", "offset": 0, "length": len(data)}
    part["crc32"] = crc(data)
    stream = {"name": "state.pt", "format": "torch", "size": len(data), "crc32": crc(data)}
    return {
        "version": 1,
        "reader_version": 1,
        "step": step,
        "sequence": sequence,
        "world_size": 1,
        "generation": name,
        "job": JOB,
        "created": "2025-01-31T12:00:00Z",
        "library": "a test",
        "metadata": json.dumps({"loss": step / 8}),
        "streams": [{**stream, "record_crc32s": [], "parts": [part]}],
    }


def write_checkpoint(root: Path, step: int, sequence: int, name: str | None = None) -> Path:
    folder = root / (name or f"step-{step:08}")
    folder.mkdir(parents=True)
    owner = {"version": 1, "generation": folder.name, "job": JOB, "root": ROOT_ID}
    (folder / "owner.json").write_text(json.dumps(owner))
    torch.save({"w": torch.full((100,), float(step)), "step": step}, folder / "state.pt")
    data = (folder / "state.pt").read_bytes()
    (folder / "manifest.json").write_text(
        manifest_text(manifest_of(step, sequence, folder.name, data))
    )
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 100, 200, 300, saved in this order."""
    root = tmp_path / "runs/gpt"
    root.mkdir(parents=True)
    (root / "fastpersist-root.json").write_text(json.dumps({"version": 1, "root": ROOT_ID}))
    for sequence, step in enumerate((100, 200, 300), 1):
        write_checkpoint(root, step, sequence)
    return root


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# --- What the manual says ---


def keys_in(text: str) -> set[str]:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|", text, re.M)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def section(heading: str) -> str:
    return MANUAL.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def document(done: Done[str], command: str, keys: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    assert list(found)[:2] == ["schema", "command"]
    assert (found["schema"], found["command"]) == (1, command)
    assert set(found) - {"schema", "command"} == keys
    return found


def test_the_examples_of_the_manual_run(tmp_path: Path, run: Path) -> None:
    blocks = [b for b in blocks_of(MANUAL) if b.not_run and "test_cli_directory.py" in b.not_run]
    assert len(blocks) == 3
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


@pytest.mark.parametrize("command", ["ls", "prune"])
def test_the_help_has_an_example_and_its_options(command: str, cli: Cli) -> None:
    assert f"fastpersist {command} " in cli("--help").stdout
    text = cli(command, "--help").stdout
    assert f"Examples:\n  fastpersist {command} " in text
    completion = (REPOSITORY / "scripts/completion/fastpersist.bash").read_text()
    manual_page = (REPOSITORY / "docs/man/fastpersist.1").read_text().replace("\\-", "-")
    (offered,) = re.findall(rf'\b{command}\) words="([^"]+)"', completion)
    own = set(re.findall(r"^  (?:-h,)?(--[a-z-]+)", text, re.M))
    assert own == set(offered.split())
    assert all(option in manual_page for option in own)


# --- ls ---


def test_ls_lists_the_newest_first(run: Path, cli: Cli) -> None:
    head, *lines = cli("ls", run).stdout.splitlines()
    assert head.split() == ["STEP", "AGE", "SIZE", "STATE", "NAME"]
    assert [line.split()[0] for line in lines] == ["300", "200", "100"]
    assert all(" complete " in line + " " for line in lines)
    assert all(re.search(r"\d+ d ", line) for line in lines)


def test_ls_orders_by_commit_and_not_by_step_or_time(run: Path, cli: Cli) -> None:
    folder = write_checkpoint(run, 7, 9)
    os.utime(folder, (0, 0))
    lines = cli("ls", run).stdout.splitlines()[1:]
    assert lines[0].split()[0] == "7"


def test_ls_in_json_has_the_documented_keys(run: Path, cli: Cli) -> None:
    found = document(cli("ls", "--json", run), "ls", keys_in(section("ls")))
    assert found["id"] == ROOT_ID
    (text,) = re.findall(r"^\| `checkpoints` \| array \| (.*) \|$", section("ls"), re.M)
    own, streams = text.split("`streams` with")
    first = found["checkpoints"][0]
    assert set(first) == set(re.findall(r"`(\w+)`", own)) | {"streams"}
    stream = first["streams"][0]
    assert set(stream) | set(stream["parts"][0]) == set(re.findall(r"`(\w+)`", streams))
    assert first["step"] == 300
    assert json.loads(first["metadata"]) == {"loss": 37.5}
    assert first["age_seconds"] > 0


def test_ls_says_why_a_checkpoint_does_not_count(run: Path, cli: Cli) -> None:
    (run / "step-00000300/state.pt").unlink()
    (run / "step-00000200/manifest.json").unlink()
    (run / "step-00000900").mkdir()
    (run / "logs").mkdir()
    found = json.loads(cli("ls", "--json", run).stdout)["checkpoints"]
    states = {entry["step"]: entry["state"] for entry in found}
    assert states == {300: "damaged", 200: "unfinished", 900: "foreign", 100: "complete"}
    lines = cli("ls", run).stdout
    assert "'state.pt' is missing" in lines
    assert "no manifest" in lines


def test_ls_never_lets_a_name_command_the_terminal(run: Path, cli: Cli) -> None:
    write_checkpoint(run, 1, 8, "evil\u202e")
    write_checkpoint(run, 2, 9, "evil\x1b[2J")  # none of ours has such a name
    text = cli("ls", run).stdout
    assert "evil\\u202e" in text
    assert "\u202e" not in text
    assert "\x1b" not in text


def test_ls_of_a_newer_version_says_what_to_do(run: Path, cli: Cli) -> None:
    path = run / "step-00000300/manifest.json"
    inner = json.loads(path.read_text())["manifest"]
    inner["reader_version"] = 2
    path.write_text(manifest_text(inner))
    assert "upgrade" in cli("ls", run).stdout


def test_reading_commands_change_nothing(run: Path, cli: Cli) -> None:
    def everything() -> list[tuple[str, int, int]]:
        paths = sorted(run.rglob("*"))
        return [(str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in paths]

    before = everything()
    for command in (["ls"], ["inspect"], ["verify"], ["prune", "--dry-run", "--keep-last", "1"]):
        cli(*command, run)
    assert everything() == before


@pytest.mark.parametrize("command", [["ls"], ["prune", "--keep-last", "1"]])
def test_a_directory_of_something_else_is_left_alone(
    command: list[str], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.txt").write_text("a")
    assert "without checkpoints" in complaint(cli(*command, "photos", status=DAMAGED))
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["a.txt"]
    complaint(cli(*command, "missing", status=STORAGE))
    assert not (tmp_path / "missing").exists()
    complaint(cli(*command, "photos/a.txt", status=STORAGE))


# --- prune ---


def test_prune_keeps_the_last(run: Path, cli: Cli) -> None:
    done = cli("prune", run, "--keep-last", "1")
    assert names(run) == ["step-00000300"]
    assert "removed step-00000100\nremoved step-00000200\n" in done.stdout
    cli("prune", run, "--keep-last", "1")
    assert names(run) == ["step-00000300"]


def test_prune_keeps_those_divisible_and_documents_its_keys(run: Path, cli: Cli) -> None:
    done = cli("prune", "--json", run, "--keep-last", "1", "--keep-every", "100")
    assert document(done, "prune", keys_in(section("prune")))["removed"] == []
    done = cli("prune", "--json", run, "--keep-last", "1", "--keep-every", "200")
    found = json.loads(done.stdout)
    assert found["removed"] == ["step-00000100"]
    assert found["bytes"] > 0
    assert names(run) == ["step-00000200", "step-00000300"]


def test_prune_dry_changes_nothing(run: Path, cli: Cli) -> None:
    done = cli("prune", "--dry-run", run, "--keep-last", "2")
    assert "would remove step-00000100" in done.stdout
    assert len(names(run)) == 3
    assert not (run / "fastpersist.lock").exists()


def test_prune_does_not_count_or_touch_damaged_ones(run: Path, cli: Cli) -> None:
    (run / "step-00000300/state.pt").write_bytes(b"")
    cli("prune", run, "--keep-last", "1")
    assert names(run) == ["step-00000200", "step-00000300"]


def test_prune_leaves_files_that_are_not_ours(run: Path, cli: Cli) -> None:
    (run / "step-00000100/notes.txt").write_text("mine")
    cli("prune", run, "--keep-last", "1")
    assert [path.name for path in (run / "step-00000100").iterdir()] == ["notes.txt"]


@contextmanager
def held_lock(run: Path) -> Iterator[None]:
    """As a running job holds it."""
    with open(run / "fastpersist.lock", "w+") as lock:
        content = {"host": "node7", "pid": 4711, "boot_id": "b", "since": "2025-01-31T12:00:00Z"}
        lock.write(json.dumps(content))
        lock.flush()
        whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, whole)
        yield


def test_prune_is_refused_while_a_job_writes_and_names_it(run: Path, cli: Cli) -> None:
    with held_lock(run):
        done = cli("prune", run, "--keep-last", "1", status=STORAGE)
        assert "process 4711 on node7 since 2025-01-31" in complaint(done)
        for command in (["ls"], ["inspect"], ["verify"]):
            cli(*command, run)
    assert len(names(run)) == 3
    cli("prune", run, "--keep-last", "1")


def test_wrong_command_lines_are_usage_errors(run: Path, cli: Cli) -> None:
    for arguments in (
        ["ls"],
        ["ls", run, "--keep-last", "1"],
        ["prune", run],
        ["prune", run, "--keep-last", "0"],
        ["prune", run, "--keep-last", "-1"],
        ["prune", run, "--keep-last", "1", "--keep-every", "0"],
        ["prune", run / "step-00000100", "--keep-last", "1"],
    ):
        complaint(cli(*arguments, status=USAGE))
    assert len(names(run)) == 3


# --- inspect ---


def test_inspect_shows_the_checkpoints_and_what_the_newest_holds(run: Path, cli: Cli) -> None:
    (run / "step-00000300/state.pt").unlink()
    text = cli("inspect", run).stdout
    assert "newest complete step-00000200: step 200" in text
    assert '"loss": 25.0' in text
    assert "float32 [100]" in text
    assert "is missing" in text


def test_inspect_of_one_checkpoint(run: Path, cli: Cli, tmp_path: Path) -> None:
    for path in (run / "step-00000100", f"{run}/step-00000100/"):
        text = cli("inspect", path).stdout
        assert "step 100" in text
        assert "300" not in text
    shutil.move(run / "step-00000100", tmp_path / "elsewhere")
    assert "step 100" in cli("inspect", "elsewhere").stdout


def test_inspect_in_json_has_the_documented_keys(run: Path, cli: Cli) -> None:
    keys = keys_in(section("directories").split("Keys of `verify DIR`")[0])
    found = document(cli("inspect", "--json", run), "inspect", keys)
    assert found["newest"] == "step-00000300"
    assert found["files"][0]["tensors"][0]["name"] == "w"
    assert found["files"][0]["file"].endswith("step-00000300/state.pt")


def test_inspect_without_a_complete_checkpoint_has_status_1(run: Path, cli: Cli) -> None:
    for step in (100, 200, 300):
        (run / f"step-00000{step}/state.pt").unlink()
    assert "none of them is complete" in cli("inspect", run, status=DAMAGED).stdout
    found = json.loads(cli("inspect", "--json", run, status=DAMAGED).stdout)
    assert (found["newest"], found["files"]) == (None, [])


# --- verify ---


def test_verify_reads_everything_and_documents_its_keys(run: Path, cli: Cli) -> None:
    assert "every checksum agrees" in cli("verify", run).stdout
    keys = keys_in(section("directories").split("Keys of `verify DIR`")[1])
    found = document(cli("verify", "--json", run), "verify", keys)
    assert found["good"]
    assert found["verified"] == ["step-00000300", "step-00000200", "step-00000100"]
    sizes = [(run / f"step-00000{step}/state.pt").stat().st_size for step in (100, 200, 300)]
    assert found["read"]["bytes"] == sum(sizes)


def test_verify_finds_every_flipped_bit(run: Path, cli: Cli) -> None:
    path = run / "step-00000200/state.pt"
    size = path.stat().st_size
    for at in (0, 100, size // 2, size - 1, *range(7, size, 211)):
        flip(path, at)
        found = json.loads(cli("verify", "--json", run, status=DAMAGED).stdout)
        assert not found["good"]
        assert all("step-00000200" in damage["file"] for damage in found["damages"])
        assert found["damages"]
        assert "structure and sizes are good" in cli("verify", "--quick", run).stdout
        flip(path, at)
    cli("verify", run)


def test_verify_names_the_tensor_that_is_damaged(run: Path, cli: Cli) -> None:
    path = run / "step-00000200/state.pt"
    flip(path, path.read_bytes().index(struct.pack("<ff", 200.0, 200.0)))
    text = cli("verify", run, status=DAMAGED).stdout
    assert "'w'" in text or "data/0" in text
    assert "1 damage found" in text


def test_verify_counts_damaged_ones_and_not_unfinished_ones(run: Path, cli: Cli) -> None:
    (run / "step-00000100/manifest.json").unlink()
    cli("verify", run)
    (run / "step-00000200/state.pt").write_bytes(b"")
    assert "has 0 bytes" in cli("verify", "--quick", run, status=DAMAGED).stdout
    cli("verify", run / "step-00000300")
    cli("verify", run / "step-00000200", status=DAMAGED)
    cli("verify", run / "step-00000100", status=DAMAGED)


def test_verify_puts_parts_together(run: Path, cli: Cli) -> None:
    folder = run / "step-00000300"
    data = (folder / "state.pt").read_bytes()
    (folder / "state.pt").unlink()
    inner = manifest_of(300, 3, folder.name, data)
    parts = inner["streams"][0]["parts"] = []
    cuts = [0, 1000, 1700, len(data)]
    for index, (begin, end) in enumerate(itertools.pairwise(cuts)):
        name = f"state.pt.part-{index:03}-of-003"
        (folder / name).write_bytes(data[begin:end])
        part = {"root": ROOT_ID, "file": name, "offset": begin, "length": end - begin}
        parts.append({**part, "crc32": crc(data[begin:end])})
    (folder / "manifest.json").write_text(manifest_text(inner))
    assert "every checksum agrees" in cli("verify", folder, status=GOOD).stdout
    assert "in 3 parts" in cli("inspect", folder).stdout
    inner["streams"][0]["crc32"] = "00000000"
    (folder / "manifest.json").write_text(manifest_text(inner))
    assert "whole stream" in cli("verify", folder, status=DAMAGED).stdout
