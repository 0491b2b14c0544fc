# SPDX-License-Identifier: Apache-2.0
"""Options: what is refused, what each one does, and the environment variables above them."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import first_difference, read

import fastpersist as fp

ENGINES = ["auto", "uring", "libaio", "threads", "buffered"]


def state() -> dict[str, Any]:
    torch.manual_seed(5)
    return {"large": torch.randn(700_001), "small": torch.randn(3), "step": 1}


@pytest.fixture(scope="module")
def expected() -> bytes:
    """What every save of state() as archive.pt must leave."""
    buffer = io.BytesIO()
    torch.save(state(), buffer)
    return buffer.getvalue()


def test_defaults_are_documented_values() -> None:
    assert dataclasses.asdict(fp.Options()) == {
        "engine": "auto",
        "block_bytes": None,
        "queue_depth": None,
        "staging_bytes": None,
        "direct": True,
        "sync": True,
        "atomic": True,
        "retries": 1,
    }


def test_options_are_frozen_equal_hashable_and_picklable() -> None:
    options = fp.Options(engine="threads", queue_depth=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.queue_depth = 4  # type: ignore[misc]
    assert options == fp.Options(engine="threads", queue_depth=3) != fp.Options()
    assert len({options, fp.Options(engine="threads", queue_depth=3)}) == 1
    assert pickle.loads(pickle.dumps(options)) == options
    assert dataclasses.replace(options, queue_depth=5).queue_depth == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine", "aio"),
        ("engine", ""),
        ("engine", None),
        ("engine", b"uring"),
        ("block_bytes", 0),
        ("block_bytes", -4096),
        ("block_bytes", 4095),
        ("block_bytes", 4097),
        ("block_bytes", (1 << 30) + 4096),
        ("block_bytes", 1 << 63),
        ("block_bytes", 1 << 70),
        ("block_bytes", 4096.0),
        ("block_bytes", "4096"),
        ("queue_depth", 0),
        ("queue_depth", 257),
        ("queue_depth", 1 << 40),
        ("staging_bytes", 0),
        ("staging_bytes", 4095),
        ("retries", -1),
        ("retries", 1 << 40),
        ("retries", None),
        ("retries", True),
        ("block_bytes", True),
        ("direct", "no"),
        ("direct", None),
        ("sync", "false"),
        ("sync", 1),
        ("atomic", 0),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(fp.ArgumentError, match=field) as caught:
        fp.Options(**{field: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


def test_replace_checks_too() -> None:
    with pytest.raises(ValueError, match="queue_depth"):
        dataclasses.replace(fp.Options(), queue_depth=0)


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="blocks"):
        fp.Options(blocks=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("options", [{}, {"engine": "uring"}, "uring", 5, fp.Options])
def test_only_options_are_options(options: object, tmp_path: Path) -> None:
    with pytest.raises(fp.ArgumentError, match="Options"):
        fp.save(state(), tmp_path / "archive.pt", options=options)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_bytes", 4096),
        ("block_bytes", 1 << 30),
        ("queue_depth", 1),
        ("queue_depth", 256),
        ("staging_bytes", 4096),
        ("staging_bytes", 1 << 20),
        ("retries", 0),
        ("retries", 7),
        ("direct", False),
        ("sync", False),
        ("atomic", False),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_no_option_changes_a_byte(
    engine: str, field: str, value: object, tmp_path: Path, expected: bytes
) -> None:
    options = fp.Options(engine=engine, **{field: value})  # type: ignore[arg-type]
    info = fp.save(state(), tmp_path / "archive.pt", options=options)
    assert first_difference(read(tmp_path / "archive.pt"), expected) is None
    assert info.bytes == len(expected)


def test_any_staging_and_block_sizes_work_together(run_python: Any) -> None:
    # In another process, for one that waits in the core cannot be interrupted.
    program = """
import io, fastpersist as fp, torch
torch.manual_seed(5)
state = [torch.randn(70_001), torch.randn(3)]
expected = io.BytesIO()
torch.save(state, expected)
for staging in (None, 4096, 4097, 12287, 12288, 16384, 100_001, 102_400, 1_000_000):
    for block in (None, 4096, 12288, 20480, 98304, 1 << 20):
        for engine in ("uring", "buffered"):
            print(staging, block, engine, flush=True)
            options = fp.Options(engine=engine, staging_bytes=staging, block_bytes=block)
            fp.save(state, "archive.pt", options=options)
            with open("archive.pt", "rb") as file:
                assert file.read() == expected.getvalue()
print("done")
"""
    assert run_python(program, timeout=60).stdout.endswith("done\n")


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_engine_is_where_the_choice_starts(engine: str, tmp_path: Path) -> None:
    info = fp.save(state(), tmp_path / "archive.pt", options=fp.Options(engine=engine))
    order = ENGINES[ENGINES.index(engine) :]
    assert info.engine in order
    if info.engine == engine:
        assert "asked for" in info.engine_reason or "direct" in info.engine_reason
    else:  # the machine does not have it: the reason says so
        assert engine in info.engine_reason or "direct" in info.engine_reason


def test_buffered_and_direct_false_do_not_write_directly(tmp_path: Path) -> None:
    for options in (fp.Options(engine="buffered"), fp.Options(direct=False)):
        info = fp.save(state(), tmp_path / "archive.pt", options=options)
        assert (info.direct, info.engine) == (False, "buffered")


def test_atomic_gives_a_new_inode_and_in_place_keeps_the_old(tmp_path: Path) -> None:
    path = tmp_path / "archive.pt"
    fp.save({"step": 0}, path)
    first = path.stat().st_ino
    with open(path, "rb") as reader:  # so that its number is not used again
        fp.save({"step": 1}, path)
        second = path.stat().st_ino
        assert second != first
        assert torch.load(reader, weights_only=True) == {"step": 0}
    fp.save({"step": 2}, path, options=fp.Options(atomic=False))
    assert path.stat().st_ino == second
    assert torch.load(path, weights_only=True) == {"step": 2}


def test_in_place_shortens_a_longer_file(tmp_path: Path, expected: bytes) -> None:
    path = tmp_path / "archive.pt"
    path.write_bytes(b"x" * (len(expected) + 100_000))
    path.chmod(0o640)
    fp.save(state(), path, options=fp.Options(atomic=False))
    assert first_difference(read(path), expected) is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


# --- Environment ---

PROGRAM = """
import os, sys, fastpersist as fp, numpy
options = fp.Options(engine=sys.argv[1], direct=sys.argv[2] == "direct")
try:
    info = fp.save({"a": numpy.zeros(100_000)}, "a.safetensors", options=options)
except fp.ArgumentError as error:
    print("refused:", error)
else:
    print(info.engine, info.direct)
"""


def test_the_environment_overrides_the_engine(run_python: Any) -> None:
    done = run_python(PROGRAM, "auto", "direct", environment={"FASTPERSIST_ENGINE": "buffered"})
    assert done.stdout == "buffered False\n"
    done = run_python(PROGRAM, "buffered", "direct", environment={"FASTPERSIST_ENGINE": "threads"})
    assert done.stdout in ("threads True\n", "buffered False\n")  # no direct I/O here: buffered


@pytest.mark.parametrize("word", ["0", "false", "No", "OFF"])
def test_the_environment_can_switch_direct_off(word: str, run_python: Any) -> None:
    done = run_python(PROGRAM, "auto", "direct", environment={"FASTPERSIST_DIRECT": word})
    assert done.stdout == "buffered False\n"


def test_the_environment_can_switch_direct_on(run_python: Any) -> None:
    with_option = run_python(PROGRAM, "auto", "direct").stdout
    on = {"FASTPERSIST_DIRECT": "1"}
    assert run_python(PROGRAM, "auto", "buffered", environment=on).stdout == with_option


def test_empty_variables_change_nothing(run_python: Any) -> None:
    empty = {"FASTPERSIST_ENGINE": "", "FASTPERSIST_DIRECT": "", "FASTPERSIST_LOG": ""}
    done = run_python(PROGRAM, "buffered", "direct", environment=empty)
    assert (done.stdout, done.stderr) == ("buffered False\n", "")


@pytest.mark.parametrize(
    ("variable", "word"),
    [("FASTPERSIST_ENGINE", "floppy"), ("FASTPERSIST_DIRECT", "perhaps")],
)
def test_nonsense_in_the_environment_is_refused_by_name(
    variable: str, word: str, run_python: Any
) -> None:
    done = run_python(PROGRAM, "auto", "direct", environment={variable: word})
    assert done.stdout.startswith("refused:")
    assert word in done.stdout
    assert variable in done.stdout


def test_the_environment_is_read_at_each_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPERSIST_ENGINE", "buffered")
    assert fp.save(state(), tmp_path / "a.pt").engine == "buffered"
    monkeypatch.delenv("FASTPERSIST_ENGINE")
    assert fp.save(state(), tmp_path / "a.pt").engine_reason != "buffered was asked for"
