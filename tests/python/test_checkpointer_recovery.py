# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run goes on from, whatever is lying in its directory; retention and deletion
(huggingface/transformers#35782, verl-project/verl#4873)."""

from __future__ import annotations

import copy
import errno
import json
import os
import pathlib
import random
import shutil
import threading
import zlib
from collections.abc import Callable
from typing import Any

import checkpoint_support as support
import faults_support as faults
import pytest
import torch
from checkpoint_support import Training, held

import fastpersist as fp
from fastpersist import _fill, _load, _recovery


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "x": torch.full((40_000,), float(step))}


def five(folder: Any, **arguments: Any) -> pathlib.Path:
    """Checkpoints of steps 1 to 5; their directory."""
    with support.open_run(folder, **arguments) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state_of(step), per_rank={"rank": step}).result(60)
    return pathlib.Path(folder, "run")


# --- The newest is damaged ---


def _flip(path: pathlib.Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def _rewrite_manifest(folder: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """With a true checksum."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())["manifest"]
    change(manifest)
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    path.write_text(f'{{"crc32": "{zlib.crc32(text.encode()):08x}", "manifest": {text}}}')


def _from_the_future(folder: pathlib.Path) -> None:
    """As a later release writes it."""
    _rewrite_manifest(folder, lambda m: m.update({"version": 99, "reader_version": 99}))


def _only_temporary(folder: pathlib.Path) -> None:
    (folder / "manifest.json").rename(folder / "manifest.json.tmp")
    (folder / "state.pt").rename(folder / "state.pt.tmp")


def _empty(folder: pathlib.Path) -> None:
    for path in folder.iterdir():
        path.unlink()


# What is done to it, and what the message says; None: it is no checkpoint and goes without a word.
DAMAGE: dict[str, tuple[Callable[[pathlib.Path], Any], str | None]] = {
    "file missing": (lambda d: (d / "state.pt").unlink(), "'state.pt' is missing"),
    "file empty": (lambda d: (d / "state.pt").write_bytes(b""), "0 bytes instead of"),
    "another step's file": (
        lambda d: shutil.copy(d.parent / "step-00000004/state.pt", d / "state.pt"),
        "not the file that the manifest describes",
    ),
    "another step's file for the rank": (
        lambda d: shutil.copy(d.parent / "step-00000004/rank-00000.pt", d / "rank-00000.pt"),
        "not the file that the manifest describes",
    ),
    "file cut": (lambda d: os.truncate(d / "state.pt", 100_000), "100000 bytes instead of"),
    "bit in the data": (lambda d: _flip(d / "state.pt", 80_000), "CRC-32"),
    "bit in the pickle": (lambda d: _flip(d / "state.pt", 80), ""),
    "bit in the rank's file": (lambda d: _flip(d / "rank-00000.pt", 80), ""),
    "rank's file missing": (lambda d: (d / "rank-00000.pt").unlink(), "'rank-00000.pt' is missing"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), None),
    "manifest cut": (lambda d: os.truncate(d / "manifest.json", 50), "manifest is damaged"),
    "manifest empty": (lambda d: (d / "manifest.json").write_text(""), "manifest is damaged"),
    "manifest zeros": (lambda d: (d / "manifest.json").write_bytes(bytes(300)), "manifest"),
    "temporary names only": (_only_temporary, None),
    "directory empty": (_empty, None),
    "directory missing": (shutil.rmtree, None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_when_the_newest_is_damaged_the_one_before_is_taken_and_the_reason_logged(
    damage: str, tmp_path: Any, warned: Any
) -> None:
    run = five(tmp_path)
    spoil, reason = DAMAGE[damage]
    spoil(run / "step-00000005")
    before = len(warned())
    with support.open_run(tmp_path) as ckpt:
        target = state_of(0)
        rank: dict[str, Any] = {"rank": 0}
        assert ckpt.restore(target, per_rank=rank) == 4
        assert support.difference(target, state_of(4)) == "" and rank == {"rank": 4}
        messages = warned()[before:]
        if reason is not None:
            found = [m for m in messages if "step-00000005" in m and "passed over" in m]
            assert found and reason in found[0], messages
        saved = ckpt.load()
        assert saved.step == 4 and saved.state["step"] == 4 and saved.per_rank == {"rank": 4}
        ckpt.save(6, state_of(6)).result(60)
        assert ckpt.load().step == 6 and ckpt.latest_step() == 6


def test_a_damaged_step_that_is_asked_for_by_number_is_an_error(tmp_path: Any) -> None:
    run = five(tmp_path)
    _flip(run / "step-00000003" / "state.pt", 80_000)
    with support.open_run(tmp_path) as ckpt:
        with pytest.raises(fp.CorruptCheckpointError, match="step-00000003"):
            ckpt.load(3)
        assert ckpt.load(2).state["step"] == 2
        with pytest.raises(fp.NotFoundError, match="step 9"):
            ckpt.restore(state_of(0), step=9, default=0)


def test_nothing_good_is_another_error_than_nothing_there(tmp_path: Any) -> None:
    run = five(tmp_path)
    with support.open_run(tmp_path / "new") as ckpt:
        assert ckpt.restore({"x": torch.ones(3)}, default=0) == 0
        assert ckpt.restore({"x": torch.ones(3)}, default=None) is None
        assert ckpt.latest_step() is None and ckpt.all_steps() == []
        for action in (lambda: ckpt.restore({"x": 1}), ckpt.load):
            with pytest.raises(fp.NotFoundError, match="no checkpoint"):
                action()
    for step in range(1, 6):
        _flip(run / f"step-0000000{step}" / "state.pt", 80_000)
    with support.open_run(tmp_path) as ckpt:
        target = state_of(0)
        with pytest.raises(fp.CorruptCheckpointError) as caught:
            ckpt.restore(target, default=0)
        assert caught.value.partially_restored
        for step in range(1, 6):
            assert f"step-0000000{step}" in str(caught.value)
        with pytest.raises(fp.CorruptCheckpointError) as caught:
            ckpt.load()
        assert not caught.value.partially_restored


def test_a_mismatch_is_an_error_and_not_a_reason_to_go_back(tmp_path: Any) -> None:
    five(tmp_path)
    with support.open_run(tmp_path) as ckpt:
        wrong: list[tuple[dict[str, Any], Any]] = [
            ({"step": 0, "x": torch.zeros(3)}, None),
            ({"step": 0, "y": torch.zeros(40_000)}, None),
            (state_of(0), {"other": 1}),
            (state_of(0), {"rank": 0, "other": 1}),
        ]
        for target, rank in wrong:
            before = copy.deepcopy(target)
            with pytest.raises(fp.MismatchError, match="nothing was touched"):
                ckpt.restore(target, per_rank=rank)
            assert support.difference(target, before) == ""


def test_a_newer_format_is_refused_with_a_clear_message(tmp_path: Any) -> None:
    run = five(tmp_path)
    _from_the_future(run / "step-00000005")
    with support.open_run(tmp_path) as ckpt:
        for action in (lambda: ckpt.restore(state_of(0), default=0), ckpt.load):
            with pytest.raises(fp.UnsupportedFileError, match=r"step-00000005.*99"):
                action()
        assert ckpt.load(4).step == 4


def test_the_highest_commit_number_is_the_newest_whatever_names_and_times_say(
    tmp_path: Any,
) -> None:
    run = five(tmp_path)
    with support.open_run(tmp_path) as ckpt:
        ckpt.save(2, state_of(20)).result(60)  # the run went back to step 2
        assert ckpt.latest_step() == 2 and ckpt.all_steps() == [1, 2, 3, 4, 5]
    for number, name in enumerate(sorted(os.listdir(run))):
        os.utime(run / name, (10_000 - number, 10_000 - number))  # a clock that was set back
    with support.open_run(tmp_path) as ckpt:
        assert ckpt.load().state["step"] == 20
        assert ckpt.load(2).state["step"] == 20


@pytest.mark.parametrize("swapped", [False, True])
def test_a_manifest_without_checksums_of_records_is_compared_by_those_of_the_files(
    swapped: bool, tmp_path: Any, warned: Any
) -> None:
    run = five(tmp_path)

    def forget(manifest: dict[str, Any]) -> None:
        for stream in manifest["streams"]:
            stream["record_crc32s"] = []

    _rewrite_manifest(run / "step-00000005", forget)
    if swapped:
        shutil.copy(run / "step-00000004/state.pt", run / "step-00000005/state.pt")
    with support.open_run(tmp_path) as ckpt:
        target = state_of(0)
        assert ckpt.restore(target) == (4 if swapped else 5)
        assert support.difference(target, state_of(4 if swapped else 5)) == ""
    assert any("not the file that the manifest" in message for message in warned()) is swapped


def test_what_fits_per_rank_is_known_before_anything_is_filled(tmp_path: Any) -> None:
    run = tmp_path / "run"
    with support.open_run(tmp_path) as ckpt:
        ckpt.save(1, state_of(1), per_rank={"w": torch.ones(4), "n": 1}).result(60)
        target = state_of(0)
        rank: dict[str, Any] = {"w": torch.zeros(3), "n": 0}
        with pytest.raises(fp.MismatchError, match="nothing was touched") as caught:
            ckpt.restore(target, per_rank=rank)
        assert [name for name, _ in caught.value.different] == ["w"]
        assert support.difference(target, state_of(0)) == ""
        assert rank["n"] == 0
        assert ckpt.restore(target, per_rank=rank, strict=False) == 1
        assert support.difference(target, state_of(1)) == "" and rank["n"] == 1
        # Both are damaged: nothing of the first was filled when the second was found out.
        _flip(run / "step-00000001" / "rank-00000.pt", 200)
        target = state_of(0)
        with pytest.raises(fp.CorruptCheckpointError) as damaged:
            ckpt.restore(target, per_rank={"w": torch.zeros(4), "n": 0})
        assert not damaged.value.partially_restored
        assert support.difference(target, state_of(0)) == ""


def test_a_mismatch_after_a_damaged_one_says_that_tensors_were_overwritten(tmp_path: Any) -> None:
    run = tmp_path / "run"
    with support.open_run(tmp_path) as ckpt:
        ckpt.save(1, {"step": 1, "x": torch.ones(3)}).result(60)
        ckpt.save(2, state_of(2)).result(60)
        _flip(run / "step-00000002" / "state.pt", 80_000)
        target = state_of(0)
        with pytest.raises(
            fp.MismatchError, match="overwritten in part from a newer one"
        ) as caught:
            ckpt.restore(target)
        assert [name for name, _ in caught.value.different] == ["x"]
        target = {"step": 0, "x": torch.zeros(5)}
        with pytest.raises(fp.MismatchError, match="nothing was touched") as caught:
            ckpt.restore(target)
        assert "overwritten" not in str(caught.value) and target["step"] == 0


# --- Storage that fails ---


def restore_while_opening_fails(folder: str, error: int, taken: int | None) -> None:
    """taken: the step that stands in for the newest; None: it is an error."""
    for name in ("state.pt", "rank-00000.pt"):
        with support.open_run(folder) as ckpt:
            target = state_of(0)
            with faults.failing(f"openat 1 9999 errno {error} step-00000005/{name}"):
                try:
                    found = ckpt.restore(target, per_rank={"rank": 0})
                except fp.StorageError as caught:
                    assert taken is None and caught.errno == error, caught
                    assert name in str(caught)
                    assert support.difference(target, state_of(0)) == ""
                    found = None
                assert found == taken
                try:
                    loaded = ckpt.load().step
                except fp.StorageError as caught:
                    assert taken is None and caught.errno == error, caught
                    loaded = None
                assert loaded == taken
            assert ckpt.load().step == 5


@pytest.mark.parametrize(
    ("error", "taken"),
    [
        (errno.EMFILE, None),
        (errno.EACCES, None),
        (errno.ENOMEM, None),
        (errno.EIO, 4),
        (errno.EUCLEAN, 4),
        (errno.EBADMSG, 4),
    ],
)
def test_only_storage_that_lost_the_newest_is_a_reason_to_go_back(
    error: int, taken: int | None, tmp_path: Any
) -> None:
    five(tmp_path)
    faults.run(restore_while_opening_fails, str(tmp_path), error, taken, shim=True)


# --- Two that claim to be the newest ---


def merged(folder: pathlib.Path) -> pathlib.Path:
    """The first checkpoints of two runs, of steps 4 and 7, in one directory."""
    for name, step in (("a", 4), ("b", 7)):
        with support.open_run(folder / name) as ckpt:
            ckpt.save(step, state_of(step), per_rank={"rank": step}).result(60)
    shutil.move(folder / "b/run/step-00000007", folder / "a/run/step-00000007")
    return folder / "a"


def test_two_that_claim_to_be_the_newest_are_told_apart_by_step_or_by_name(tmp_path: Any) -> None:
    folder = merged(tmp_path)
    with support.open_run(folder) as ckpt:
        assert ckpt.all_steps() == [4, 7]
        for action in (
            lambda: ckpt.restore(state_of(0), default=0),
            ckpt.load,
            ckpt.latest_step,
        ):
            with pytest.raises(fp.CorruptCheckpointError, match=r"step-0000000[47].*generation="):
                action()
        for step in (4, 7):
            name = f"step-0000000{step}"
            choices: list[dict[str, Any]] = [{"step": step}, {"generation": name}]
            for choice in choices:
                target = state_of(0)
                rank = {"rank": 0}
                assert ckpt.restore(target, per_rank=rank, **choice) == step
                assert support.difference(target, state_of(step)) == "" and rank["rank"] == step
                saved = ckpt.load(**choice)
                assert saved.step == step and saved.path.name == name
                assert support.difference(saved.state, state_of(step)) == ""
        for action in (
            lambda: ckpt.load(generation="step-00000009"),
            lambda: ckpt.load(4, generation="step-00000007"),
            lambda: ckpt.restore(state_of(0), generation="step-00000009", default=0),
        ):
            with pytest.raises(fp.NotFoundError, match="is not there"):
                action()
        ckpt.save(9, state_of(9)).result(60)
        assert ckpt.latest_step() == 9 and ckpt.load().step == 9
        # What is older than a damaged one is not guessed either.
        _flip(folder / "run/step-00000009/state.pt", 80_000)
        with pytest.raises(fp.CorruptCheckpointError, match=r"step-0000000[47].*generation="):
            ckpt.load()


def test_two_of_one_step_that_claim_to_be_the_newest_are_told_apart_by_name(tmp_path: Any) -> None:
    run = five(tmp_path)
    shutil.copytree(run / "step-00000005", run / "best")
    with support.open_run(tmp_path) as ckpt:
        unclear: list[Callable[[], Any]] = [ckpt.load, lambda: ckpt.load(5)]
        for action in unclear:
            with pytest.raises(fp.CorruptCheckpointError, match="generation="):
                action()
        assert ckpt.load(generation="best").path.name == "best"
        assert ckpt.load(3).step == 3


# --- Leftovers ---


def test_a_leftover_that_cannot_be_removed_does_not_keep_a_run_from_going_on(
    tmp_path: Any, warned: Any
) -> None:
    run = five(tmp_path)
    stuck, other = run / "step-00000003", run / "step-00000002"
    (stuck / "manifest.json").unlink()
    (stuck / "state.pt").unlink()
    (stuck / "state.pt").mkdir()  # what is removed as a file is none
    (stuck / "state.pt" / "x").touch()
    (other / "manifest.json").unlink()
    with support.open_run(tmp_path) as ckpt:
        assert ckpt.load().step == 5 and ckpt.all_steps() == [1, 4, 5]
        ckpt.save(3, state_of(30)).result(60)
        assert ckpt.load(3).state["step"] == 30
    assert stuck.exists() and not other.exists(), "the others go all the same"
    found = [m for m in warned() if "step-00000003" in m and "could not be removed" in m]
    assert found and "state.pt" in found[0] and "irectory" in found[0], warned()


def test_the_file_opens_with_plain_torch(tmp_path: Any) -> None:
    training = Training()
    before = training.values()
    with support.open_run(tmp_path) as ckpt:
        ckpt.attach(training.optimizer)
        info = ckpt.save(1, training.state()).result(60)
    found = torch.load(f"{info.path}/state.pt", weights_only=True)
    assert support.difference(found, before) == ""


# --- Others in the directory ---


def test_two_checkpointers_on_one_directory_are_an_error(tmp_path: Any) -> None:
    with support.open_run(tmp_path) as ckpt:
        with pytest.raises(fp.StorageError, match="one process writes to a directory"):
            support.open_run(tmp_path)
        ckpt.save(1, {"x": 1}).result(60)
    support.open_run(tmp_path).close()


def test_foreign_files_are_never_touched(tmp_path: Any) -> None:
    run = tmp_path / "run"
    (run / "step-00000002").mkdir(parents=True)
    (run / "step-00000003.bak").mkdir()
    mine = ["notes.txt", "step-00000002/model.pt", "step-00000003.bak/x", "step-7", ".fp-x"]
    for name in mine:
        (run / name).write_text("mine")
    with support.open_run(tmp_path, keep_last=1) as ckpt:
        assert ckpt.restore({"x": torch.ones(1)}, default=0) == 0
        for step in range(1, 5):
            ckpt.save(step, state_of(step)).result(60)
        assert ckpt.all_steps() == [4]
    assert [name for name in mine if (run / name).read_text() != "mine"] == []
    os.unlink(run / ".fp-x")


def read_while_written(folder: str) -> None:
    """Another reader sees complete checkpoints only."""
    training = Training()
    reader = f"{folder}/run"
    with support.open_run(folder) as ckpt:
        ckpt.save(1, training.state()).result(60)
        for call, path in [("", ""), ("renameat", "manifest"), ("fdatasync", "state.pt")]:
            with held(folder, path=path, call=call) if call else held(folder) as hold:
                before = ckpt.all_steps()
                ticket = ckpt.save(before[-1] + 1, training.state())
                hold.reached()
                assert ckpt.all_steps() == before and ckpt.latest_step() == before[-1]
                newest = fp._core.Root(os.fsencode(reader), False).catalog()
                assert next(e["step"] for e in newest if e["state"] == "complete") == before[-1]
                hold.release()
                ticket.result(60)
    with support.open_run(folder) as ckpt:
        assert ckpt.all_steps() == [1, 2, 3, 4]


def test_who_reads_meanwhile_sees_complete_checkpoints_only(tmp_path: Any) -> None:
    faults.run(read_while_written, str(tmp_path), shim=True)


# --- Retention beside a reader ---


def retire_while(
    ckpt: fp.Checkpointer, monkeypatch: Any, module: Any, name: str, times: int, before: bool
) -> list[int]:
    """At the first calls of the function a newer checkpoint is made, and the older one goes."""
    function = getattr(module, name)
    made: list[int] = []

    def interrupted(*arguments: Any, **named: Any) -> Any:
        found = None if before else function(*arguments, **named)
        if len(made) < times:
            step = ckpt.all_steps()[-1]
            made.append(step + 1)
            ckpt.save(step + 1, state_of(step + 1), per_rank={"rank": step + 1}).result(60)
            ckpt.delete(step)
        return function(*arguments, **named) if before else found

    monkeypatch.setattr(module, name, interrupted)
    return made


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("how", ["load", "restore"])
def test_when_the_newest_is_retired_before_it_is_opened_the_newer_one_is_taken(
    how: str, times: int, tmp_path: Any, monkeypatch: Any
) -> None:
    with support.open_run(tmp_path) as ckpt:
        ckpt.save(1, state_of(1), per_rank={"rank": 1}).result(60)
        retire_while(ckpt, monkeypatch, _recovery, "candidates", times, before=False)
        newest = times + 1
        if how == "load":
            saved = ckpt.load()
            assert saved.step == newest and saved.per_rank == {"rank": newest}
            assert support.difference(saved.state, state_of(newest)) == ""
        else:
            target, own = state_of(0), {"rank": 0}
            assert ckpt.restore(target, per_rank=own) == newest
            assert support.difference(target, state_of(newest)) == ""
            assert own == {"rank": newest}


def test_a_directory_where_all_is_retired_again_and_again_is_an_error_in_the_end(
    tmp_path: Any, monkeypatch: Any
) -> None:
    with support.open_run(tmp_path) as ckpt:
        ckpt.save(1, state_of(1)).result(60)
        made = retire_while(ckpt, monkeypatch, _recovery, "candidates", 1000, before=False)
        with pytest.raises(fp.NotFoundError, match="step-"):
            ckpt.restore(state_of(0), default=0)
        assert 1 < len(made) < 100


def test_what_replaces_the_only_one_while_it_is_looked_for_is_found(
    tmp_path: Any, monkeypatch: Any
) -> None:
    with support.open_run(tmp_path) as ckpt:
        ckpt.save(1, state_of(1)).result(60)
        ckpt.save(2, state_of(2)).result(60)

        class Listing:
            """At first it saw neither: one was gone already, the other one not there yet."""

            looks = 0

            def catalog(self) -> list[dict[str, Any]]:
                self.looks += 1
                return ckpt._root.catalog() if self.looks > 1 else []

        root: Any = Listing()
        found = _recovery.candidates(root, ckpt.directory, None)
        assert [candidate.step for candidate in found] == [2, 1]


def test_a_step_that_is_asked_for_and_retired_meanwhile_is_not_there(
    tmp_path: Any, monkeypatch: Any
) -> None:
    with support.open_run(tmp_path) as ckpt:
        ckpt.save(1, state_of(1)).result(60)
        retire_while(ckpt, monkeypatch, _recovery, "candidates", 1, before=False)
        with pytest.raises(fp.NotFoundError, match="step 1 is not there"):
            ckpt.load(1)


@pytest.mark.parametrize(
    ("how", "module", "function"),
    [("load", _load, "_read_all"), ("restore", _fill, "fill_all")],
)
def test_retention_does_not_pull_away_what_is_being_read(
    how: str, module: Any, function: str, tmp_path: Any, monkeypatch: Any
) -> None:
    with support.open_run(tmp_path) as ckpt:
        ckpt.save(1, state_of(1), per_rank={"rank": 1, "x": torch.ones(5000)}).result(60)
        made = retire_while(ckpt, monkeypatch, module, function, 1, before=True)
        if how == "load":
            saved = ckpt.load()
            assert saved.step == 1 and saved.per_rank["rank"] == 1
            assert support.difference(saved.state, state_of(1)) == ""
        else:
            target = state_of(0)
            rank: dict[str, Any] = {"rank": 0, "x": torch.zeros(5000)}
            assert ckpt.restore(target, per_rank=rank) == 1
            assert support.difference(target, state_of(1)) == ""
            assert rank["rank"] == 1 and torch.equal(rank["x"], torch.ones(5000))
        assert made == [2] and ckpt.all_steps() == [2]


def test_who_loads_while_another_saves_and_retires_always_finds_a_whole_one(tmp_path: Any) -> None:
    last = 40
    with support.open_run(tmp_path, keep_last=1) as ckpt:
        ckpt.save(1, state_of(1), per_rank={"rank": 1}).result(60)
        failures: list[BaseException] = []

        def save_all() -> None:
            try:
                for step in range(2, last + 1):
                    ckpt.save(step, state_of(step), per_rank={"rank": step}).result(60)
            except BaseException as error:
                failures.append(error)

        reader = fp._core.Root(os.fsencode(ckpt.directory), False)
        saver = threading.Thread(target=save_all)
        saver.start()
        newest = 0
        try:
            while saver.is_alive():
                found = _recovery.load_first(
                    lambda: _recovery.candidates(reader, ckpt.directory, None), None, None
                )
                assert found is not None and found.step >= newest
                newest = found.step
                assert support.difference(found.state, state_of(newest)) == ""
                assert found.per_rank == {"rank": newest}
        finally:
            saver.join()
        assert failures == [] and ckpt.load().step == last


# --- Retention ---


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [
        (None, None, [1, 2, 3, 4, 5]),
        (1, None, [5]),
        (2, None, [4, 5]),
        (1, 2, [2, 4, 5]),
        (2, 3, [3, 4, 5]),
        (9, None, [1, 2, 3, 4, 5]),
    ],
)
def test_what_stays_is_what_was_asked_for(
    keep_last: int | None, keep_every: int | None, left: list[int], tmp_path: Any
) -> None:
    run = five(tmp_path, keep_last=keep_last, keep_every=keep_every)
    with support.open_run(tmp_path) as ckpt:
        assert ckpt.all_steps() == left
        assert [ckpt.load(step).state["step"] for step in left] == left
    assert len([name for name in os.listdir(run) if name.startswith("step-")]) == len(left)


def test_delete_removes_a_step_and_nothing_else(tmp_path: Any) -> None:
    run = five(tmp_path)
    with support.open_run(tmp_path) as ckpt:
        ckpt.delete(5)
        assert ckpt.all_steps() == [1, 2, 3, 4] and ckpt.latest_step() == 4
        with pytest.raises(fp.NotFoundError, match="step 5"):
            ckpt.delete(5)
        ckpt.save(5, state_of(50)).result(60)
        assert ckpt.load().state["step"] == 50
    assert not [name for name in os.listdir(run) if "retired" in name]


def fail_to_replace(folder: str, keep: int, step: int) -> None:
    """A new save that fails retires nothing."""
    with support.open_run(folder, keep_last=keep) as ckpt:
        for earlier in range(1, keep + 1):
            ckpt.save(earlier, state_of(earlier)).result(60)
        with faults.failing("pwrite-at 100000 100000 errno 28 state.pt"):
            support.failure(ckpt.save(step, state_of(step)))
        assert ckpt.all_steps() == list(range(1, keep + 1))
        assert ckpt.load().state["step"] == keep


@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step"])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_save_that_fails_retires_nothing(keep: int, again: bool, tmp_path: Any) -> None:
    faults.run(fail_to_replace, str(tmp_path), keep, keep if again else keep + 1, shim=True)


def die_while_retiring(folder: str, rule: str) -> None:
    with support.open_run(folder, keep_last=1) as ckpt:
        ckpt.save(1, state_of(1)).result(60)
        with faults.failing(rule):
            ckpt.save(2, state_of(2)).result(60)


MOMENTS = {
    "just before the commit": ("renameat 1 1 signal 9 step-00000002/manifest", 1),
    "before the mark": ("renameat 2 2 signal 9 manifest", 2),
    "before the data goes": ("unlinkat 1 1 signal 9 step-00000001", 2),
    "in the middle": ("unlinkat 2 2 signal 9 step-00000001", 2),
    "near the end": ("unlinkat 3 3 signal 9 step-00000001", 2),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_while_an_older_one_is_retired_leaves_the_newest(moment: str, tmp_path: Any) -> None:
    rule, newest = MOMENTS[moment]
    child = faults.start(die_while_retiring, str(tmp_path), rule, shim=True)
    assert child.wait() == -9
    with support.open_run(tmp_path, keep_last=1) as ckpt:
        assert ckpt.latest_step() == newest and ckpt.load().state["step"] == newest
        ckpt.save(3, state_of(3)).result(60)
        assert ckpt.all_steps() == [3]
    names = os.listdir(tmp_path / "run")
    assert [name for name in names if name.startswith("step-")] == ["step-00000003"], names


def test_any_damage_to_any_file_of_the_newest_gives_the_one_before_or_the_same_values(
    tmp_path: Any,
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    run = five(tmp_path)
    newest = run / "step-00000005"
    good = {path: path.read_bytes() for path in newest.iterdir()}
    for turn in range(60):
        path = chance.choice(sorted(good))
        data = bytearray(good[path])
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        else:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(data))
        with support.open_run(tmp_path) as ckpt:
            found = ckpt.load()
            assert found.step in (4, 5), turn
            assert support.difference(found.state, state_of(found.step)) == "", (turn, path)
            target = state_of(0)
            assert ckpt.restore(target, per_rank={"rank": 0}) == found.step, (turn, path)
            assert support.difference(target, found.state) == "", (turn, path)
        if newest.exists():
            path.write_bytes(good[path])
        else:  # without a manifest it is a leftover
            newest.mkdir()
            for name, content in good.items():
                name.write_bytes(content)
